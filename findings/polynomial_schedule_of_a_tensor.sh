#!/usr/bin/env bash
# Software: transformers 5.23.0 (get_polynomial_decay_schedule_with_warmup), torch 2.13.0.
# Input: `AdamW(params, lr=torch.tensor(0.02))`, as PyTorch's recipe for compiled optimizers with schedulers says, and the schedule.
# One would guess: the rates that lr=0.02 gives.
# Behavior: the schedule keeps `optimizer.defaults["lr"]` and divides by it in every step. The parameter group has the same tensor,
# into which the scheduler writes, so the divisor changes with the rate. Warm-up is right, the decay is not, and its end is missed.
# Nothing is said. With another schedule of the package, `get_cosine_schedule_with_warmup`, both are equal.
# Output seen, the rate after 20 and after 50 of 50 steps:
#   polynomial: float 0.009351, tensor 0.009404; float 0.0001, tensor 0.001414
#   cosine: float 0.015406, tensor 0.015406; float 0.0, tensor 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > program.py <<'EOF'
import torch
from transformers.optimization import get_cosine_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup

SCHEDULES = {
    "polynomial": lambda o: get_polynomial_decay_schedule_with_warmup(o, 6, 50, power=2.0, lr_end=1e-4),
    "cosine": lambda o: get_cosine_schedule_with_warmup(o, 6, 50),
}


def rates(make, lr):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, seen = make(optimizer), []
    for _ in range(50):
        optimizer.step()
        scheduler.step()
        seen.append(round(float(optimizer.param_groups[0]["lr"]), 6))
    return seen[19], seen[49]


found = {}
for name, make in SCHEDULES.items():
    plain, tensor = rates(make, 0.02), rates(make, torch.tensor(0.02))
    found[name] = plain, tensor
    print(f"{name}:", "; ".join(f"float {a}, tensor {b}" for a, b in zip(plain, tensor)))
assert found == {
    "polynomial": ((0.009351, 0.0001), (0.009404, 0.001414)),
    "cosine": ((0.015406, 0.0), (0.015406, 0.0)),
}
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
