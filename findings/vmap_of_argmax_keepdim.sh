#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.func.vmap); torch 2.14.1 does the same.
# Input: the place of a map's largest element, or its bounds, with all axes kept: `y.argmax(keepdim=True)`, `y.aminmax(keepdim=True)`.
# One would guess: `vmap` gives what a loop over the maps gives, as it does for `amax`, `norm`, `std`, `quantile`, `all`.
# Behavior: under `vmap` one axis is kept, however many there are. The values are right.
# Output seen, the shape of one result, in a loop and under vmap, of maps 4 x 5:
#   argmax (1, 1) (1,)
#   argmin (1, 1) (1,)
#   aminmax (1, 1) (1,)
#   amax (1, 1) (1, 1)
#   std (1, 1) (1, 1)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch

OPERATORS = {
    "argmax": lambda y: y.argmax(keepdim=True),
    "argmin": lambda y: y.argmin(keepdim=True),
    "aminmax": lambda y: y.aminmax(keepdim=True).min,
    "amax": lambda y: y.amax(keepdim=True),
    "std": lambda y: y.std(dim=None, keepdim=True),
}
maps = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
for name, of in OPERATORS.items():
    loop, vmapped = torch.stack([of(y) for y in maps]), torch.vmap(of)(maps)
    print(name, tuple(loop.shape[1:]), tuple(vmapped.shape[1:]))
    assert torch.equal(loop.flatten(), vmapped.flatten())
    assert loop.shape[1:] == (1, 1)
    assert vmapped.shape[1:] == ((1,) if name in ("argmax", "argmin", "aminmax") else (1, 1))
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
