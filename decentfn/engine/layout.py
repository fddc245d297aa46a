"""Layout of a simulated state in its compiled, donated step: leaf by leaf, and new parameters beside the old ones.

Nothing is sent, so nothing needs to lie together: the step takes a flat state as views of its large leaves, and its kernels
read each gradient where PyTorch left it. And workers read each other's parameters, so the pass that computes new ones
writes them into a spare copy, which then changes places with the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from decentfn.core import trees
from decentfn.core.buckets import Buckets


class Layout:
    """Parts and spare parameters of the states of one form.

    Args:
        state: a stacked state.
        by_leaf: True if the leaves of a bucket can be computed apart (`Step.by_leaf`). Those of a state with vectors of another
            layout than the parameters' are not.
    """

    def __init__(self, state: Any, by_leaf: bool) -> None:
        self._sizes: dict[int, list[int]] = {}  # of the parts of a leaf, by its position
        self._parts = WeakIdKeyDictionary()  # by the tensor
        self._spares: list[dict[int, Tensor]] = []  # not in use
        position = {id(x): i for i, x in enumerate(trees.leaves(state))}
        self._moved = [position[id(x)] for x in state.params if id(x) in position]

        def apart(node: Buckets) -> Buckets:
            parts: list[Tensor] = []
            plans = [bucket.apart() for bucket in node.plan.buckets]
            for x, its in zip(node, plans, strict=True):
                sizes = self._sizes[position[id(x)]] = [plan.numel for plan in its]
                parts += x.split(sizes, dim=-1)
            return Buckets(parts, replace(node.plan, buckets=tuple(plan for its in plans for plan in its)))

        if by_leaf and _has_one_layout(state):
            state = trees.map_nodes(Buckets, apart, state)
        self.template = trees.enumerate_leaves(state)
        """The state with parts of its buckets as buckets, and positions in place of tensors."""

    def take(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[int, Tensor]]:
        """Return the parts of a state's leaves, those of parameters with those of the spare; and the spare."""
        given: list[Any] = []
        with torch.inference_mode(False):  # or later steps outside that mode could not write to what is made here
            try:
                spare = self._spares.pop()
            except IndexError:  # asked first, another thread could take the last one
                spare = {i: torch.empty_like(leaves[i]) for i in self._moved}
            for i, x in enumerate(leaves):
                parts = self._apart(i, x)
                given += zip(parts, self._apart(i, spare[i]), strict=True) if i in spare else parts
        return given, spare

    def put(self, leaves: Sequence[Any], spare: dict[int, Tensor], is_new: bool) -> None:
        """Take back the spare; if it has the new parameters, they change places."""
        if is_new:
            for i, new in spare.items():
                x: Tensor = leaves[i]
                parts, old = (self._apart(i, new), self._apart(i, x)), x.detach()
                x.set_(new)  # pyright: ignore[reportArgumentType]
                new.set_(old)  # pyright: ignore[reportArgumentType]
                if i in self._sizes:
                    self._parts[x], self._parts[new] = parts
        self._spares.append(spare)

    def _apart(self, i: int, x: Any) -> list[Any]:
        sizes = self._sizes.get(i, ())
        if len(sizes) < 2:
            return [x]
        parts = self._parts.get(x)
        if parts is None or parts[0].data_ptr() != x.data_ptr():
            # To write to views of one storage, torch.compile would copy all of it; in its eyes these share none.
            self._parts[x] = parts = [torch.from_dlpack(part) for part in x.detach().split(sizes, dim=-1)]
        return parts


def _has_one_layout(state: Any) -> bool:
    """Return True if all vectors of a state are laid out as its parameters are."""
    known = state.params.plan.buckets
    pairs = [pair for node in trees.nodes_of(Buckets, state) for pair in zip(node, node.plan.buckets, strict=True)]
    in_buckets = {id(x) for x, _ in pairs}
    others = [x for x in trees.leaves(getattr(state, "memory", ())) if id(x) not in in_buckets]
    return all(bucket in known and x.shape[-1] == bucket.numel for x, bucket in pairs) and all(
        x.dim() < 2 for x in others
    )
