"""Trajectories of the installed decent-dp.

Of case NAME with T updates on n ranks, P = 355 parameters:

    NAME/x         [T+1, n, P]  every rank's own, unmixed parameters: the start, and after each update
    NAME/loss      [T, n]       the loss of update u's iteration, at x[u-1]
    NAME/launched  [T]          the edge index over which update u starts to send
    NAME/mixed     [T]          the edge index with whose weight update u mixes; -1: it does not mix
    NAME/buckets   [T]          bucket number of every parameter, in the order of `problem.NAMES`
    NAME/mean, NAME/distance    [n, P], [n]: what global_avg gave, where the case calls it
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from decent_dp import optim as ready
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.topo import Edge, Topology, TopologyReg
from loguru import logger
from torch import nn

from tests.decent_dp import problem
from tests.decent_dp.problem import MOMENTUM, NAMES, Case, cases


def network() -> nn.Module:
    sizes = problem.SIZES
    layers = [nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    net.load_state_dict(problem.initial_params())
    return net


def flat(net: nn.Module) -> np.ndarray:
    return problem.vector(dict(net.named_parameters())).detach().clone().numpy()


def optim_fn(case: Case) -> Any:
    kind, lr, decay, window = case.optimizer
    settings = {"lr": lr, "weight_decay": decay}
    if kind.endswith("_ready"):
        settings |= {"accum_iter": window} if window > 1 else {}
        return partial(getattr(ready, f"optim_fn_{kind.removesuffix('_ready')}"), **settings)
    make = {
        "sgdm": partial(torch.optim.SGD, momentum=MOMENTUM, **settings),
        "adamw": partial(torch.optim.AdamW, **settings),
        "accum_adamw": partial(ready.AccumAdamW, accum_iter=window, **settings),
    }[kind]
    return lambda named: make([param for _, param in named])


def register(name: str, edges: Any) -> None:
    class Custom(Topology):
        def _get_topo_edges(self):
            return [[Edge(ranks=list(pair), weight=weight) for pair, weight in phase] for phase in edges]

    TopologyReg.register(name)(Custom)


def wrap(name: str, case: Case, net: nn.Module) -> DecentralizedDataParallel:
    topology = case.topology
    if case.edges is not None:
        topology = name
        register(name, case.edges)
    scheduler = None
    if case.cosine:
        t_max, t_warmup, eta_min, decay = case.cosine
        settings = {"t_max": t_max, "t_warmup": t_warmup, "cosine_eta_min": eta_min, "warmup_decay": decay}
        scheduler = partial(ready.lr_scheduler_fn_cosine_with_warmup, **settings)
    model = DecentralizedDataParallel(
        net,
        optim_fn(case),
        lr_scheduler_fn=scheduler,
        topology=topology,
        grad_clip_norm=case.clip,
        param_as_bucket_view=case.views,
        bucket_size_in_mb=case.bucket_mb,
        _local_world_size=case.local_world_size,
    )
    model.set_adaptive_factor(case.gamma)
    return model


def record(name: str, case: Case) -> dict[str, Any]:
    """One rank's records."""
    net = network()
    model = wrap(name, case, net)
    asked: list[int] = []
    get_edge = model._topo.get_edge
    model._topo.get_edge = lambda step: asked.append(step) or get_edge(step)
    x, losses, launched, mixed, found = [flat(net)], [], [], [], {}
    for t in range(case.steps):
        total = 0.0
        for micro in range(case.micro):
            model.set_accumulate_grad(micro < case.micro - 1)  # off before the last forward, not before its backward
            inputs, targets = problem.batch(dist.get_rank(), t, micro)
            asked.clear()
            output = model(inputs)
            if t == 1 and micro == 0:  # update 1 happens in the first forward of the second iteration
                x.append(flat(net))
                launched.append(asked[0])
                mixed.append(-1)
                asked.clear()
            loss = ((output - targets) ** 2).mean() / case.micro
            loss.backward()
            total += loss.item()
        losses.append(total)
        if t >= 1:
            x.append(flat(net))
            launched.append(asked[-1])
            mixed.append(asked[0] if asked[0] != asked[-1] else -1)
        if case.average and t + 1 == case.average.after:
            found["distance"] = model.global_avg(will_revert=case.average.will_revert, return_d2c=True)
            found["mean"] = flat(net)
            if case.average.reverts:
                model.revert_global_avg()
    for work in model._comm_ops:
        work.wait()
    dist.barrier()
    for group in model._topo._registry.values():  # else the threads of hundreds of them take most of the time
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    number = {id(param): k for k, bucket in enumerate(model._param_buckets) for param in bucket}
    found["buckets"] = np.array([number[id(param)] for param in (dict(net.named_parameters())[n] for n in NAMES)])
    return found | {"x": np.stack(x), "loss": np.array(losses), "launched": launched, "mixed": mixed}


def on_this_rank() -> dict[str, np.ndarray]:
    """All ranks' records of every case; for `tests.ranks`."""
    logger.remove()
    n = dist.get_world_size()
    arrays: dict[str, np.ndarray] = {}
    for name, case in cases(n).items():
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, record(name, case))
        for key, mine in everyone[0].items():
            alike = key in ("launched", "mixed", "buckets")
            axis = 1 if key in ("x", "loss") else 0
            arrays[f"{name}/{key}"] = np.array(mine) if alike else np.stack([e[key] for e in everyone], axis=axis)
    return arrays
