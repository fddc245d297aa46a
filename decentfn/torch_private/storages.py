"""Pieces of memory: who uses one, and many tensors in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def copy_each(sources: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Each of the sources into its place."""
    torch._foreach_copy_(list(places), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One vector of many real tensors; of a thousand in a third of the time that `torch.cat` of their vectors takes."""
    return _flatten_dense_tensors(tensors)


def pieces(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What lies in a vector one after another, views in the shapes of these, of which none is empty."""
    return _unflatten_dense_tensors(vector, like)
