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

_Parts = dict[int, list[Tensor]]  # of the leaves that are taken apart, by position


class Layout:
    """Parts and spare parameters of the states of one form.

    Args:
        state: a stacked state.
        by_leaf: True if the leaves of a bucket can be computed apart (`Step.by_leaf`). Those of a state with vectors of another
            layout than the parameters' are not.
    """

    def __init__(self, state: Any, by_leaf: bool) -> None:
        self._sizes: dict[int, list[int]] = {}  # of the parts of a leaf, by its position
        self._parts = WeakIdKeyDictionary()  # of a state's leaves, by its first parameters
        self._spares: list[tuple[dict[int, Tensor], _Parts]] = []  # not in use, with their parts
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

    def take(self, leaves: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the parts of a state's leaves, those of parameters with those of the spare; and what `put` wants back."""
        try:
            spare, new = self._spares.pop()
        except IndexError:  # asked first, another thread could take the last one
            with torch.inference_mode(False):  # or later steps outside that mode could not write to what is made here
                spare = {i: torch.empty_like(leaves[i]) for i in self._moved}
            new = {i: [x] for i, x in spare.items()} | self._apart(spare)
        parts = self._parts.get(leaves[self._moved[0]])
        if parts is None or any(leaves[i].data_ptr() != its[0].data_ptr() for i, its in parts.items()):
            self._parts[leaves[self._moved[0]]] = parts = self._apart(dict(enumerate(leaves)))
        given: list[Any] = []
        for i, x in enumerate(leaves):
            its = parts.get(i) or [x]
            given += zip(its, new[i], strict=True) if i in new else its
        return given, (spare, new, parts)

    def put(self, leaves: Sequence[Any], is_new: bool, spare: dict[int, Tensor], new: _Parts, parts: _Parts) -> None:
        """Take back the spare; if it has the new parameters, they change places."""
        for i, other in spare.items() if is_new else ():
            x, old = leaves[i], leaves[i].detach()
            x.set_(other)
            other.set_(old)
            if i in parts:
                parts[i], new[i] = new[i], parts[i]
        self._spares.append((spare, new))

    @torch.inference_mode(False)
    def _apart(self, leaves: dict[int, Any]) -> _Parts:
        cut = {i: sizes for i, sizes in self._sizes.items() if len(sizes) > 1 and i in leaves}
        # To write to views of one storage, torch.compile would copy all of it; in its eyes these share none.
        return {i: [torch.from_dlpack(x) for x in leaves[i].detach().split(cut[i], dim=-1)] for i in cut}


def _has_one_layout(state: Any) -> bool:
    """Return True if all vectors of a state are laid out as its parameters are."""
    known = state.params.plan.buckets
    pairs = [pair for node in trees.nodes_of(Buckets, state) for pair in zip(node, node.plan.buckets, strict=True)]
    in_buckets = {id(x) for x, _ in pairs}
    others = [x for x in trees.leaves(getattr(state, "memory", ())) if id(x) not in in_buckets]
    return all(bucket in known and x.shape[-1] == bucket.numel for x, bucket in pairs) and all(
        x.dim() < 2 for x in others
    )
