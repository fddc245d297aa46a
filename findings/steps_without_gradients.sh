#!/usr/bin/env bash
# Software: pytorch-optimizer 4.1.0, dadaptation 3.2, schedulefree 1.4.1; torch 2.13.0 for comparison.
# Input: optimizer.step() once before training, when no parameter has a gradient yet. Programs do so to silence the
# warning of a scheduler that is stepped first, or in a step whose batch used no parameter.
# One would guess: a step without gradients changes nothing, as for torch.optim.
# Behavior: many optimizers count such a step (in their param_groups), so bias correction, warmup and averages are those
# of a later step: all further steps differ, without a word. DAdaptSGD divides by zero.
# Output seen, of the movement after six steps:
#   torch.optim.AdamW 0 %
#   pytorch_optimizer.AdaBelief 10 %
#   pytorch_optimizer.Lamb 31 %
#   pytorch_optimizer.Adan 16 %
#   schedulefree.AdamWScheduleFree 9 %
#   dadaptation.DAdaptSGD ZeroDivisionError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pytorch-optimizer==4.1.0 dadaptation==3.2 schedulefree==1.4.1
cat > program.py <<'EOF'
import dadaptation
import pytorch_optimizer
import schedulefree
import torch

start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
data = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))


def train(kind, options, early):
    w = torch.nn.Parameter(start.clone())
    optimizer = kind([w], **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    if early:
        optimizer.step()
    for x in data:
        optimizer.zero_grad()
        (x @ w - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return w.detach()


different = {}
for package, name, options in (
    (torch.optim, "AdamW", {"lr": 0.05}),
    (pytorch_optimizer, "AdaBelief", {"lr": 0.05}),
    (pytorch_optimizer, "Lamb", {"lr": 0.05}),
    (pytorch_optimizer, "Adan", {"lr": 0.05}),
    (schedulefree, "AdamWScheduleFree", {"lr": 0.05}),
    (dadaptation, "DAdaptSGD", {}),
):
    kind = getattr(package, name)
    plain = train(kind, options, False)
    try:
        share = float((train(kind, options, True) - plain).norm() / (plain - start).norm())
        different[name] = share
        print(f"{package.__name__}.{name} {100 * share:.0f} %")
    except ZeroDivisionError as error:
        different[name] = error
        print(f"{package.__name__}.{name} {type(error).__name__}")
assert different.pop("AdamW") == 0
assert isinstance(different.pop("DAdaptSGD"), ZeroDivisionError)
assert all(share > 0.01 for share in different.values()), different
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
