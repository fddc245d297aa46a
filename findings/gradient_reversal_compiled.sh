#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.func, torch.compile); torch 2.14.1 does the same.
# Input: the usual layer that reverses gradients, for domain adaptation: an `autograd.Function` whose forward pass returns
# `x.view_as(x)` and whose backward pass returns `-gradient`. The gradient of a loss with it by `torch.func.grad`, compiled.
# One would guess: the compiled gradient is that of eager mode.
# Behavior: if the function takes the argument of the gradient itself, its backward pass is left out, and its forward pass is
# differentiated instead, whatever the two are. So it is with every backend, also "eager": the fault is in the tracing. Of a
# tensor computed from the argument, or of a view of it, the gradient is right.
# Output seen (the gradient in eager mode, compiled with the backend "eager", with "inductor"):
#   reversed: -2.0 2.0 2.0
#   reversed, of a view: -2.0 -2.0 -2.0
#   straight through: 2.0 0.0 0.0
#   straight through, of a product: 2.0 2.0 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Rounded(Reversed):
    """Straight through: rounded weights pass the gradient on."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


LOSSES = {
    "reversed": (lambda x: (Reversed.apply(x) * 2).sum(), [-2.0, 2.0, 2.0]),
    "reversed, of a view": (lambda x: (Reversed.apply(x.view(1)) * 2).sum(), [-2.0, -2.0, -2.0]),
    "straight through": (lambda x: (Rounded.apply(x) * 2).sum(), [2.0, 0.0, 0.0]),
    "straight through, of a product": (lambda x: (Rounded.apply(x * 1.0) * 2).sum(), [2.0, 2.0, 2.0]),
}
for name, (loss, expected) in LOSSES.items():
    gradient = torch.func.grad(loss)
    found = [float(gradient(torch.ones(1)))]
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        found.append(float(torch.compile(gradient, fullgraph=True, backend=backend)(torch.ones(1))))
    print(f"{name}:", *found)
    assert found == expected
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
