#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, a CPU); torch 2.14.1 does the same.
# Input: attention written with matmul and softmax, whose keys are brought from (batch, length, heads, size) to (batch, heads, size,
# length) by one `permute(0, 2, 3, 1)`; and attention that is normalized over the queries, `softmax(-2)`. Under `torch.no_grad()`.
# One would guess: compiled, they are what they are in eager mode, to rounding.
# Behavior: Inductor takes them for `scaled_dot_product_attention`, whose pattern ignores which axes are permuted or normalized. So
# the keys are read in another order, and `softmax(-2)` becomes `softmax(-1)`, without an error. With `transpose(-2, -1)`
# of permuted keys, over the last axis, or where gradients are computed, it is right.
# Output seen (largest difference of the compiled output from that of eager mode, where values are about 1):
#   transposed, softmax(-1), no_grad: 0.0
#   permuted, softmax(-1), no_grad: 1.8
#   transposed, softmax(-2), no_grad: 1.2
#   permuted, softmax(-1), with gradients: 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch


def attention(q, k, v, permuted, axis):
    q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    k = k.permute(0, 2, 3, 1) if permuted else k.permute(0, 2, 1, 3).transpose(-2, -1)
    return torch.matmul(q, k).mul(8**-0.5).softmax(axis).matmul(v)


def difference(permuted, axis, gradients):
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, 4, 8, generator=draw, requires_grad=gradients) for _ in range(3)]
    with torch.set_grad_enabled(gradients):
        eager = attention(*inputs, permuted, axis)
        compiled = torch.compile(attention)(*inputs, permuted, axis)
    return float((eager - compiled).abs().max())


for permuted, axis, gradients, is_right in (
    (False, -1, False, True),
    (True, -1, False, False),
    (False, -2, False, False),
    (True, -1, True, True),
):
    found = difference(permuted, axis, gradients)
    words = "permuted" if permuted else "transposed", "with gradients" if gradients else "no_grad"
    print(f"{words[0]}, softmax({axis}), {words[1]}: {found:.1f}")
    assert (found < 1e-4) is is_right and (is_right or found > 0.1)
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
