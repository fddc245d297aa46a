#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed.fsdp.fully_shard), gloo; torch 2.14.1 does the same.
# Input: a model with two layers of one size, of which each sample uses one (routing, stochastic depth), sharded over two ranks.
# In this step the samples of rank 0 take the first layer, those of rank 1 the second.
# One would guess: an error, or the mean of both ranks' gradients, a layer that was not used counting 0.
# Behavior: each rank reduces the gradients that it has, and the ranks' reductions are paired by their order. Both layers'
# gradients are added up as if they were one layer's: rank 0 takes its shard of the sum for the first layer, rank 1 its for the
# second, and the other shards have no gradient. Nothing is said. The forward pass gathers weights in the same way.
# Output seen (gradients of the shards; the whole gradient of `first` is 0.5, that of `second` 5.0):
#   rank 0: first 5.5, second None
#   rank 1: first None, second 5.5
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, place):
        return (self.second if place else self.first)(x)


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = fully_shard(Routed(), mesh=init_device_mesh("cpu", (2,)))
    module(torch.ones(1, 4) * (1 + 9 * rank), rank).sum().backward()
    found = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        found[name.removesuffix(".weight")] = None if grad is None else float(grad.to_local().unique())
    lines = [None, None]
    dist.all_gather_object(lines, found)
    dist.destroy_process_group()
    if rank == 0:
        for other, line in enumerate(lines):
            print(f"rank {other}:", ", ".join(f"{name} {grad}" for name, grad in line.items()))
        assert lines == [{"first": 5.5, "second": None}, {"first": None, "second": 5.5}]


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py "$folder"
