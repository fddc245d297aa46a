"""How the processes of one worker share its parameters: what the loss is made of says it."""

from __future__ import annotations

from typing import NamedTuple

from decentfn.comm import collectives
from decentfn.core.formatting import brief
from decentfn.gradient.by_autograd import ByAutograd
from decentfn.gradient.loss import LossFn, WrappedLoss
from decentfn.gradient.module import ShardedLoss


class Inside(NamedTuple):
    """What one of the processes of a worker is given for parameters, and what it holds."""

    processes: int = 1
    is_replicated: bool = False
    """It is given whole leaves, and holds its part of them."""
    team: int = 1
    """So many of them, next to one another, compute one batch together."""
    common: frozenset[str] = frozenset()
    """Of the leaves that it is given, and holds, those that every process of its team holds."""


def inside_of(loss_fn: LossFn) -> Inside:
    """How a worker's processes share the parameters of this loss.

    Raises:
        ValueError: the gradient of a sharded module that is not `df.autograd`'s.
    """
    size = collectives.processes_per_worker()
    if size == 1:
        return Inside()
    inner, by_autograd = loss_fn, False
    while isinstance(inner, WrappedLoss):
        by_autograd |= isinstance(inner, ByAutograd)
        inner = inner.loss_fn
    if not isinstance(inner, ShardedLoss):
        return Inside(size, is_replicated=True)
    if not by_autograd:
        raise ValueError(
            f"loss_fn={brief(inner)}: the gradient of a sharded module is PyTorch's own; write df.autograd(loss_fn)."
        )
    return Inside(size, team=inner.team, common=inner.common)
