"""What a guarded step does where values are infinite or NaN: they do not travel, and nobody is pulled by what stands for them.

Within `guarded()` every message is judged before it leaves. Zeros travel in the place of a bad one, and beside each a flag;
with v_j = 1 where j's message is good, i's row of W becomes

    v_i = 1:  W[i,j] v_j  for the neighbours,  W[i,i] + Σ_j W[i,j] (1 - v_j)  for itself
    v_i = 0:  W[i,j] v_j / Σ_j W[i,j] v_j      for the neighbours,  0  for itself

and a mean over a group is that of its good members. Where W is symmetric, the good workers' part of it stays doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import buckets
from decentfn.core.buckets import Buckets
from decentfn.core.context import context
from decentfn.core.scalars import once


class Noted(NamedTuple):
    """What a step has met: 0-d bools, one for each place where it looked."""

    skipped: list[Tensor]  # a gradient or an update was bad
    replaced: list[Tensor]  # what this worker would have sent was bad


@contextmanager
def guarded() -> Iterator[Noted]:
    """Within, messages and gradients are judged, and what was bad is noted."""
    noted = Noted([], [])
    context.guarded.append(noted)
    try:
        yield noted
    finally:
        context.guarded.pop()


def is_guarded() -> bool:
    """Whether the step that runs is guarded."""
    return bool(context.guarded)


def note_skipped(bad: Tensor) -> None:
    """In a guarded step, note where a gradient or an update is bad, 0-d bool."""
    context.guarded[-1].skipped.append(bad)


def note_replaced(bad: Tensor) -> None:
    """In a guarded step, note where this worker's message is bad, 0-d bool."""
    context.guarded[-1].replaced.append(bad)


class Flags(NamedTuple):
    """Which messages of a post are good."""

    own: Tensor  # 0-d bool, this worker's
    inbox: collectives.Flight | None  # [K, 1] float32, 1 for each good message
    mean: collectives.Flight | None  # [1] float32, which part of the group's are good


def are_finite(x: Iterable[Tensor]) -> Tensor:
    """Whether nothing in the tensors is infinite or NaN, on no process of this worker, 0-d bool."""
    # Counted in floating point, as a norm is: Inductor does both in the loop that writes the values.
    bad = [torch.where(buckets.is_finite(b), 0.0, 1.0).sum() for b in x]
    return once(buckets.sum_within_worker(torch.stack(bad).sum(), collectives.processes_per_worker()) == 0)


def judged(sent: Iterable[Tensor]) -> Tensor:
    """Whether this worker's message is finite, 0-d bool; where it is not that is noted."""
    good = are_finite(sent)
    note_replaced(~good)
    return good


def post_flags(good: Tensor, row: collectives.Row) -> Flags:
    """Start to tell this round's neighbors whether this worker's message is good."""
    flag = good.to(torch.float32).view(1)
    inbox = collectives.exchange(flag, row) if row.topology.degree else None
    return Flags(good, inbox, collectives.group_mean(flag, row) if row.topology.has_groups else None)


def hear(flags: Flags, row: collectives.Row) -> tuple[collectives.Row, Tensor | None]:
    """Wait for the flags; return the row without bad messages, and what the sum over a group's good members / r is multiplied by.

    The weights are NaN where a bad worker hears nothing good.
    """
    good, weights, mean_weight = flags.own, row.weights, row.mean_weight
    others = weights[1:]
    if flags.inbox is not None:
        others = others * collectives.wait(flags.inbox)[:, 0].to(weights.dtype)
    share = others.sum()
    scale = None
    if flags.mean is not None and mean_weight is not None:
        count = torch.round(collectives.wait(flags.mean)[0] * row.group_size).to(weights.dtype)
        scale = once(row.group_size / count.clamp(min=1))
        mean_weight = torch.where(count > 0, mean_weight, torch.zeros_like(mean_weight))
        share = share + mean_weight
    kept = (weights[0] + (weights[1:] - others).sum())[None]
    alone = torch.where(share > 0, 0.0, float("nan")).to(kept.dtype)[None]
    new = once(torch.where(good, torch.cat([kept, others]), torch.cat([alone, others / share])))
    if mean_weight is not None:
        mean_weight = torch.where(good, mean_weight, mean_weight / share)
    given = torch.cat([row.given, (weights[0] - new[0])[None]])  # what a bad worker does not hear stays here
    return row._replace(weights=new, mean_weight=mean_weight, given=given), scale


def unless_bad(x: Buckets, other: Callable[[], Buckets]) -> Buckets:
    """`x`, or `other()` in its place where a guarded step finds something in `x` that is infinite or NaN.

    For what a method falls back to that sends no parameters. Without `df.guard` it is `x`, and `other` is not called.
    """
    return buckets.where(judged(x), x, buckets.cast_like(other(), x)) if is_guarded() else x
