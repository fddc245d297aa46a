#!/usr/bin/env bash
# Software: schedulefree 1.4.1 (SGDScheduleFree, AdamWScheduleFree), torch 2.13.0 (LambdaLR).
# Input: a scheduler whose rate reaches 0, as linear and cosine schedules do at their end; then more steps.
# One would guess: at rate 0 nothing moves, as for every optimizer of torch.optim.
# Behavior: the weights that are evaluated (after optimizer.eval()) go on moving. A step averages them with the base
# iterate by a weight that follows the largest rate so far, not the present one. So a rate of 0 freezes no model, and
# the model that is saved depends on how long one waits.
# Output seen, movement of the evaluated weights in ten steps at rate 0, by that of the ten steps before:
#   SGD 0.00
#   SGDScheduleFree 0.35
#   AdamWScheduleFree 0.36
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 schedulefree==1.4.1
cat > program.py <<'EOF'
import schedulefree
import torch

data = torch.randn(20, 8, 4, generator=torch.Generator().manual_seed(1))


def evaluated(optimizer, w):
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    value = w.detach().clone()
    if hasattr(optimizer, "train"):
        optimizer.train()
    return value


def share(kind):
    w = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = kind([w], lr=0.05)
    if hasattr(optimizer, "train"):
        optimizer.train()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: float(count < 10))
    points = [evaluated(optimizer, w)]
    for t, x in enumerate(data):
        optimizer.zero_grad()
        (x @ w - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if t in (9, 19):
            points.append(evaluated(optimizer, w))
    assert optimizer.param_groups[0]["lr"] == 0
    return float((points[2] - points[1]).norm() / (points[1] - points[0]).norm())


for kind in (torch.optim.SGD, schedulefree.SGDScheduleFree, schedulefree.AdamWScheduleFree):
    found = share(kind)
    print(f"{kind.__name__} {found:.2f}")
    assert found == 0 if kind is torch.optim.SGD else found > 0.1
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
