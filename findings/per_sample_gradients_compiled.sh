#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.func, torch.compile with Inductor, a CPU); torch 2.14.1 is right.
# Input: gradients of each sample, `vmap(grad(loss))`, of a loss that selects some elements of what it has computed by
# `index_select`.
# One would guess: compiled, they are those of eager mode, to rounding.
# Behavior: compiled by Inductor, each sample has the sum of all samples' gradients: it adds in place to a tensor of zeros that is
# expanded over the samples, so all of them share one row. With `x[index]` in place of `index_select`, with the backend
# "aot_eager", or for one sample it is right.
# Output seen (samples: gradient of the first one in eager mode, compiled):
#   index_select, 1: [0.0, 2.0] [0.0, 2.0]
#   index_select, 4: [0.0, 2.0] [0.0, 8.0]
#   index_select, 64: [0.0, 2.0] [0.0, 128.0]
#   x[index], 64: [0.0, 2.0] [0.0, 2.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
from torch.func import grad, vmap

index = torch.tensor([1])


def selected(x):
    return (x + 1).index_select(0, index).square().sum()


def indexed(x):
    return (x + 1)[index].square().sum()


def compared(name, loss, samples):
    torch._dynamo.reset()
    gradient, x = vmap(grad(loss)), torch.zeros(samples, 2)
    eager, compiled = gradient(x)[0].tolist(), torch.compile(gradient)(x)[0].tolist()
    print(f"{name}, {samples}: {eager} {compiled}")
    return eager, compiled


for samples in (1, 4, 64):
    assert compared("index_select", selected, samples) == ([0.0, 2.0], [0.0, 2.0 * samples])
assert compared("x[index]", indexed, 64) == ([0.0, 2.0], [0.0, 2.0])
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
