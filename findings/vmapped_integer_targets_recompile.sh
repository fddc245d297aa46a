#!/usr/bin/env bash
# Software: torch 2.13.0.
# Input: torch.compile(torch.func.vmap(torch.func.grad(loss))) of a linear classifier, for batches of six lengths, as a
# simulation of several workers meets them. torch.compile notices the second length and compiles for any length.
# One would guess: two compilations, one for the first length and one for all others.
# Behavior: with integer targets (cross entropy, or a gather by hand) every length compiles again, without a word; with
# floating-point targets two compilations suffice.
# Cause: a batching rule in C++ that asks for one size, `Tensor::size(dim)`, such as that of the workers' axis, turns all sizes
# of a symbolic tensor into numbers; the same holds for embedding, layer_norm, gelu, cat, convolutions, max, topk and sort.
# Output seen, compilations for six lengths:
#   cross entropy 6
#   gather 6
#   mean square 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import torch
from torch.func import grad, vmap
from torch.nn import functional as F


def compilations(loss, target):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(vmap(grad(loss)), backend=backend)
    for length in (16, 20, 24, 13, 31, 8):
        step(torch.randn(4, 8, 5), torch.randn(4, length, 8), target(length))
    return len(graphs)


def classes(length):
    return torch.randint(5, (4, length))


found = {
    "cross entropy": compilations(lambda w, x, y: F.cross_entropy(x @ w, y), classes),
    "gather": compilations(lambda w, x, y: -(x @ w).log_softmax(-1).gather(-1, y[:, None]).mean(), classes),
    "mean square": compilations(lambda w, x, y: F.mse_loss(x @ w, y), lambda length: torch.randn(4, length, 5)),
}
for name, count in found.items():
    print(name, count)
assert found == {"cross entropy": 6, "gather": 6, "mean square": 2}, found
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
