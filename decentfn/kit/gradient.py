"""An optimizer's update without what is infinite or NaN."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from decentfn.comm import gossip
from decentfn.core import trees
from decentfn.core.buckets import Buckets, elementwise, is_finite, where
from decentfn.core.trees import PyTree


def good_update(u: Buckets, opt: PyTree, old: PyTree, first: PyTree) -> tuple[Buckets, PyTree]:
    """An optimizer's update and new state without what is infinite or NaN in them, element by element.

    Where the update or any of an element's moments is bad, it is not updated and its moments stay as they were; they start
    anew, all of them, where they were bad before. Whether anything was bad is noted.

    Args:
        u: the update.
        opt: the new state.
        old: the state before.
        first: the state at a start.
    """
    shapes = [b.shape for b in u]

    def moments(state: PyTree) -> list[Buckets]:
        found: list[Buckets] = []
        trees.map_nodes(Buckets, lambda node: found.append(node) or node, state)
        return [node for node in found if [b.shape for b in node] == shapes]

    good, was_good = _all_finite(u, *moments(opt)), _all_finite(*moments(old), like=u)
    gossip.note_skipped(~gossip.are_finite(list(u)))

    def settle(node: Buckets, new: Buckets, old: Buckets, first: Buckets) -> Buckets:
        return where(good, new, where(was_good, old, first)) if [b.shape for b in new] == shapes else node

    others = trees.map(finite_or, opt, old, first)
    opt = trees.map_nodes(Buckets, settle, others, opt, old, first)
    return where(good, u, elementwise(torch.zeros_like, u)), opt


def finite_or(new: Tensor, old: Tensor, first: Tensor) -> Tensor:
    """`new`, where it is infinite or NaN `old`, and where that is, too, `first`; what is no floating-point number stays."""
    if not (new.is_floating_point() or new.is_complex()):
        return new
    return torch.where(is_finite(new), new, torch.where(is_finite(old), old, first))


def _all_finite(*several: Buckets, like: Buckets | None = None) -> Buckets:
    """For each element whether it is finite in all of these."""
    if not several:
        assert like is not None
        return elementwise(lambda b: torch.ones_like(b, dtype=torch.bool), like)
    return elementwise(lambda *tensors: functools.reduce(torch.logical_and, map(is_finite, tensors)), *several)
