"""Mixing of buffers (BatchNorm's statistics) like parameters, around any algorithm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import agree, describe
from decentfn.core import trees
from decentfn.core.buckets import loose
from decentfn.core.numbers import checks_numbers
from decentfn.core.trees import PyTree
from decentfn.kit.preconditions import as_input, at
from decentfn.kit.state import Metrics, State
from decentfn.kit.step import Algorithm, require_bare
from decentfn.topologies import Topology


@checks_numbers
def average_buffers(
    algorithm: Algorithm, gamma: float | Callable[[Tensor], Tensor] = 1.0, *, overlap: bool = True
) -> Algorithm:
    """Mix floating-point buffers on the algorithm's topology in every step; b' are the buffers that the loss returns.

        b⁺ = b' + γ (W - I) b        overlap=True: b is posted before the step
        b⁺ = b' + γ (W - I) b'       overlap=False: b' is posted after the step

    Without it every worker keeps its own buffers, and `df.consensus_buffers` averages them for an evaluation. Frozen
    parameters of `df.functional` are not mixed. Sent per step: one message per dtype and neighbor. If the algorithm
    averages over all workers, W is the mean in every step; with overlap=False and γ = 1 buffers are then equal.

    Args:
        algorithm: the result of any function of `decentfn.algorithms`, on a doubly stochastic topology.
        gamma: γ in [0, 1], or a function of `t` (0-d int64 tensor) that returns it.
        overlap: send b while the gradient is computed.

    Raises:
        ValueError: γ out of range, a push-sum topology, on which buffers would drift, or buffers averaged already.
    """
    require_bare("average_buffers", algorithm)
    if not callable(gamma) and not 0 <= gamma <= 1:
        raise ValueError(f"average_buffers(gamma={gamma!r}): γ lies in [0, 1], or is a function of t.")
    if algorithm.step.averages_buffers:
        raise ValueError("average_buffers(average_buffers(algorithm)): the buffers are mixed already; once is enough.")
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
        which = _travel(state.buffers, frozen)
        if not any(which):
            return one(state, batch, t)
        posted = _post(_chosen(state.buffers, which), topology, t) if overlap else None
        state, metrics = one(state, batch, t)
        new = _chosen(state.buffers, which)
        if posted is None:
            posted = _post(new, topology, t)
        moves = _pieces(gossip.difference(posted, at(factor, t, new)), new)
        mixed = iter([(b + move).to(b.dtype) for b, move in zip(new, moves, strict=True)])
        pairs = zip(trees.leaves(state.buffers), which, strict=True)
        leaves = [next(mixed) if travels else leaf for leaf, travels in pairs]
        buffers = trees.fill(trees.enumerate_leaves(state.buffers), leaves)
        return state._replace(local=state.local._replace(buffers=buffers)), metrics

    return algorithm._replace(init=start, step=replace(step, run=run, averages_buffers=True))


def _travel(buffers: PyTree, frozen: frozenset[str]) -> list[bool]:
    leaves: list[Any] = trees.leaves(buffers)
    names: list[str | None] = [None] * len(leaves)
    if frozen and isinstance(buffers, dict):
        names = list(buffers) if isinstance(buffers, OrderedDict) else sorted(buffers)
    return [leaf.is_floating_point() and name not in frozen for leaf, name in zip(leaves, names, strict=True)]


def _chosen(buffers: PyTree, which: list[bool]) -> list[Tensor]:
    return [leaf for leaf, travels in zip(trees.leaves(buffers), which, strict=True) if travels]


def _by_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """Concatenate tensors by dtype, for one message per dtype instead of one per tensor."""
    return [torch.cat([x.reshape(-1) for x in tensors if x.dtype == d]) for d in _dtypes(tensors)]


def _post(tensors: list[Tensor], topology: Topology, t: Tensor) -> gossip.Posted:
    return gossip.post(loose(_by_dtype(tensors)), collectives.look_up(tensors[0], topology, t))


def _pieces(vectors: Iterable[Tensor], like: list[Tensor]) -> list[Tensor]:
    split = {
        d: iter(vector.split([x.numel() for x in like if x.dtype == d]))
        for d, vector in zip(_dtypes(like), vectors, strict=True)
    }
    return [next(split[x.dtype]).view(x.shape) for x in like]


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(x.dtype for x in tensors))
