"""The gradient of one batch, traced by torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad_and_value

from decentfn.core import trees
from decentfn.core.buckets import Buckets, elementwise, wide
from decentfn.core.trees import PyTree
from decentfn.gradient.loss import LossFn, call
from decentfn.gradient.result import Gradient


def gradient_of(loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None) -> Gradient:
    """See `evaluate`."""
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
    return elementwise(lambda g: (g.to(wide(g.dtype)) * inverse).to(g.dtype), grads)
