"""One evaluation of the loss and its gradient, traced by torch.func, and what a step reports of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from decentfn.core import trees
from decentfn.core.buckets import Buckets, each, global_norm, where, wide
from decentfn.core.trees import PyTree
from decentfn.gradient.loss import LossFn, call


class Metrics(NamedTuple):
    """What a step reports; each `[N]` first when simulated."""

    loss: Tensor  # 0-d, this worker's, at the parameters that the gradient was taken at
    aux: PyTree  # what the loss returned beside it, or None
    grad_norm: Tensor
    """0-d, l2 norm of this worker's gradient over all parameters, before clipping; inf where a scaled loss's is bad."""
    guard: Any = None
    """What `df.guard` has counted so far; None without it."""


class Gradient(NamedTuple):
    """One evaluation of the loss and its gradient."""

    grads: Buckets  # 0 where this worker's own gradient is not finite
    loss: Tensor  # 0-d
    aux: PyTree  # [M, ...] of M micro-batches
    buffers: PyTree = None
    """The loss's new ones."""
    used: Buckets | None = None
    """Bool, for each element whether its leaf has a gradient; None where nobody asks: `df.autograd` with `skip_unused`."""
    good: Tensor | None = None
    """0-d bool, whether the gradient is finite; None where nobody asks: the loss is not scaled."""
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
        """The optimizer's update and new state; 0 and the old state where the gradient is bad, or a leaf has none."""
        if self.used is None and self.good is None:
            return u, opt
        nothing = each(torch.zeros_like, u)
        if (used := self.used) is not None:
            u, opt = where(used, u, nothing), trees.map_nodes(Buckets, lambda new, old: where(used, new, old), opt, old)
        return self.keep(u, nothing), self.keep(opt, old)


def where_good(condition: Tensor | None, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition (0-d bool) holds or is None, else `old`, leaf by leaf."""
    return new if condition is None else trees.map(lambda a, b: torch.where(condition, a, b), new, old)


def gradient_of(loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None) -> Gradient:
    """The gradient of one batch, traced by torch.func; see `evaluate`."""
    templates: list[PyTree] = []

    # Buffers and batch are arguments, not captured: torch.func forbids writing to what is captured.
    def loss_of(x: list[Tensor], buffers: PyTree, batch: PyTree) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        loss, new_buffers, aux = call(loss_fn, Buckets(x, params.plan).tree(), buffers, batch)
        # torch.func takes tensors only, so the tree around them is kept aside.
        templates.append(trees.enumerate_leaves((new_buffers, aux)))
        extras = [torch.as_tensor(leaf) for leaf in trees.leaves((new_buffers, aux))]
        scaled = loss if scale is None else loss.to(wide(loss.dtype)) * scale
        return scaled, (loss, extras)

    found, (_, (loss, extras)) = grad_and_value(loss_of, has_aux=True)(list(params.tensors), buffers, batch)
    grads = Buckets(found, params.plan)
    new_buffers, aux = trees.fill(templates[0], extras)
    return Gradient(grads if scale is None else unscaled(grads, scale), loss, aux, new_buffers)


def unscaled(grads: Buckets, scale: Tensor) -> Buckets:
    """The gradient of a loss from that of `scale` times it."""
    inverse = scale.double().reciprocal().float()  # torch.amp.GradScaler's arithmetic
    return each(lambda g: (g.to(wide(g.dtype)) * inverse).to(g.dtype), grads)
