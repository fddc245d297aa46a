"""One evaluation of the loss and its gradient, good or bad."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import trees
from decentfn.buckets import Buckets, global_norm
from decentfn.kit.state import Metrics
from decentfn.trees import PyTree


class Gradient(NamedTuple):
    """One evaluation of the loss and its gradient."""

    grads: Buckets  # 0 where this worker's own gradient is not finite
    loss: Tensor
    aux: PyTree
    good: Tensor | None = None
    """0-d bool, whether the gradient is finite; None where nobody asks: the loss is not scaled."""

    @property
    def metrics(self) -> Metrics:
        """What a step reports. Ask last: where the norm is computed after the update, one loop does both."""
        norm = global_norm(self.grads)
        norm = norm if self.good is None else torch.where(self.good, norm, torch.full_like(norm, float("inf")))
        return Metrics(self.loss, self.aux, norm)

    def keep(self, new: PyTree, old: PyTree) -> PyTree:
        """`new`, or `old` where the gradient is bad: what an algorithm remembers of gradients is that of good ones."""
        return where_good(self.good, new, old)


def where_good(condition: Tensor | None, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition (0-d bool) holds or is None, else `old`, leaf by leaf."""
    return new if condition is None else trees.map(lambda a, b: torch.where(condition, a, b), new, old)
