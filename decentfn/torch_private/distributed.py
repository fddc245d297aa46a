"""Collectives of one flat tensor, and the place of a shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def gather_into(group: Any, parts: Tensor, own: Tensor) -> None:
    """Gather each process's `own` into `parts`, in the order of ranks."""
    group._allgather_base(parts.view(-1), own.view(-1)).wait()


def reduce_scatter_into(group: Any, total: Tensor, parts: Tensor) -> None:
    """Sum `parts` over the processes; each gets the part of its rank in `total`."""
    group._reduce_scatter_base(total.view(-1), parts.view(-1)).wait()


def offset_of_shard(p: Any) -> tuple[int, ...]:
    """Return the offset of this process's shard of a DTensor."""
    return tuple(p.__create_chunk_list__()[0].offsets)
