"""Memory of a worker's process: the state and the module's own storage, and the peak of a step.

torchrun --standalone --nproc-per-node 4 examples/worker_memory.py --processes-per-worker 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from optree import tree_leaves
from torch import nn
from torch.profiler import ProfilerActivity, profile

import decentfn as df

MB = 1e6


@dataclass(frozen=True)
class Config:
    """One model of `layers` square layers."""

    processes_per_worker: int = 1
    width: int = 1024
    layers: int = 12
    steps: int = 3


def most_at_once(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the result of a call and its peak of allocated bytes on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function(*arguments)
    results = profiled.profiler.kineto_results if profiled.profiler else None
    changes = [(e.start_ns(), e.nbytes()) for e in (results.events() if results else []) if e.name() == "[memory]"]
    return result, max(accumulate((size for _, size in sorted(changes)), initial=0))


def main(config: Config) -> dict[str, float]:
    """Train a few steps, and say what process 0 holds."""
    world = df.init(processes_per_worker=config.processes_per_worker)
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(config.width, config.width) for _ in range(config.layers)))
    if world.mesh:
        for layer in module:
            fully_shard(layer, mesh=world.mesh["shard"])
        fully_shard(module, mesh=world.mesh["shard"])
    module.to_empty(device=world.device)  # nobody ever holds the whole model
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_((p.to_local() if world.mesh else p).detach(), std=0.02)
    params, buffers, loss_fn = df.functional(module, F.mse_loss)
    init, step = df.adapt_while_communicate(
        df.autograd(loss_fn), df.adamw(1e-3), df.topology("base", world.num_workers)
    )
    state, step = init(params, buffers), df.donate(step)
    del params
    x = torch.randn(8, config.width, device=world.device)
    for t in range(config.steps):
        state, _ = step(state, (x, x), t)
    _, in_step = most_at_once(step, state, (x, x), config.steps)
    _, in_gradient = most_at_once(lambda: F.mse_loss(module(x), x).backward())
    found = {
        "whole parameters": sum(p.numel() * p.element_size() for p in module.parameters()) / MB,
        "state": sum(x.nbytes for x in tree_leaves(state)) / MB,
        "module": sum((p.to_local() if world.mesh else p).nbytes for p in module.parameters()) / MB,
        "gradient alone": in_gradient / MB,
        "step": in_step / MB,
    }
    if world.rank == 0:
        print(f"{world.num_workers} workers of {world.processes_per_worker}, MB of process 0:", end=" ")
        print(", ".join(f"{name} {size:.1f}" for name, size in found.items()))
    return found


if __name__ == "__main__":
    main(tyro.cli(Config))
