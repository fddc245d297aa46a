#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.func) under `python -O`, or PYTHONOPTIMIZE=1 as some containers set it; torch 2.14.1 does the same.
# Input: gradients of cross-entropy for 64 models at once, `vmap(grad(loss))`.
# One would guess: `-O` removes `assert` statements, and changes nothing else of PyTorch.
# Behavior: PyTorch registers the batching rules of `nll_loss` and other operators that are made in Python only if `__debug__` is
# true. Under `-O`, `vmap` calls them once per model in a loop, in the forward and the backward pass. A warning says that the rule
# is "not yet implemented". The numbers are the same.
# Output seen (time in parentheses, not checked):
#   python: 0 operators without a batching rule (1.5 ms)
#   python -O: 2 operators without a batching rule (4.1 ms)
#   the gradients are equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import sys
import time
import warnings

import torch
from torch.func import grad, vmap


def loss(weight, x, labels):
    return torch.nn.functional.cross_entropy(x @ weight, labels)


torch.manual_seed(0)
given = torch.randn(64, 20, 10), torch.randn(64, 32, 20), torch.randint(0, 10, (64, 32))
gradients = vmap(grad(loss))
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    torch.save(gradients(*given), sys.argv[1])
times = []
for _ in range(30):
    since = time.perf_counter()
    gradients(*given)
    times.append(time.perf_counter() - since)
missing = sum("batching rule" in str(warning.message) for warning in heard)
name = "python" if __debug__ else "python -O"
print(f"{name}: {missing} operators without a batching rule ({sorted(times)[15] * 1e3:.1f} ms)")
if missing != (0 if __debug__ else 2):
    sys.exit("not as described")
EOF
export OMP_NUM_THREADS=1
venv/bin/python program.py plain 2> /dev/null
venv/bin/python -O program.py optimized 2> /dev/null
venv/bin/python - <<'EOF'
import torch

torch.testing.assert_close(torch.load("optimized"), torch.load("plain"), rtol=1e-5, atol=1e-6)
print("the gradients are equal")
EOF
