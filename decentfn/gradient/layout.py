"""What the gradient operator gives to a loss, apart from values: looked at once, for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from operator import attrgetter
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from decentfn import trees
from decentfn.buckets import Buckets, Plan
from decentfn.torch_private.autograd import leaves_of, renew
from decentfn.torch_private.storages import pieces
from decentfn.trees import PyTree

_LARGE, _LARGE_BUCKET = 2**19, 2**23
"""Bytes of a leaf whose gradient is copied as soon as it is there, and of its bucket. It then is not held twice; all others are
joined at the end, which takes less time.
"""


_looked_at = attrgetter("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks", "__dict__")
_AS_MADE = True, None, None, None, {}
"""What is seen so of a leaf that nobody has touched."""


class Large(NamedTuple):
    """A leaf whose gradient is copied into its bucket as soon as it is there."""

    leaf: int
    bucket: int
    place: int  # among the bucket's leaves


class _Kept:
    """Leaves of these vectors, until one of them is gone."""

    def __init__(self, leaves: list[Tensor], vectors: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.is_clean = True
        """Whether they were given back as they were made."""
        self._vectors = [ref(vector, lambda _: leaves.clear()) for vector in vectors]

    def are_of(self, vectors: Sequence[Tensor]) -> bool:
        """Whether they are of these."""
        return all([known() is vector for known, vector in zip(self._vectors, vectors, strict=True)])


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
        self._kept: _Kept | None = None
        self._params, self._buffers = trees.Template(self.plan.template), trees.Template(self.buffers)
        places = [(i, k, s.numel * b.dtype.itemsize) for i, b in enumerate(buckets) for k, s in enumerate(b.segments)]
        self.large = [
            Large(leaf, bucket, place)
            for leaf, (bucket, place, nbytes) in enumerate(places)
            if nbytes >= _LARGE and buckets[bucket].nbytes >= _LARGE_BUCKET and len(buckets[bucket].segments) > 1
        ]

    def leaves(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """All leaves, views of the buckets' vectors, each a leaf to autograd: those that were kept of these very vectors."""
        if (kept := self._kept) is not None and kept.is_clean and kept.are_of(vectors):
            kept.is_clean = False
            renew(kept.leaves)
            return kept.leaves
        return leaves_of(lambda: chain.from_iterable(map(self.parts, count(), vectors)))

    def keep(self, leaves: list[Tensor], vectors: Sequence[Tensor]) -> None:
        """Keep leaves that nobody has touched for the next step, which has the same vectors where it writes over its state."""
        if all(map(_AS_MADE.__eq__, map(_looked_at, leaves))):
            if self._kept is None or self._kept.leaves is not leaves:
                self._kept = _Kept(leaves, vectors)
            self._kept.is_clean = True

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
