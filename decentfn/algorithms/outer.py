"""What the algorithms with an outer loop share: when a round is due, what travels, what changes only then.

Communication every H steps is `worker.mean(x, t, when=is_due(t + 1, H))`: in all other steps nothing travels, and one
graph serves both kinds of step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn.kit import Buckets, each, once


def is_due(done: Tensor, inner_steps: int, offset: int = 0) -> Tensor:
    """Whether a round follows after `done` steps: `offset` and every `inner_steps` from there, never before a step."""
    return once((done > 0) & ((done - offset) % inner_steps == 0))


def to_send(phi: Buckets, theta: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """What a worker contributes to the outer gradient: θ, or where that is rounded the difference φ - θ.

    The mean of θ also brings φ together where they started apart; but rounded, it would drown what was learned.
    """
    return theta if wire_dtype is None else each(torch.sub, phi, theta)


def outer_gradient(phi: Buckets, mean: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """`Δ = φ - mean_i θ_i` from the mean of what was sent."""
    return each(lambda phi, mean: phi - mean if wire_dtype is None else mean.to(phi.dtype), phi, mean)
