#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.optim.swa_utils.AveragedModel, use_buffers=True).
# Input: a module with a causal mask as a buffer, -inf above the diagonal, which no step ever changes.
# One would guess: the average of a buffer with itself is the buffer.
# Behavior: from the second update on, each infinite entry is NaN, and so are most outputs; with the equal mean and with
# the EMA. The parameters are finite, so only the averaged model's own outputs show it.
# Output seen:
#   equal mean, update 1: 0 NaN in the mask, output finite True
#   equal mean, update 2: 6 NaN in the mask, output finite False
#   EMA, update 1: 0 NaN in the mask, output finite True
#   EMA, update 2: 6 NaN in the mask, output finite False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x):
        return (self.query(x) @ self.key(x).T + self.mask).softmax(-1) @ x


x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
for name, options in {"equal mean": {}, "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}}.items():
    model = Attention()
    averaged = AveragedModel(model, use_buffers=True, **options)
    for update in (1, 2):
        averaged.update_parameters(model)
        holes, finite = int(averaged.module.mask.isnan().sum()), bool(averaged(x).isfinite().all())
        print(f"{name}, update {update}: {holes} NaN in the mask, output finite {finite}")
        assert (holes, finite) == ((0, True) if update == 1 else (6, False))
assert model(x).isfinite().all()
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
