#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, a CPU); torch 2.14.1 does the same.
# Input: an update in place that returns what the weights were before it, as rows, times a factor. The factor is a tensor of ones,
# as a mask that keeps all or a scale that is not used yet is.
# One would guess: compiled, the result is what the weights were, for every factor, since a product is a new tensor.
# Behavior: Inductor leaves out a product with ones, and what remains is a view of the weights, which the update writes over: the
# result is what they are after it. Without the view, with another factor, or with the backend "aot_eager" it is right.
# Output seen (case: result in eager mode, compiled):
#   a vector, ones: [0.0, 1.0, 2.0, 3.0] [0.0, 1.0, 2.0, 3.0]
#   rows, ones: [0.0, 1.0, 2.0, 3.0] [-1.0, 0.0, 1.0, 2.0]
#   rows, halves: [0.0, 0.5, 1.0, 1.5] [0.0, 0.5, 1.0, 1.5]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import torch


def a_vector(weights, gradient):
    before = weights * torch.ones(4)
    weights.sub_(gradient)
    return before


def rows(weights, gradient, factor=1.0):
    before = weights.view(2, 2) * torch.full((2, 2), factor)
    weights.sub_(gradient)
    return before


def halves(weights, gradient):
    return rows(weights, gradient, 0.5)


def result(run):
    return run(torch.arange(4.0), torch.ones(4)).flatten().tolist()


named = {"a vector, ones": a_vector, "rows, ones": rows, "rows, halves": halves}
found = {name: (result(run), result(torch.compile(run))) for name, run in named.items()}
for name, (eager, compiled) in found.items():
    print(f"{name}: {eager} {compiled}")
assert found == {
    "a vector, ones": ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]),
    "rows, ones": ([0.0, 1.0, 2.0, 3.0], [-1.0, 0.0, 1.0, 2.0]),
    "rows, halves": ([0.0, 0.5, 1.0, 1.5], [0.0, 0.5, 1.0, 1.5]),
}, found
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
