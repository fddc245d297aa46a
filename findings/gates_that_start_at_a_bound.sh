#!/usr/bin/env bash
# Software: torch 2.13.0 and torch 2.14.1; torch 2.15.0 does as 2.14.1.
# Input: a learned gate that starts at 0, an end of its range, and is kept in it: `gate.clamp(0, 1)`. Twenty steps of SGD
# move it toward 0.5.
# One would guess: both releases train it, since `clamp` has had gradient 1 at its bounds since PyTorch 0.4; and numbers and tensors
# as bounds are the same.
# Behavior: from 2.14 on the gradient at a bound that is a number is 0, so the gate never moves, without a word; bounds that are
# tensors let a half through. `hardtanh`, the same function, has always had 0 there.
# Output seen (release, gates after twenty steps):
#   2.13.0 numbers: 0.494 tensors: 0.494 hardtanh: 0.0
#   2.14.1 numbers: 0.0 tensors: 0.494 hardtanh: 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > program.py <<'PROGRAM'
import torch


def trained(kept):
    gate = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([gate], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        ((kept(gate) - 0.5) ** 2).backward()
        optimizer.step()
    return round(gate.item(), 3)


gates = {
    "numbers": trained(lambda gate: gate.clamp(0, 1)),
    "tensors": trained(lambda gate: gate.clamp(torch.zeros(()), torch.ones(()))),
    "hardtanh": trained(lambda gate: torch.nn.functional.hardtanh(gate, 0, 1)),
}
print(torch.__version__.split("+")[0], *(f"{name}: {gate}" for name, gate in gates.items()))
PROGRAM
for release in 2.13.0 2.14.1; do
    python3 -m venv "$release"
    "$release/bin/python" -m pip install --quiet --no-compile "torch==$release" numpy==2.4.6
    "$release/bin/python" program.py | tee -a output
done
diff output - <<'EXPECTED'
2.13.0 numbers: 0.494 tensors: 0.494 hardtanh: 0.0
2.14.1 numbers: 0.0 tensors: 0.494 hardtanh: 0.0
EXPECTED
