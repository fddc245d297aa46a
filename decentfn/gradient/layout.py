"""What the gradient operator gives to a loss, apart from values: looked at once, for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import trees
from decentfn.buckets import Buckets, Plan
from decentfn.torch_private.autograd import leaves_of
from decentfn.torch_private.storages import pieces
from decentfn.trees import PyTree

_LARGE, _LARGE_BUCKET = 2**19, 2**23
"""Bytes of a leaf whose gradient is copied as soon as it is there, and of its bucket. It then is not held twice; all others are
joined at the end, which takes less time.
"""


class Large(NamedTuple):
    """A leaf whose gradient is copied into its bucket as soon as it is there."""

    leaf: int
    bucket: int
    place: int  # among the bucket's leaves


@dataclass
class Layout:
    """Where the leaves lie in buckets, what the loss takes, and what it writes over."""

    plan: Plan
    buffers: PyTree  # template
    changing: tuple[int, ...]
    """Which of the buffers' leaves the loss changes: all but the frozen ones, and those it writes over."""
    writes: bool = False
    """Whether the loss writes over its parameters."""
    is_tried: bool = False
    """Whether the loss has been seen to leave the rest alone."""
    large: list[Large] = field(init=False)

    def __post_init__(self) -> None:
        buckets = self.plan.buckets
        self._params, self._buffers = trees.Template(self.plan.template), trees.Template(self.buffers)
        places = [(i, k, s.numel * b.dtype.itemsize) for i, b in enumerate(buckets) for k, s in enumerate(b.segments)]
        self.large = [
            Large(leaf, bucket, place)
            for leaf, (bucket, place, nbytes) in enumerate(places)
            if nbytes >= _LARGE and buckets[bucket].nbytes >= _LARGE_BUCKET and len(buckets[bucket].segments) > 1
        ]

    def leaves(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """All leaves, views of the buckets' vectors, each a leaf to autograd."""
        return leaves_of(lambda: chain.from_iterable(map(self.parts, count(), vectors)))

    def parts(self, bucket: int, vector: Tensor) -> Sequence[Tensor]:
        """The leaves of one bucket, views of its vector."""
        if self._like is None:
            return Buckets([vector], Plan((self.plan.buckets[bucket],), None)).leaves()
        return pieces(vector, self._like[bucket])

    @cached_property
    def _like(self) -> list[list[Tensor]] | None:
        """Of each bucket, what has its leaves' shapes; None where some are empty or complex. Not made while a step is traced."""
        if any(not s.numel or s.is_complex for b in self.plan.buckets for s in b.segments):
            return None
        return [[torch.empty(s.shape, device="meta") for s in b.segments] for b in self.plan.buckets]

    def arguments(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[PyTree, PyTree]:
        """The trees of parameters and buffers that the loss takes."""
        return self._params.filled(leaves), self._buffers.filled(buffers)
