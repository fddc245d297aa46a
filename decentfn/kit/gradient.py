"""One evaluation of the loss and its gradient, good or bad."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import gossip, trees
from decentfn.buckets import Buckets, add, elementwise, global_norm, is_finite, where
from decentfn.kit.state import Metrics
from decentfn.trees import PyTree


class Gradient(NamedTuple):
    """One evaluation of the loss and its gradient."""

    grads: Buckets  # 0 where this worker's own gradient is not finite
    loss: Tensor
    aux: PyTree
    good: Tensor | None = None
    """0-d bool, whether the gradient is finite; None where nobody asks: the loss is not scaled."""
    used: Buckets | None = None
    """Bool, for each element whether its leaf has a gradient; None where nobody asks: `df.autograd` with `skip_unused`."""
    moves: Buckets | None = None
    """How far the loss itself moved the parameters before it took the gradient (`df.autograd`); None: it left them alone."""

    norm: Tensor | None = None
    """The gradient's own, 0-d, where it was computed to see whether it is finite."""

    @property
    def metrics(self) -> Metrics:
        """What a step reports. Ask last: where the norm is computed after the update, one loop does both."""
        norm = global_norm(self.grads) if self.norm is None else self.norm
        norm = norm if self.good is None else torch.where(self.good, norm, torch.full_like(norm, float("inf")))
        return Metrics(self.loss, self.aux, norm)

    def keep(self, new: PyTree, old: PyTree) -> PyTree:
        """`new`, or `old` where the gradient is bad: what an algorithm remembers of gradients is that of good ones."""
        return where_good(self.good, new, old)

    def move(self, u: Buckets, opt: PyTree, old: PyTree) -> tuple[Buckets, PyTree]:
        """The optimizer's update and new state; 0 and the old state where the gradient is bad, or a leaf has none.

        Where the loss moved the parameters, that is part of the update.
        """
        nothing = elementwise(torch.zeros_like, u)
        if (used := self.used) is not None:
            u, opt = where(used, u, nothing), trees.map_nodes(Buckets, lambda new, old: where(used, new, old), opt, old)
        u = u if self.moves is None else add(u, self.moves)
        return self.keep(u, nothing), self.keep(opt, old)


def where_good(condition: Tensor | None, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition (0-d bool) holds or is None, else `old`, leaf by leaf."""
    return new if condition is None else trees.map(lambda a, b: torch.where(condition, a, b), new, old)


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
