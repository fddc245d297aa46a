#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed.tensor, torch.nn.functional), gloo.
# Input: two ranks; a linear model whose weight is a replicated DTensor, predictions and targets sharded by rows, as in
# data parallelism. The loss is the mean over all elements, the default.
# One would guess: losses and gradients of the whole batch; x.square().mean() and l1_loss give these.
# Behavior: with mse_loss, huber_loss, smooth_l1_loss and soft_margin_loss the loss is right, but the gradient is too
# large by the number of shards, without a word (four times for four ranks; also if columns are sharded, as in tensor
# parallelism). If the rows do not divide evenly, these losses are wrong, too: the mean of the shards' means.
# Cause: these losses have no sharding rule of their own. DTensor derives one from their decomposition into smaller
# operations of the whole shape, and then runs the undivided operation, which divides by the size of its shard.
# Output seen, of the sharded batch by the plain one:
#   4 rows: mse_loss: loss 1.00, gradient 2.00
#   4 rows: huber_loss: loss 1.00, gradient 2.00
#   4 rows: smooth_l1_loss: loss 1.00, gradient 2.00
#   4 rows: soft_margin_loss: loss 1.00, gradient 2.00
#   4 rows: l1_loss: loss 1.00, gradient 1.00
#   4 rows: mean of squares: loss 1.00, gradient 1.00
#   3 rows: mse_loss: loss 1.12, gradient 3.75
#   3 rows: mean of squares: loss 1.00, gradient 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F


def mean_of_squares(prediction, target):
    return (prediction - target).square().mean()


def ratios(mesh, loss, rows):
    """Loss and gradient (its norm) of the sharded batch, divided by those of the plain batch."""
    x, target, start = torch.arange(1.0, rows + 1)[:, None], torch.ones(rows, 1), torch.full((1, 1), 0.5)
    w = start.clone().requires_grad_()
    plain = loss(x @ w, target)
    plain.backward()
    sharded_w = distribute_tensor(start, mesh, [Replicate()]).requires_grad_()
    sharded = loss(distribute_tensor(x, mesh, [Shard(0)]) @ sharded_w, distribute_tensor(target, mesh, [Shard(0)]))
    sharded.backward()
    gradient = sharded_w.grad.full_tensor().norm() / w.grad.norm()
    return round(float(sharded.full_tensor() / plain), 2), round(float(gradient), 2)


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    wrong, right = (1.0, 2.0), (1.0, 1.0)
    for rows, loss, expected in (
        (4, F.mse_loss, wrong),
        (4, F.huber_loss, wrong),
        (4, F.smooth_l1_loss, wrong),
        (4, F.soft_margin_loss, wrong),
        (4, F.l1_loss, right),
        (4, mean_of_squares, right),
        (3, F.mse_loss, (1.12, 3.75)),
        (3, mean_of_squares, right),
    ):
        found = ratios(mesh, loss, rows)
        if rank == 0:
            print(f"{rows} rows: {loss.__name__.replace('_of_', ' of ')}: loss {found[0]:.2f}, gradient {found[1]:.2f}")
        assert found == expected, (rows, loss.__name__, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), 2)
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py "$folder"
