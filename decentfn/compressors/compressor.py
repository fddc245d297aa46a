"""The type of compressors, and compressors whose messages are made of fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.compressors import wire
from decentfn.core.arguments import rule_of
from decentfn.core.buckets import BucketPlan


class Key(NamedTuple):
    """Step, sender and bucket of a message: with the seed, they determine the draws of random compressors."""

    t: Tensor  # 0-d int64, the step
    worker: Tensor  # 0-d int64, the sender
    bucket: int = 0


class Compressor(NamedTuple):
    """Pair of functions between a bucket `[D]` and a message `[B]` uint8, and their properties.

    The plan holds the bucket's dtype, its size and the shapes of its leaves; `B` depends on nothing else.
    """

    name: str
    """Call that made the compressor, with its arguments."""
    compress: Callable[[Tensor, BucketPlan, Key], Tensor]
    """`(bucket [D], plan, key) -> message [B]` uint8."""
    decompress: Callable[[Tensor, BucketPlan], Tensor]
    """`(message [B], plan) -> bucket [D]` of the plan's dtype; a message of zeros gives zeros."""
    nbytes: Callable[[BucketPlan], int]
    """B, the bytes on the wire."""
    delta: Callable[[BucketPlan], float | None]
    """δ, a lower bound for every x; None if C is not a contraction."""
    is_unbiased: bool = False

    def __repr__(self) -> str:
        return self.name


Fields = list[tuple[int, torch.dtype]]
"""Parts of a message: number and dtype of the values of each."""


def packed(
    name: str,
    fields: Callable[[BucketPlan], Fields],
    encode: Callable[[Tensor, BucketPlan, Key], Sequence[Tensor]],
    decode: Callable[..., Tensor],
    delta: Callable[[BucketPlan], float | None],
    is_unbiased: bool = False,
) -> Compressor:
    """Make a compressor whose message is the bytes of its fields: `encode` returns their values, `decode` gets them."""
    return Compressor(
        name,
        lambda x, plan, key: wire.join(*encode(x, plan, key)),
        lambda message, plan: decode(plan, *wire.split(message, fields(plan))),
        lambda plan: sum(count * dtype.itemsize for count, dtype in fields(plan)),
        delta,
        is_unbiased,
    )


RULES = {
    **dict.fromkeys(("k", "rank", "chunk"), rule_of(lambda x: x is None or x >= 1, "is an integer >= 1.")),
    "fraction": rule_of(lambda x: 0 < x <= 1, "lies in (0, 1]; for a number of values write k=."),
    "levels": rule_of(lambda x: 1 <= x <= 127, "is an integer in [1, 127], so that a value fits in a byte."),
}
"""Rules of the arguments of compressors, by their names."""
