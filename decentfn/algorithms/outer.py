"""What the algorithms with an outer loop share: when a round is due, what travels, what changes only then.

Communication every H steps is `worker.mean(x, t, when=is_due(t + 1, H))`: in all other steps nothing travels, and one
graph serves both kinds of step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentfn.kit import Buckets, Plan, elementwise, moved, once


def is_due(done: Tensor, inner_steps: int, offset: int = 0) -> Tensor:
    """Whether a round follows after `done` steps: `offset` and every `inner_steps` from there, never before a step."""
    return once((done > 0) & ((done - offset) % inner_steps == 0))


def to_send(phi: Buckets, theta: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """What a worker contributes to the outer gradient: θ, or where that is rounded the difference φ - θ.

    The mean of θ also brings φ together where they started apart; but rounded, it would drown what was learned.
    """
    return theta if wire_dtype is None else elementwise(torch.sub, phi, theta)


def outer_gradient(phi: Buckets, mean: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """`Δ = φ - mean_i θ_i` from the mean of what was sent."""
    return elementwise(lambda phi, mean: phi - mean if wire_dtype is None else mean.to(phi.dtype), phi, mean)


class Fragments:
    """P equal slices of every bucket: fragment p is the p-th of each, and has its turn after `offsets[p]` steps of H."""

    def __init__(self, count: int, inner_steps: int) -> None:
        self.count, self.inner_steps = count, inner_steps
        self.offsets = [(p + 1) * inner_steps // count for p in range(count)]

    def split(self, x: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The slices of each fragment."""
        return list(zip(*[bucket.tensor_split(self.count) for bucket in x], strict=True))

    def join(self, fragments: Sequence[Sequence[Tensor]], plan: Plan) -> Buckets:
        """The buckets of which these are the slices."""
        return Buckets([torch.cat(slices) for slices in zip(*fragments, strict=True)], plan)

    def dues(self, done: Tensor) -> list[Tensor]:
        """For each fragment whether its turn follows after `done` steps, 0-d bool."""
        return [is_due(done, self.inner_steps, offset) for offset in self.offsets]

    def turn(self, like: Buckets, done: Tensor) -> Buckets:
        """Per element, whether its fragment's turn follows after `done` steps."""
        slices = [
            [moved(due, piece.device).expand(piece.shape) for piece in fragment]
            for due, fragment in zip(self.dues(done), self.split(list(like)), strict=True)
        ]
        return self.join(slices, like.plan)
