"""What a guarded step does where values are infinite or NaN: they do not travel, and nobody is pulled by what stands for them.

Within `guarded()` every message is judged before it leaves. Zeros travel in the place of a bad one, and beside each a flag;
with v_j = 1 where j's message is good, i's row of W becomes

    v_i = 1:  W[i,j] v_j  for the neighbours,  W[i,i] + Σ_j W[i,j] (1 - v_j)  for itself
    v_i = 0:  W[i,j] v_j / Σ_j W[i,j] v_j      for the neighbours,  0  for itself

and a mean over a group is that of its good members. Where W is symmetric, the good workers' part of it stays doubly stochastic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import buckets, collectives
from decentfn.scalars import moved, once
from decentfn.topologies import Round


class Noted(NamedTuple):
    """What a step has met: 0-d bools, one for each place where it looked."""

    skipped: list[Tensor]  # a gradient or an update was bad
    replaced: list[Tensor]  # what this worker would have sent was bad


class _Here(threading.local):
    def __init__(self) -> None:
        # A list that is added to: of an attribute that is set, torch.compile forgets the value where it traces a loop.
        self.steps: list[Noted] = []


_here = _Here()
"""`.steps`: the guarded steps that this thread is in, the innermost last."""


@contextmanager
def guarded() -> Iterator[Noted]:
    """Within, messages and gradients are judged, and what was bad is noted."""
    noted = Noted([], [])
    _here.steps.append(noted)
    try:
        yield noted
    finally:
        _here.steps.pop()


def is_guarded() -> bool:
    """Whether the step that runs is guarded."""
    return bool(_here.steps)


def note_skipped(bad: Tensor) -> None:
    """In a guarded step, note where a gradient or an update is bad, 0-d bool."""
    _here.steps[-1].skipped.append(bad)


def note_replaced(bad: Tensor) -> None:
    """In a guarded step, note where this worker's message is bad, 0-d bool."""
    _here.steps[-1].replaced.append(bad)


class Flags(NamedTuple):
    """Which messages of a post are good."""

    own: Tensor  # 0-d bool, this worker's
    inbox: Tensor | None  # [K, 1] float32 in flight, 1 for each good message
    mean: Tensor | None  # [1] float32 in flight, which part of the group's are good


class Heard(NamedTuple):
    """This worker's row of the mixing matrix once the flags are in."""

    weights: Tensor  # [K+1] float64, own weight first; NaN where a bad worker hears nothing good
    mean_weight: Tensor | None  # 0-d float64
    scale: Tensor | None  # 0-d float64, from the sum over the good members / r to their mean


def are_finite(x: Sequence[Tensor]) -> Tensor:
    """Whether nothing in the tensors is infinite or NaN, on no process of this worker, 0-d bool."""
    # Counted in floating point, as a norm is: Inductor does both in the loop that writes the values.
    bad = [torch.where(buckets.is_finite(b), 0.0, 1.0).sum() for b in x]
    return once(buckets.sum_inside(torch.stack(bad).sum(), collectives.processes_per_worker()) == 0)


def judged(sent: Sequence[Tensor]) -> Tensor:
    """Whether this worker's message is finite, 0-d bool; where it is not that is noted."""
    good = are_finite(sent)
    note_replaced(~good)
    return good


def post_flags(good: Tensor, peers: Tensor | None, groups: Tensor | None, t: Tensor) -> Flags:
    """Start to tell the neighbours of step `t` whether this worker's message is good."""
    flag = good.to(torch.float32).view(1)
    inbox = None if peers is None else collectives.exchange(flag, peers, t)
    return Flags(good, inbox, None if groups is None else collectives.group_mean(flag, groups, t))


def hear(flags: Flags, this: Round, weights: Tensor, mean_weight: Tensor | None) -> Heard:
    """Wait for the flags: what becomes of this worker's row of the round `this`."""
    good, others = flags.own, weights[1:]
    if flags.inbox is not None:
        others = others * collectives.wait(flags.inbox)[:, 0].to(weights.dtype)
    share = others.sum()
    scale = None
    if flags.mean is not None and mean_weight is not None and this.groups is not None:
        groups = moved(this.groups, weights.device)
        me = collectives.worker_index(good).view(1)  # the weights may be all workers'
        size = (groups == groups.index_select(0, me)).sum()
        count = torch.round(collectives.wait(flags.mean)[0] * size).to(weights.dtype)
        scale = once(size / count.clamp(min=1))
        mean_weight = torch.where(count > 0, mean_weight, torch.zeros_like(mean_weight))
        share = share + mean_weight
    kept = (weights[0] + (weights[1:] - others).sum())[None]
    alone = torch.where(share > 0, 0.0, float("nan")).to(kept.dtype)[None]
    row = torch.where(good, torch.cat([kept, others]), torch.cat([alone, others / share]))
    if mean_weight is not None:
        mean_weight = torch.where(good, mean_weight, mean_weight / share)
    return Heard(once(row), mean_weight, scale)


def unless_bad(x: Sequence[Tensor], other: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """`x`, or `other()` in its place where a guarded step finds something in `x` that is infinite or NaN."""
    if not is_guarded():
        return list(x)
    good = judged(x)
    return [torch.where(good, a, b.to(a.dtype)) for a, b in zip(x, other(), strict=True)]
