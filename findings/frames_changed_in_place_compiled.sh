#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile on a CPU; torch.func.functionalize); torch 2.14.1 does the same.
# Input: a signal of five samples whose frames of two, `y.unfold(0, 2, 2)`, are scaled in place, as by a window; the fifth sample
# is in no frame.
# One would guess: what is in no frame stays as it is, as in eager mode, and as in compiled code with `view` in place of `unfold`.
# Behavior: a write through `unfold` is replaced by a new signal that is zero wherever there is no frame. Each backend that
# functionalizes does so ("aot_eager", "inductor"), and `torch.func.functionalize`. The gradient lacks those samples, too.
# Output seen (eager, aot_eager, inductor, functionalize):
#   unfold: [2.0, 4.0, 6.0, 8.0, 5.0] [2.0, 4.0, 6.0, 8.0, 0.0] [2.0, 4.0, 6.0, 8.0, 0.0] [2.0, 4.0, 6.0, 8.0, 0.0]
#   view: [2.0, 4.0, 6.0, 8.0, 5.0] [2.0, 4.0, 6.0, 8.0, 5.0] [2.0, 4.0, 6.0, 8.0, 5.0] [2.0, 4.0, 6.0, 8.0, 5.0]
#   gradient of the sum: [2.0, 2.0, 2.0, 2.0, 1.0] [2.0, 2.0, 2.0, 2.0, 0.0] [2.0, 2.0, 2.0, 2.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch


def by_unfold(x):
    y = x * 1
    y.unfold(0, 2, 2).mul_(2)
    return y


def by_view(x):
    y = x * 1
    y[:4].view(2, 2).mul_(2)
    return y


def gradient(function):
    x = torch.arange(1.0, 6.0, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0]


whole, cut = [2.0, 4.0, 6.0, 8.0, 5.0], [2.0, 4.0, 6.0, 8.0, 0.0]
for name, scaled, expected in (("unfold", by_unfold, cut), ("view", by_view, whole)):
    compiled = [torch.compile(scaled, backend=backend) for backend in ("aot_eager", "inductor")]
    found = [of(torch.arange(1.0, 6.0)).tolist() for of in (scaled, *compiled, torch.func.functionalize(scaled))]
    print(f"{name}:", *found)
    assert found == [whole, expected, expected, expected]
compiled = [torch.compile(by_unfold, backend=backend) for backend in ("aot_eager", "inductor")]
found = [gradient(of).tolist() for of in (by_unfold, *compiled)]
print("gradient of the sum:", *found)
assert found == [[2.0] * 4 + [1.0], [2.0] * 4 + [0.0], [2.0] * 4 + [0.0]]
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
