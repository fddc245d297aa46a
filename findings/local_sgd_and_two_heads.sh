#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed.algorithms.model_averaging, torch.distributed.optim), gloo.
# Input: two ranks train a trunk with two heads, one task per step in turn, by PostLocalSGDOptimizer with
# PeriodicModelAverager(period=2). Each step zeroes the gradients first, as PyTorch's example does.
# One would guess: every second step averages the model over the ranks.
# Behavior: only parameters that have a gradient in that very step are averaged. zero_grad() sets gradients to None, so the
# head of the other task is left out, each time, and the ranks' copies of it drift apart for the whole run, without a word.
# With gradients that are zeros (set_to_none=False) it is averaged.
# Output seen, the largest difference between the ranks after an average:
#   set_to_none=True: trunk 0.000, head of even steps 0.000, head of odd steps 0.872
#   set_to_none=False: trunk 0.000, head of even steps 0.000, head of odd steps 0.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer


def differences(set_to_none):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(4, 8), "even": torch.nn.Linear(8, 1), "odd": torch.nn.Linear(8, 1)})
    local = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = PostLocalSGDOptimizer(optim=local, averager=PeriodicModelAverager(period=2))
    torch.manual_seed(1 + dist.get_rank())
    for step in range(41):
        x = torch.randn(16, 4)
        optimizer.zero_grad(set_to_none=set_to_none)
        out = model["even" if step % 2 == 0 else "odd"](model["trunk"](x).relu())
        (out[:, 0] - x.sum(1) * (1 + dist.get_rank())).square().mean().backward()
        optimizer.step()
    found = {}
    for name, part in model.items():
        mine = torch.cat([p.detach().flatten() for p in part.parameters()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        found[name] = float((both[0] - both[1]).abs().max())
    return found


dist.init_process_group("gloo")
for set_to_none in (True, False):
    trunk, even, odd = differences(set_to_none).values()
    if dist.get_rank() == 0:
        print(f"set_to_none={set_to_none}: trunk {trunk:.3f}, head of even steps {even:.3f}, head of odd steps {odd:.3f}")
    assert trunk == even == 0 and (odd > 0.01) == set_to_none, "the behavior has changed"
dist.destroy_process_group()
EOF
OMP_NUM_THREADS=1 venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 program.py
