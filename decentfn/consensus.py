"""What the workers hold together: the parameters that one evaluates, their mean and how far apart they are.

All of it works for the state of one worker (under a process group, collectively) and for a stacked one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.buckets import Buckets
from decentfn.trees import PyTree


def params(state: Any) -> PyTree:
    """The parameters that one evaluates, as the tree that `init` was given; copies. `[N, ...]` when stacked."""
    return trees.map(torch.clone, _buckets(state).tree())


def is_stacked(state: Any) -> bool:
    """Whether the state holds a leading axis of workers (buckets of one worker are vectors)."""
    return _buckets(state)[0].dim() == 2


def consensus_mean(state: Any) -> PyTree:
    """The mean of the parameters over all workers, as the user's tree; the same on every rank. Collective."""
    x = _buckets(state)
    return Buckets([_mean(bucket) for bucket in x], x.plan).tree()


def consensus_distance(state: Any) -> Tensor:
    """`sqrt(mean_i ‖x_i - x̄‖²)` over all workers and parameters, 0-d float64; the same on every rank. Collective."""
    return collectives.process_mean((distance_to_consensus(state) ** 2).mean()).sqrt()


def distance_to_consensus(state: Any) -> Tensor:
    """`‖x_i - x̄‖₂` of this worker (0-d float64), or of each (`[N]`) when stacked. Collective."""
    squares = [((bucket.double() - _mean(bucket).double()) ** 2).sum(-1) for bucket in _buckets(state)]
    return torch.stack(squares).sum(0).sqrt()


def _mean(bucket: Tensor) -> Tensor:
    """Mean over the workers here (the first of two axes, if there are two) and over all processes."""
    return collectives.process_mean(bucket.mean(0) if bucket.dim() == 2 else bucket)


def _buckets(state: Any) -> Buckets:
    found = getattr(state, "params", None)
    if not isinstance(found, Buckets):
        raise ValueError(
            f"{type(state).__name__} is not a training state: expected a `.params` of buckets, from init(params)."
        )
    return found
