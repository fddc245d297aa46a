"""Evaluation of the loss and its gradient, traced by torch.func, and the metrics of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, trees
from decentfn.core.buckets import Buckets, each, global_norm, where, wide
from decentfn.gradient.loss import LossFn, call_loss, require_graph
from decentfn.gradient.module import ModuleLoss
from decentfn.torch_private import functorch


class Metrics(NamedTuple):
    """Metrics of a step; each has a leading `[N]` when simulated."""

    loss: Tensor  # 0-d, this worker's, at the parameters that the gradient was taken at
    aux: PyTree  # the loss's second result, or None
    grad_norm: Tensor
    """0-d l2 norm of this worker's gradient over all parameters, before clipping; inf if a scaled loss's is bad."""
    guard: Any = None
    """Counts of `df.guard` so far; None without it."""
    learning_rate: Tensor | None = None
    """0-d float64 learning rate of the step just taken; `[G]` of G parameter groups; None if the optimizer has none."""


class Gradient(NamedTuple):
    """Result of one evaluation of the loss and its gradient."""

    grads: Buckets  # 0 if this worker's own gradient is not finite
    loss: Tensor  # 0-d
    aux: PyTree  # [M, ...] of M micro-batches
    buffers: PyTree = None
    """New buffers of the loss."""
    used: Buckets | None = None
    """Bool, True for each element whose leaf has a gradient; None without `skip_unused` of `df.autograd`."""
    good: Tensor | None = None
    """0-d bool, True if the gradient is finite; None if it is not checked: the loss is not scaled."""
    norm: Tensor | None = None
    """Norm of the gradient, 0-d, if it is known: computed to check the gradient, or in an eager step."""
    weight: Tensor | None = None
    """Worker's weight of this step, 0-d float64 and >= 0; None without `weight`."""

    @property
    def metrics(self) -> Metrics:
        """Metrics of the step. Read them last: a norm computed after the update shares its loop."""
        norm = global_norm(self.grads) if self.norm is None else self.norm
        norm = norm if self.good is None else torch.where(self.good, norm, torch.full_like(norm, float("inf")))
        return Metrics(self.loss, self.aux, norm)

    def keep(self, new: PyTree, old: PyTree) -> PyTree:
        """Return `new`, or `old` if the gradient is bad: an algorithm's memory contains good gradients only."""
        return where_good(self.good, new, old)

    def move(self, u: Buckets, opt: PyTree, old: PyTree) -> tuple[Buckets, PyTree]:
        """Return the update and the new state; 0 and the old state if the gradient is bad or a leaf has none."""
        if self.used is None and (self.good is None or functorch.holds(self.good)):
            return u, opt
        if (used := self.used) is not None:
            flags = dict(zip(map(id, used.plan.buckets), used, strict=True))

            def stays(new: Buckets, old: Buckets) -> Buckets:  # of all buckets, or of those of a part
                return where(Buckets([flags[id(plan)] for plan in new.plan.buckets], new.plan), new, old)

            u, opt = where(used, u, each(torch.zeros_like, u)), trees.map_nodes(Buckets, stays, opt, old)
        return self.keep(u, each(nothing_like, u)), self.keep(opt, old)


def where_good(condition: Tensor | None, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the condition (0-d bool) holds or is None, else `old`, leaf by leaf."""
    if condition is None or functorch.holds(condition):
        return new
    return trees.map(lambda a, b: torch.where(condition, a, b), new, old)


def nothing_like(x: Tensor) -> Tensor:
    """Return a 0 of this dtype that `where_good` broadcasts."""
    return x.new_zeros(())


def gradient_of(loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None) -> Gradient:
    """Compute the gradient of one batch, traced by torch.func; see `evaluate`."""
    structures: list[Any] = []
    given, inputs = trees.take_apart((buffers, batch))

    # Buffers and batch are arguments, not captured: torch.func forbids writing to captured tensors.
    def loss_of(x: list[Tensor], given: list[Any]) -> tuple[Tensor, list[Tensor]]:
        buffers, batch = trees.put_together(inputs, given)
        loss, new_buffers, aux = call_loss(loss_fn, Buckets(x, params.plan).tree(), buffers, batch)
        require_graph(loss)
        if not isinstance(loss_fn, ModuleLoss):  # which returns copies; a function may return its batch or a parameter
            new_buffers = trees.map(torch.clone, new_buffers)
        # torch.func takes tensors only, so the tree around them is stored separately.
        leaves, structure = trees.take_apart((new_buffers, aux))
        structures.append(structure)
        scaled = loss if scale is None else loss.to(wide(loss.dtype)) * scale
        return scaled, [loss, *map(_tensor, leaves)]

    found, (loss, *extras) = functorch.grad(loss_of, list(params.tensors), given)
    grads = Buckets(found, params.plan)
    new_buffers, aux = trees.put_together(structures[0], extras)
    return Gradient(grads if scale is None else unscaled(grads, scale), loss, aux, new_buffers)


def _tensor(leaf: Any) -> Tensor:
    try:
        return torch.as_tensor(leaf)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"loss_fn returned {brief(leaf)} in its aux or buffers: if the gradient is traced, these are trees of tensors and numbers; "
            "with df.autograd(loss_fn) aux may be anything."
        ) from error


def unscaled(grads: Buckets, scale: Tensor) -> Buckets:
    """Divide the gradient of `scale * loss` by the scale."""
    inverse = scale.double().reciprocal().float()  # torch.amp.GradScaler's arithmetic
    return each(lambda g: (g.to(wide(g.dtype)) * inverse).to(g.dtype), grads)
