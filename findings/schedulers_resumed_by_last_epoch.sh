#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.optim.lr_scheduler); torch 2.14.1 does the same.
# Input: a run of 10 steps is resumed as the documentation of `last_epoch` says: a new optimizer loads the saved state, and the
# scheduler is made with the index of the last step.
# One would guess: the learning rate is the one before the interruption.
# Behavior: the constructor of a scheduler takes a step. Schedulers that multiply the current rate do so once more: `StepLR` if
# the index is at the end of a stage, `ConstantLR` at the end of its time. `SequentialLR` begins again, as its parts are made
# without an index. Those that compute the rate from the first one, as `LambdaLR`, are right. All are right if the scheduler is
# made without `last_epoch`, and then optimizer and scheduler load their states.
# Output seen:
#   StepLR: 0.1 before, 0.01 with last_epoch, 0.1 with load_state_dict
#   ConstantLR: 1.0 before, 2.0 with last_epoch, 1.0 with load_state_dict
#   SequentialLR: 0.8536 before, 0.1 with last_epoch, 0.8536 with load_state_dict
#   LambdaLR: 0.3487 before, 0.3487 with last_epoch, 0.3487 with load_state_dict
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import copy

import torch
from torch.optim import lr_scheduler as schedulers

STEPS = 10
MAKE = {
    "StepLR": lambda o, **last: schedulers.StepLR(o, 10, **last),
    "ConstantLR": lambda o, **last: schedulers.ConstantLR(o, 0.5, 10, **last),
    "SequentialLR": lambda o, **last: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=5), schedulers.CosineAnnealingLR(o, 20)], [5], **last
    ),
    "LambdaLR": lambda o, **last: schedulers.LambdaLR(o, lambda count: 0.9**count, **last),
}
EXPECTED = {
    "StepLR": (0.1, 0.01, 0.1),
    "ConstantLR": (1.0, 2.0, 1.0),
    "SequentialLR": (0.8536, 0.1, 0.8536),
    "LambdaLR": (0.3487, 0.3487, 0.3487),
}


def new():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rate(optimizer):
    return round(optimizer.param_groups[0]["lr"], 4)


for name, make in MAKE.items():
    optimizer = new()
    scheduler = make(optimizer)
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    resumed, loaded = new(), new()
    resumed.load_state_dict(saved[0])
    make(resumed, last_epoch=STEPS - 1)
    other = make(loaded)
    loaded.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    found = rate(optimizer), rate(resumed), rate(loaded)
    print("{}: {} before, {} with last_epoch, {} with load_state_dict".format(name, *found))
    assert found == EXPECTED[name]
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
