"""Many tensors in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_each(sources: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Each of the sources into its place."""
    for source, place in zip(sources, places, strict=True):
        place.copy_(source)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of many tensors."""
    return torch.cat([x.reshape(-1) for x in tensors])


def pieces(vector: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """What lies in a vector one after another, views in the shapes of these."""
    parts = vector.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]
