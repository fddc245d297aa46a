"""What a compressor is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from decentfn.buckets import BucketPlan


class Key(NamedTuple):
    """Whose message it is: what random compressors draw by, beside their seed."""

    t: Tensor  # 0-d int64, the step
    worker: Tensor  # 0-d int64, the sender
    bucket: int = 0


class Compressor(NamedTuple):
    """A pair of functions between a bucket `[D]` and a message `[B]` uint8, and what is known about it.

    The plan tells the bucket's dtype, size and the shapes of its leaves; `B` depends on nothing else.
    """

    name: str
    """The call that made it, with its arguments."""
    compress: Callable[[Tensor, BucketPlan, Key], Tensor]
    """`(bucket [D], plan, key) -> message [B]` uint8."""
    decompress: Callable[[Tensor, BucketPlan], Tensor]
    """`(message [B], plan) -> bucket [D]` of the plan's dtype; a message of zeros gives zeros."""
    nbytes: Callable[[BucketPlan], int]
    """B, the bytes on the wire."""
    delta: Callable[[BucketPlan], float | None]
    """δ, a lower bound that holds for every x; None if C is no contraction."""
    is_unbiased: bool = False

    def __repr__(self) -> str:
        return self.name


def check_chunk(call: str, chunk: int | None) -> None:
    """Raise ValueError unless `chunk` is a length, or None for the whole bucket."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"{call}(chunk={chunk!r}): a chunk is an integer >= 1, or None for the whole bucket.")
