#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.optim, torch.optim.lr_scheduler).
# Input: an optimizer of two groups (with and without weight decay, or body and head) whose learning rate is one tensor,
# lr=torch.tensor(0.1), as PyTorch's recipe for compiled optimizers with schedulers says; and a scheduler.
# One would guess: the rates that lr=0.1 gives.
# Behavior: the groups share the tensor, and a scheduler fills it in place for one group after the other. So rates per
# group (lists of LambdaLR, OneCycleLR) are those of the last group for all, and ReduceLROnPlateau multiplies by its
# factor once for each group. Nothing is said. Other schedules, equal for all groups, are right. All schedules are right
# if each group is given its own tensor.
# Output seen, the groups' rates after three steps:
#   LambdaLR [1, 0.1]: lr=0.1 [0.1, 0.01], one tensor [0.01, 0.01], own tensors [0.1, 0.01]
#   OneCycleLR max_lr=[0.1, 0.01]: lr=0.1 [0.095, 0.0095], one tensor [0.0095, 0.0095], own tensors [0.095, 0.0095]
#   ReduceLROnPlateau factor=0.5: lr=0.1 [0.025, 0.025], one tensor [0.0063, 0.0063], own tensors [0.025, 0.025]
#   ExponentialLR gamma=0.5: lr=0.1 [0.0125, 0.0125], one tensor [0.0125, 0.0125], own tensors [0.0125, 0.0125]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

schedulers = {
    "LambdaLR [1, 0.1]": lambda optimizer: LambdaLR(optimizer, [lambda t: 1, lambda t: 0.1]),
    "OneCycleLR max_lr=[0.1, 0.01]": lambda optimizer: OneCycleLR(optimizer, [0.1, 0.01], total_steps=10),
    "ReduceLROnPlateau factor=0.5": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "ExponentialLR gamma=0.5": lambda optimizer: ExponentialLR(optimizer, 0.5),
}


def rates(make, lr, own):
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    groups = [{"params": body.parameters()}, {"params": head.parameters(), "weight_decay": 0.0}]
    if own:
        groups = [{**group, "lr": lr.clone()} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        head(body(torch.ones(3, 2))).square().mean().backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


differ = {}
for name, make in schedulers.items():
    plain = rates(make, 0.1, False)
    one, own = (rates(make, torch.tensor(0.1), each) for each in (False, True))
    print(f"{name}: lr=0.1 {plain}, one tensor {one}, own tensors {own}")
    assert own == plain, (name, plain, own)
    differ[name] = one != plain
    if name.startswith("Reduce"):
        assert one == [round(0.1 * 0.5**4, 4)] * 2, one
    else:
        assert one == [plain[1]] * 2, one
assert list(differ.values()) == [True, True, True, False], differ
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
