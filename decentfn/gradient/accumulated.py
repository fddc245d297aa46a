"""Gradient averaged over micro-batches.

`accumulate(loss_fn)` is a loss too, of a separate type, which tells the gradient code that batches have a leading axis
of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, require, trees
from decentfn.core.buckets import Buckets, wide
from decentfn.gradient.loss import LossFn, WrappedLoss, require_loss
from decentfn.gradient.result import Gradient, gradient_of
from decentfn.gradient.scaled import DynamicLossScale


class Accumulated(WrappedLoss):
    """Loss whose batches are micro-batches; calling it gives the loss of one micro-batch. Made by `accumulate`."""


def accumulate(loss_fn: LossFn) -> LossFn:
    """Average the gradient of a loss over micro-batches: one update and one exchange per step.

    Every leaf of the batch is `[M, b, ...]`: M micro-batches of b samples. Alternatively the batch is a list of M
    micro-batches of one structure, none of them a bare tensor (a list of tensors is one batch), with leaves of any
    shapes. They are processed one after another, and buffers pass from one to the next; the loss is called M times. A
    compiled traced step has all M in its graph, so it compiles for longer; with `df.autograd` the graph does not grow
    with M. The step reports the mean loss, the norm of the mean gradient, and `aux` stacked, `[M, ...]` (a list, where
    its shapes or names differ).

    If the loss is a mean, M micro-batches of size b equal one batch of size M b (except for batch statistics). Each
    micro-batch counts alike, whatever its size. Each step may have another M: the mean is over its own. A compiled
    traced step compiles again for a second M.

    Args:
        loss_fn: the loss of one micro-batch, as an algorithm takes it.

    Raises:
        ValueError: `loss_fn` is not a function, or is accumulated already; in a step, the leaves do not agree in M and
            b. (If no leaf shows it, such as a single leaf `[B, T]`, a batch without the axis is taken for B
            micro-batches.)

    >>> import decentfn as df
    >>> loss_fn = accumulate(lambda params, batch: ((batch - params) ** 2).mean())
    >>> init, step = df.all_reduce(loss_fn, df.sgd(0.5), df.topology("complete", 1))
    >>> state, metrics = step(init(torch.zeros(1)), torch.tensor([[1.0], [3.0]]), 0)
    >>> df.params(state), metrics.loss
    (tensor([2.]), tensor(5.))
    """
    require_loss("accumulate(loss_fn)", loss_fn)
    rule = "one scale serves all micro-batches; the other way round, df.dynamic_loss_scale(df.accumulate(loss_fn))."
    require(not isinstance(loss_fn, DynamicLossScale), "accumulate(dynamic_loss_scale(loss_fn))", rule)
    rule = "expected the loss of one micro-batch, which is not accumulated yet."
    require(not isinstance(loss_fn, Accumulated), f"accumulate(loss_fn={brief(loss_fn)})", rule)
    return Accumulated(loss_fn)


def separate(batch: PyTree) -> list[PyTree]:
    """Return the micro-batches of a batch; those of a list may differ in their shapes."""
    if is_list_of_micros(batch):
        return batch
    stacks, template = trees.leaves(batch), trees.enumerate_leaves(batch)
    shapes = [list(x.shape) if hasattr(x, "shape") else [type(x).__name__] for x in stacks]
    # With one axis alone, a batch of samples would pass for micro-batches of one.
    if not shapes or any(len(shape) < 2 or shape[:2] != shapes[0][:2] or not shape[0] for shape in shapes):
        raise ValueError(
            f"accumulate(loss_fn): the batch's leaves are {shapes}, but each is [M, b, ...], with the same leading axis of M >= 1 "
            "micro-batches and then that of b samples: x.unflatten(0, (M, -1)). Leaves of other shapes go into a list of M "
            "micro-batches. A list of bare tensors is one batch: torch.stack(batch) has the axes, and of unequal shapes "
            "[(x,) for x in batch] is a list of micro-batches (x,)."
        )
    # To Dynamo the length of a range is a constant even if M changes during a run, while a size becomes a symbol.
    count = len(range(stacks[0].shape[0]))
    return [trees.fill(template, [x[i] for x in stacks]) for i in range(count)]


def is_list_of_micros(batch: PyTree) -> bool:
    """Return True for a list of micro-batches of one structure."""
    if type(batch) is not list or not trees.leaves(batch) or any(isinstance(item, torch.Tensor) for item in batch):
        return False
    first = trees.enumerate_leaves(batch[0])
    return all(trees.enumerate_leaves(item) == first for item in batch[1:])


def mean_gradient_of(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, micros: list[PyTree], scale: Tensor | None
) -> Gradient:
    """Average the gradient over micro-batches."""
    kept, parts, total = buffers, [], []
    for i, micro in enumerate(micros):
        e = gradient_of(loss_fn, params, kept, micro, scale)
        kept = e.buffers
        # New memory: a traced gradient is the derivative of a split.
        sums = [*[g.to(wide(g.dtype)) for g in e.grads], e.loss.to(wide(e.loss.dtype), copy=True)]
        parts.append(e.aux)
        total = [x.add_(y) for x, y in zip(total, sums, strict=True)] if i else sums
    *grads, loss = [x.div_(len(micros)).to(x_of.dtype) for x, x_of in zip(total, (*params, e.loss), strict=True)]
    return Gradient(Buckets(grads, params.plan), loss, stacked(parts), kept)


def stacked(rows: Sequence[PyTree]) -> PyTree:
    """Stack trees leaf by leaf, `[N, ...]`; a list where leaves are not tensors of one shape, or the trees differ."""
    if any(trees.enumerate_leaves(row) != trees.enumerate_leaves(rows[0]) for row in rows[1:]):
        return list(rows)

    def of_leaves(*its: Any) -> Any:
        is_one = all(isinstance(x, torch.Tensor) and x.shape == its[0].shape for x in its)
        return torch.stack(its) if is_one else list(its)

    return trees.map(of_leaves, *rows)
