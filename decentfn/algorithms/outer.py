"""What the algorithms with an outer loop share: when a round is due, what travels, what changes only then.

Communication every H steps is `worker.mean(x, t, when=is_due(t + 1, H))`: in all other steps nothing travels, and one
graph serves both kinds of step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn import trees
from decentfn.buckets import Buckets, wide
from decentfn.scalars import once


def is_due(done: Tensor, inner_steps: int, offset: int = 0) -> Tensor:
    """Whether a round follows after `done` steps: `offset` and every `inner_steps` from there, never before a step."""
    return once((done > 0) & ((done - offset) % inner_steps == 0))


def where(due: Tensor | Buckets, new: Buckets, old: Buckets) -> Buckets:
    """`new` where `due` (0-d bool, or bool buckets: one answer per element), else `old`; in the dtypes of `old`."""
    answers = [due] * len(old) if isinstance(due, torch.Tensor) else due
    pairs = zip(answers, new, old, strict=True)
    return Buckets([torch.where(d.to(b.device), a.to(b.dtype), b) for d, a, b in pairs], old.plan)


def slow_copy(x: Buckets) -> Buckets:
    """A copy of `x` for slow parameters, in float32 or wider, so that small outer steps are not lost."""
    return trees.map(lambda b: b.to(wide(b.dtype), copy=True), x)


def to_send(phi: Buckets, theta: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """What a worker contributes to the outer gradient: θ, or where that is rounded the difference φ - θ.

    The mean of θ also brings φ together where they started apart; but rounded, it would drown what was learned.
    """
    return theta if wire_dtype is None else trees.map(torch.sub, phi, theta)


def outer_gradient(phi: Buckets, mean: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """`Δ = φ - mean_i θ_i` from the mean of what was sent."""
    return trees.map(lambda phi, mean: phi - mean if wire_dtype is None else mean.to(phi.dtype), phi, mean)
