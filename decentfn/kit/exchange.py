"""Buckets that travel: `post` starts their messages, `collect` and `difference` wait for those of the neighbours and mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives, gossip
from decentfn.buckets import Buckets, Plan
from decentfn.topologies import Topology


class Posted(NamedTuple):
    """Buckets on their way to the neighbours, and the neighbours' to us."""

    messages: gossip.Posted
    plan: Plan

    @property
    def is_active(self) -> Tensor:
        """0-d bool, False where the schedule rests in this round."""
        return self.messages.row.is_active

    @property
    def numbers(self) -> list[Tensor]:
        """What must be computed after this post, in compiled code, takes these as arguments: `Worker.gradient(after=...)`."""
        return self.messages.numbers


def post(x: Buckets, topology: Topology, t: Tensor, *, wire_dtype: torch.dtype | None = None) -> Posted:
    """Start to send `x` to the neighbours of step `t`; an algorithm calls it as `Worker.post`.

    What is kept wider than the parameters travels in their dtypes; the own share is mixed unrounded.

    Args:
        x: what is sent, one message per bucket and neighbour.
        topology: the schedule.
        t: 0-d int64 on the CPU.
        wire_dtype: what is wider than this travels rounded to it.
    """
    messages = gossip.post(as_parameters(x), topology, t, wire_dtype=wire_dtype, own=list(x))
    return Posted(messages, x.plan)


def as_parameters(x: Buckets) -> list[Tensor]:
    """The buckets' tensors in the parameters' dtypes, where they are kept wider."""
    return [gossip.narrow(b, plan.dtype) for b, plan in zip(x, x.plan.buckets, strict=True)]


def is_active(topology: Topology, t: Tensor, like: Buckets) -> Tensor:
    """Whether `topology` has a round in step t or rests, 0-d bool on the device of `like`."""
    return collectives.look_up(like[0], topology, t).is_active


def collect(posted: Posted, gamma: float | Tensor = 1.0, *, after: Iterable[Tensor] = ()) -> Buckets:
    """Wait for what was posted and mix: `(1 - γ) x + γ W x`, each bucket as soon as its own messages are in.

    Args:
        posted: from `Worker.post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
        after: what compiled code computes before it waits: the gradient, which then hides the communication.
    """
    return Buckets(gossip.collect(_waiting(posted, after), gamma), posted.plan)


def repaired(posted: Posted, x: Buckets) -> Buckets:
    """`x`, or where a guarded step finds that what this worker posted is bad, the neighbours' mix in its place.

    For what is added to a `difference`, which is 0 for such a worker. Without `df.guard` it is `x`.

    Args:
        posted: from `Worker.post`.
        x: buckets of the same plan.
    """
    return Buckets(gossip.repaired(posted.messages, list(x)), x.plan)


def unless_bad(x: Buckets, other: Callable[[], Buckets]) -> Buckets:
    """`x`, or `other()` in its place where a guarded step finds something in `x` that is infinite or NaN.

    For what a method falls back to that sends no parameters. Without `df.guard` it is `x`, and `other` is not called.
    """
    return Buckets(gossip.unless_bad(list(x), lambda: list(other())), x.plan)


def difference(posted: Posted, gamma: float | Tensor = 1.0, *, after: Iterable[Tensor] = ()) -> Buckets:
    """Wait for what was posted and return what mixing adds, `γ (W - I) x`, in float32 or wider; its mean over workers is 0.

    What is summed up over many steps must not gather the roundings of x: add this, and not `W x - x`.

    Args:
        posted: from `Worker.post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
        after: what compiled code computes before it waits.
    """
    return Buckets(gossip.difference(_waiting(posted, after), gamma), posted.plan)


def _waiting(posted: Posted, after: Iterable[Tensor]) -> gossip.Posted:
    return posted.messages._replace(after=tuple(after))
