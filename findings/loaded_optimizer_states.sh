#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.optim).
# Input: one saved state, {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, read once with torch.load, from
# which two runs go on, one after the other (another rate, another seed, or workers simulated in one process).
# One would guess: load_state_dict copies, as that of a module does, so both runs begin alike.
# Behavior: Optimizer.load_state_dict keeps the tensors that it is given (of the right dtype and device), and later steps
# write to them. The second run begins with the moments and the count of steps at which the first one ended, in silence.
# SGD with momentum does so, too, without its count. With copy.deepcopy(saved["optimizer"]) both runs are equal.
# Output seen, largest difference between the two runs' parameters after five steps:
#   Adam: as loaded 0.0077, copied 0
#   SGD with momentum: as loaded 0.029, copied 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import copy

import torch

OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, 0.01),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
}


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def run(make, saved, copies):
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]) if copies else saved["optimizer"])
    train(model, optimizer, 5)
    return model.weight.detach().clone()


for name, make in OPTIMIZERS.items():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")
    differences = []
    for copies in (False, True):
        saved = torch.load("saved.pt")
        first, second = run(make, saved, copies), run(make, saved, copies)
        differences.append(float((first - second).abs().max()))
    print(f"{name}: as loaded {differences[0]:.2g}, copied {differences[1]:.2g}")
    assert differences[0] > 1e-3 and differences[1] == 0, differences
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
