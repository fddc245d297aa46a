#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, on a CPU); torch 2.14.1 does the same.
# Input: the position of the smallest element of a tensor computed from a transposed one, as of a heat map: `(x.T + 1).argmin()`.
# One would guess: the position in eager mode, which counts the rows of the computed tensor.
# Behavior: Inductor fuses the computation into the reduction, and counts in the order in which it reads memory, which is the
# order of `x` and not of `x.T`. The backend "aot_eager" gives the right position. Of a tensor reshaped to one axis Inductor is
# right, too.
# Output seen (eager, aot_eager, inductor):
#   argmin: 4 4 2
#   argmax: 1 1 3
#   argmin of one axis: 4 4 4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch

x = torch.tensor([[2.0, 1.0, 0.0], [4.0, 2.0, 3.0]])
POSITIONS = {
    "argmin": (lambda x: (x.T + 1).argmin(), [4, 4, 2]),
    "argmax": (lambda x: (x.T + 1).argmax(), [1, 1, 3]),
    "argmin of one axis": (lambda x: (x.T + 1).reshape(-1).argmin(), [4, 4, 4]),
}
for name, (position, expected) in POSITIONS.items():
    compiled = [torch.compile(position, backend=backend) for backend in ("aot_eager", "inductor")]
    found = [int(of(x)) for of in (position, *compiled)]
    print(f"{name}:", *found)
    assert found == expected
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
