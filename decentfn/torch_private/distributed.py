"""Place of a shard."""

from __future__ import annotations

from typing import Any


def offset_of_shard(p: Any) -> tuple[int, ...]:
    """Return the offset of this process's shard of a DTensor."""
    return tuple(p.__create_chunk_list__()[0].offsets)
