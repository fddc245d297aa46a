#!/usr/bin/env bash
# Software: numpy 2.4.6.
# Input: default_rng([seed, worker]) and default_rng([seed, worker, step, stream]), one generator for each worker and purpose.
# One would guess: other numbers, other draws.
# Behavior: a list of up to four numbers is filled up with zeros to four, so zeros at its end do not count. Worker 0 draws
# what default_rng(seed) draws, in step 0 too; a list of five numbers draws something else, even if all others are zeros.
# Zeros at the beginning count, so [worker, seed] has no such pair for seeds above 0.
# Output seen:
#   7                [944, 625, 684]
#   [7, 0]           [944, 625, 684]
#   [7, 0, 0, 0]     [944, 625, 684]
#   [7, 0, 0, 0, 0]  [305, 797, 203]
#   [7, 1]           [870, 770, 875]
#   [0, 7]           [796, 38, 225]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile numpy==2.4.6
cat > program.py <<'EOF'
from numpy.random import default_rng

seeds = 7, [7, 0], [7, 0, 0, 0], [7, 0, 0, 0, 0], [7, 1], [0, 7]
draws = [default_rng(seed).integers(1000, size=3).tolist() for seed in seeds]
for seed, draw in zip(seeds, draws, strict=True):
    print(f"{seed!s:16} {draw}")
assert draws[0] == draws[1] == draws[2], draws
assert len({tuple(draw) for draw in draws}) == 4, draws
EOF
venv/bin/python program.py
