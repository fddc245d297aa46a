#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, a CPU).
# Input: a training step calls a custom operator once for each of six updated weights, as one does to log or to send them.
# One would guess: compiled, the calls come in the order in which the program makes them, at least with every batch.
# Behavior: calls that do not depend on one another come in an order that Inductor chooses, and it depends on the size of the
# batch. Ranks that compile one program for batches of 2 and 3 samples send their weights in other orders.
# Output seen (size of the batch, order of the calls):
#   2 eager [0, 1, 2, 3, 4, 5] compiled [0, 1, 2, 3, 4, 5]
#   3 eager [0, 1, 2, 3, 4, 5] compiled [5, 4, 3, 2, 1, 0]
#   8 eager [0, 1, 2, 3, 4, 5] compiled [5, 4, 3, 2, 0, 1]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
from torch import Tensor

called = []


@torch.library.custom_op("demo::send", mutates_args=())
def send(x: Tensor, number: int) -> Tensor:
    called.append(number)
    return x.clone()


@send.register_fake
def _(x, number):
    return torch.empty_like(x)


def loss(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return (x**2).mean()


def step(weights, x):
    pairs = zip(weights, torch.func.grad(loss)(weights, x), strict=True)
    return [send(w - 0.1 * g, number) for number, (w, g) in enumerate(pairs)]


def order(run, size):
    called.clear()
    run([torch.eye(4) for _ in range(6)], torch.ones(size, 4))
    return list(called)


found = {size: (order(step, size), order(torch.compile(step, dynamic=False), size)) for size in (2, 3, 8)}
for size, (eager, compiled) in found.items():
    print(size, "eager", eager, "compiled", compiled)
in_order = [0, 1, 2, 3, 4, 5]
assert found == {2: (in_order, in_order), 3: (in_order, in_order[::-1]), 8: (in_order, [5, 4, 3, 2, 0, 1])}, found
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
