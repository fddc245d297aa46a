#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, a CPU); torch 2.14.1 does the same.
# Input: a function that shifts the rows of its argument by one, in place: `x[1:] = x[:-1].clone()`, as a queue of features or a
# history does; and one that adds its reverse, `torch._foreach_add_([x], [x.flip(0)])`.
# One would guess: compiled, x is what it is in eager mode; the clone, or the copy that flip makes, is there for that.
# Behavior: Inductor drops the copy and writes into x while it still reads from it. So some rows come from rows that were
# written a moment before. With the backend "aot_eager", or by `torch.roll`, it is right.
# Output seen (first column in eager mode, compiled):
#   shift: [0.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0] [0.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 15.0]
#   roll: [21.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0] [21.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
#   reverse: [21.0, 21.0, 21.0, 21.0, 21.0, 21.0, 21.0, 21.0] [21.0, 21.0, 21.0, 21.0, 33.0, 36.0, 39.0, 42.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch


def shift(x):
    x[1:] = x[:-1].clone()


def roll(x):
    x.copy_(torch.roll(x, 1, 0))


def reverse(x):
    torch._foreach_add_([x], [x.flip(0)])


def first_column(function):
    x = torch.arange(24.0).view(8, 3)
    function(x)
    return x[:, 0].tolist()


for function, is_right in ((shift, False), (roll, True), (reverse, False)):
    eager, compiled = first_column(function), first_column(torch.compile(function))
    print(f"{function.__name__}: {eager} {compiled}")
    assert (eager == compiled) is is_right
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
