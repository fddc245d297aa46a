"""Gossip of a guarded step: infinite or NaN values are not sent, and their replacements get no weight.

Within `guarded()` every message is checked before it is sent. Zeros replace a bad message, and a flag accompanies each
one; with v_j = 1 if j's message is good, i's row of W becomes

    v_i = 1:  W[i,j] v_j  for the neighbors,  W[i,i] + Σ_j W[i,j] (1 - v_j)  for itself
    v_i = 0:  W[i,j] v_j / Σ_j W[i,j] v_j      for the neighbors,  0  for itself

and a mean over a group is the mean of its good members. If W is symmetric, its block of good workers stays doubly
stochastic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import buckets, context, once
from decentfn.core.buckets import Buckets
from decentfn.torch_private import functorch


class Noted(NamedTuple):
    """Checks of a step: 0-d bools, False if a value was bad."""

    updates: list[Tensor]  # of a gradient, an update or a buffer
    messages: list[Tensor]  # of a message of this worker


@contextmanager
def guarded() -> Iterator[Noted]:
    """Context in which messages and gradients are checked, which is noted."""
    noted = Noted([], [])
    context.guarded.append(noted)
    try:
        yield noted
    finally:
        context.guarded.pop()


class Flags(NamedTuple):
    """Flags of the messages of a post: True or 1 for a good message."""

    own: Tensor  # 0-d bool, this worker's
    inbox: collectives.Flight | None  # [K, 1] float32, 1 for each good message
    mean: collectives.Flight | None  # [1] float32, the fraction of the group's that are good


def are_finite(x: Iterable[Tensor]) -> Tensor:
    """Return True (0-d bool) if the tensors have no infinite or NaN value on any process of this worker."""
    size, x = collectives.processes_per_worker(), list(x)
    if size == 1 and buckets.known_finite(x):
        return x[0].new_ones((), dtype=torch.bool)
    # Counted in floating point, like a norm: Inductor does both in the loop that writes the values.
    bad = [torch.where(buckets.is_finite(b), 0.0, 1.0).sum() for b in x]
    return once(buckets.sum_within_worker(torch.stack(bad).sum(), size) == 0)


def judged(sent: Iterable[Tensor]) -> Tensor:
    """Return True (0-d bool) if this worker's message is finite, and note it."""
    good = are_finite(sent)
    context.guarded[-1].messages.append(good)
    return good


def beside(sent: Iterable[Tensor], number: Tensor) -> Tensor:
    """Return a number that goes with this message: NaN if a guarded step leaves the message out, so the number too."""
    return torch.where(judged(sent), number, torch.nan) if context.guarded else number


def post_flags(good: Tensor, row: collectives.Row) -> Flags:
    """Start to tell this round's neighbors whether this worker's message is good."""
    flag = good.to(torch.float32).view(1)
    inbox = collectives.exchange(flag, row) if row.topology.degree else None
    return Flags(good, inbox, collectives.group_mean(flag, row) if row.topology.has_groups else None)


def hear(flags: Flags, row: collectives.Row) -> tuple[Flags | None, collectives.Row, Tensor | None]:
    """Wait for the flags; return them (None: all are good), the row without bad messages (NaN: none is), the means' factor."""
    good, weights, mean_weight = flags.own, row.weights, row.mean_weight
    others, count, scale = weights[1:], None, None
    if flags.inbox is not None:
        others = others * collectives.wait(flags.inbox)[:, 0].to(weights.dtype)
    if flags.mean is not None and mean_weight is not None:
        count = torch.round(collectives.wait(flags.mean)[0] * row.group_size).to(weights.dtype)
    are_others = functorch.holds(good) and functorch.holds(others == weights[1:])
    if are_others and (count is None or functorch.holds(count == row.group_size)):
        return None, row, None
    share = others.sum()
    if count is not None and mean_weight is not None:
        scale = once(row.group_size / count.clamp(min=1))
        mean_weight = torch.where(count > 0, mean_weight, torch.zeros_like(mean_weight))
        share = share + mean_weight
    kept = (weights[0] + (weights[1:] - others).sum())[None]
    alone = torch.where(share > 0, 0.0, float("nan")).to(kept.dtype)[None]
    new = once(torch.where(good, torch.cat([kept, others]), torch.cat([alone, others / share])))
    if mean_weight is not None:
        mean_weight = torch.where(good, mean_weight, mean_weight / share)
    given = torch.cat([row.given, (weights[0] - new[0])[None]])  # the share of a bad worker stays here
    return flags, row._replace(weights=new, mean_weight=mean_weight, given=given), scale


def unless_bad(x: Buckets, other: Callable[[], Buckets] | None = None) -> Buckets:
    """Return `x`, or `other()` if a guarded step finds an infinite or NaN value in `x`; None: zeros.

    A fallback for methods that send no parameters. Without `df.guard` the result is `x`, and `other` is not called.
    """
    if not context.guarded or functorch.holds(good := judged(x)):
        return x
    instead = buckets.each(torch.zeros_like, x) if other is None else buckets.cast_like(other(), x)
    return buckets.where(good, x, instead)
