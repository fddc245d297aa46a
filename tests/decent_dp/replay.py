"""The recorded cases by this library's own step, in compatibility mode, with or without a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import decentfn as df
from decentfn.compat import decent_dp
from decentfn.core import trees
from decentfn.core.buckets import add
from decentfn.core.scalars import as_step
from tests.decent_dp import problem
from tests.decent_dp.problem import MOMENTUM, NAMES, Case

# The order of the first backward pass, which decides the buckets: the last layer first, its bias before its weight.
BACKWARD = ("4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight")


class Replayed(NamedTuple):
    x: Tensor  # [T+1, N, P]
    loss: Tensor  # [T, N]
    mean: Tensor | None  # [P], the consensus where the case averages
    distance: Tensor | None  # [N]


def edges_of(case: Case, n: int) -> df.Topology:
    if case.edges is not None:
        return df.topologies.from_groups("custom", case.edges, n)
    sizes = {"local_world_size": case.local_world_size} if case.topology == "alternating-exp-ring" else {}
    return df.topology(case.topology, n, **sizes)


def cosine_with_warmup(lr: float, cosine: problem.Cosine, count: Tensor) -> Tensor:
    """Decent-DP's rate, which rises again after count t_warmup + t_max."""
    t_max, t_warmup, eta_min, w = cosine
    u = count.to(torch.float64)
    main = eta_min + (lr - eta_min) * (1 + torch.cos(math.pi * (u - t_warmup) / t_max)) / 2
    return torch.where(u < t_warmup, lr * (w + (1 - w) * u / t_warmup), main)


def direction(case: Case, mistake: str | None) -> df.Transform:
    kind, lr, decay, window = case.optimizer
    rate: Any = lr
    if case.cosine:
        rate = partial(cosine_with_warmup, lr, case.cosine)
    settings: dict[str, Any] = {"weight_decay": decay}
    if kind.endswith("_ready"):
        settings["mask"] = df.transforms.not_bias_or_norm if mistake == "decay groups" else decent_dp.decays
    if kind == "sgdm":
        return df.sgd(rate, momentum=MOMENTUM, **settings)
    if window > 1:
        settings["accum_iter"] = window
    if mistake == "bias correction":
        return df.chain(
            uncorrected_adam(), df.transforms.add_decayed_weights(decay), df.transforms.scale_by_learning_rate(rate)
        )
    return getattr(df.transforms, kind.removesuffix("_ready"))(rate, **settings)


def uncorrected_adam() -> df.Transform:
    """Adam's direction at count 10**9, where there is nothing left to correct."""
    adam = df.transforms.scale_by_adam()

    def init(params):
        state = adam.init(params)
        return state._replace(count=state.count + 10**9)

    return df.Transform(init, adam.update)


def build(case: Case, n: int, mistake: str | None = None) -> tuple[df.Algorithm, Any]:
    """The algorithm, and the step after a forgotten revert."""
    topology = edges_of(case, n)
    if mistake != "edge skip":
        topology = decent_dp.schedule(topology)
    optimizer = direction(case, mistake)
    if case.clip:
        params = problem.initial_params()
        buckets = decent_dp.buckets([(name, params[name]) for name in BACKWARD], case.bucket_mb)
        by_bucket = decent_dp.clip_by_buckets(case.clip, buckets)
        optimizer = df.chain(df.clip_by_global_norm(case.clip) if mistake == "global clip" else by_bucket, optimizer)
    update_at: Any = "local" if mistake == "update at the local point" else "mixed"
    loss_fn = problem.loss_fn if case.micro == 1 else df.accumulate(problem.loss_fn)
    algorithm = df.adapt_while_communicate(loss_fn, optimizer, topology, gamma=case.gamma, update_at=update_at)
    forgotten = after_forgotten_revert(problem.loss_fn, optimizer, topology, gamma=case.gamma)
    return algorithm, forgotten


def after_forgotten_revert(loss_fn: Any, optimizer: Any, topology: Any, *, gamma: float) -> Any:
    """The step `((state, y), batch, t) -> (state, metrics)` after a `global_avg(will_revert=True)` without its revert.

    The parameters x are then the mean, but the old ones, y, are sent: `x̃ = (1-γ) x + γ ((w-s) x + s Σ_{j∈R} y_j)`.
    """
    worker = df.kit.Worker(loss_fn, optimizer, topology)

    def step(state: Any, batch: Any, t: Any) -> Any:
        t = as_step(t)
        (x, local, _), y = state
        posted = worker.post(y, t)
        g, local = worker.gradient(x, local, batch, t)
        row = posted.row
        kept = row.weights[0] if row.mean_weight is not None else row.weights[0] - row.weights[1:].sum()
        factor = (1 - gamma) + gamma * kept
        mixed = add(df.kit.collect(posted, gamma), trees.map(lambda a, b: factor.to(a.dtype) * (a - b), x, y))
        u, local = worker.update(g.grads, g, local, mixed)
        return df.State(add(mixed, u), local), g.metrics

    return step


def batches(case: Case, ranks: Sequence[int], t: int) -> Any:
    """`[N, 8, .]` each, or `[N, M, 8, .]` with M micro-batches."""
    drawn = [[problem.batch(rank, t, micro) for micro in range(case.micro)] for rank in ranks]
    stacked = [torch.stack([torch.stack([pair[k] for pair in mine]) for mine in drawn]) for k in (0, 1)]
    return tuple(x[:, 0] if case.micro == 1 else x for x in stacked)


def run(case: Case, n: int, mistake: str | None = None, rank: int | None = None, **compile_options: Any) -> Replayed:
    """All workers stacked in one process, or worker `rank` of a process group."""
    (init, step), forgotten = build(case, n, mistake)
    state = init(problem.initial_params())
    if rank is None:
        state, step, forgotten = df.stack(state, n), df.simulate(step, n), df.simulate(forgotten, n)
    if compile_options:
        step = df.compile(step, **compile_options)
    in_flight = mean = distance = None
    x, losses = [problem.vector(df.params(state))], []
    for t in range(case.steps):
        batch = batches(case, range(n) if rank is None else [rank], t)
        batch = batch if rank is None else tuple(b[0] for b in batch)
        if in_flight is None:
            state, metrics = step(state, batch, t)
        else:
            state, metrics = forgotten((state, in_flight), batch, t)
            in_flight = None
        x.append(problem.vector(df.params(state)))
        losses.append(metrics.loss)
        if case.average and t + 1 == case.average.after:
            mean, distance = problem.vector(df.consensus_mean(state)), df.distance_to_consensus(state)
            if not case.average.reverts:
                in_flight = state.params if case.average.will_revert else None
                state = decent_dp.keep_average(state)
    return Replayed(torch.stack(x), torch.stack(losses), mean, distance)


def on_this_rank(case: Case, n: int, options: dict[str, Any]) -> Replayed:
    return run(case, n, rank=df.init().rank, **options)


assert sorted(BACKWARD) == sorted(NAMES)
