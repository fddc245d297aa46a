"""Mixing of buffers (BatchNorm's statistics) like parameters, around any algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import agree, describe
from decentfn.core import PyTree, checks_numbers, require, trees
from decentfn.core.buckets import is_finite, loose
from decentfn.kit import Algorithm, Metrics, State, as_input, at
from decentfn.kit.step import require_bare


@checks_numbers
def average_buffers(
    algorithm: Algorithm, gamma: float | Callable[[Tensor], Tensor] = 1.0, *, overlap: bool = True
) -> Algorithm:
    """Mix floating-point buffers on the algorithm's topology in every step; b' are the buffers that the loss returns.

        b⁺ = b' + γ (W - I) b        overlap=True: b is posted before the step
        b⁺ = b' + γ (W - I) b'       overlap=False: b' is posted after the step

    Without it every worker keeps its own buffers, and `df.consensus_buffers` averages them for an evaluation. Frozen
    parameters of `df.functional` are not mixed, and infinite and NaN values stay as they are. Sent per step: one message
    per dtype and neighbor, or a mean in float64. If the algorithm averages over all workers, W is the mean in every step;
    with overlap=False and γ = 1 buffers are then equal.

    Args:
        algorithm: the result of any function of `decentfn.algorithms`, on a doubly stochastic topology.
        gamma: γ in [0, 1], or a function of `t` (0-d int64 tensor) that returns it.
        overlap: send b while the gradient is computed. Pass False if γ (1 - W_ii) > 1 - μ, where b' = (1 - μ) b + μ s: with
            BatchNorm's momentum μ = 0.1 and W the mean over more than 10 workers, a running variance may become negative.

    Raises:
        ValueError: γ out of range, a push-sum topology, on which buffers would drift, or buffers averaged already.
    """
    require_bare("average_buffers", algorithm)
    rule = "γ lies in [0, 1], or is a function of t."
    require(callable(gamma) or 0 <= gamma <= 1, "average_buffers", rule, gamma=gamma)
    rule = "the buffers are mixed already; once is enough."
    require(not algorithm.step.had("average_buffers"), "average_buffers(average_buffers(algorithm))", rule)
    algorithm.step.require_common_steps("average_buffers(algorithm)")
    topology = algorithm.topology
    if topology is None:
        raise ValueError(
            "average_buffers(algorithm): the algorithm does not say which topology it mixes on; decorate the function "
            "that builds it with df.kit.algorithm."
        )
    if topology.needs_push_sum:
        raise ValueError(
            f"average_buffers(algorithm): {topology.name!r} is column-stochastic only, so buffers that are mixed "
            "without push-sum's weight drift away from the mean; average buffers where you evaluate, with "
            "df.consensus_buffers(state)."
        )
    size = collectives.processes_per_worker()
    if size > 1:
        raise ValueError(
            f"average_buffers(algorithm): a worker is {size} processes, and each has its own buffers; leave it out, "
            "or use a network without running statistics."
        )
    init, step = algorithm
    one, factor = step.run, as_input("average_buffers", "gamma", gamma)
    frozen: frozenset[str] = getattr(algorithm.loss_fn, "frozen", frozenset())

    def start(params: PyTree, buffers: PyTree = None) -> State:
        agree([describe("average_buffers gamma", gamma), describe("average_buffers overlap", overlap)])
        return init(params, buffers)

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        by_dtype = _travelers(state.buffers, frozen)
        if not by_dtype:
            return one(state, batch, t)

        def post(buffers: PyTree) -> gossip.Posted:
            leaves = trees.leaves(buffers)
            vectors = [torch.cat([leaves[i].reshape(-1) for i in places]) for places in by_dtype.values()]
            if topology.has_groups:  # a mean in float64 is exact to a narrower dtype, and its sum overflows nowhere
                vectors = [vector.double() for vector in vectors]
            return gossip.post(loose(vectors), collectives.look_up(vectors[0], topology, t))

        posted = post(state.buffers) if overlap else None
        state, metrics = one(state, batch, t)
        posted = posted or post(state.buffers)
        leaves = trees.leaves(state.buffers)
        moves = gossip.difference(posted, at(factor, t, leaves))
        for places, move, own in zip(by_dtype.values(), moves, posted.own, strict=True):
            # Equal values stay: inf - inf would be NaN, and a mean of equal numbers is off by roundings.
            size, info, sizes = own.abs(), torch.finfo(own.dtype), [leaves[i].numel() for i in places]
            rounding = topology.num_workers * info.eps * (size + info.tiny) if posted.means else 0.0
            stays = ~is_finite(size + rounding) | (move.abs() <= rounding)
            for i, part, keep in zip(places, move.split(sizes), stays.split(sizes), strict=True):
                old = leaves[i]
                leaves[i] = torch.where(keep.view(old.shape), old, (old + part.view(old.shape)).to(old.dtype))
        buffers = trees.fill(trees.enumerate_leaves(state.buffers), leaves)
        return state._replace(local=state.local._replace(buffers=buffers)), metrics

    return algorithm._replace(init=start, step=step.transformed("average_buffers", run=run))


def _travelers(buffers: PyTree, frozen: frozenset[str]) -> dict[torch.dtype, list[int]]:
    """Return the places of the leaves that are mixed, by dtype: one message per dtype instead of one per leaf."""
    leaves: list[Any] = trees.leaves(buffers)
    # The names of a module's buffers in the order of the leaves, which Dynamo can trace.
    names = trees.leaves(type(buffers)((key, key) for key in buffers)) if frozen else [None] * len(leaves)
    places: dict[torch.dtype, list[int]] = {}
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if leaf.is_floating_point() and leaf.numel() and name not in frozen:
            places.setdefault(leaf.dtype, []).append(i)
    return places
