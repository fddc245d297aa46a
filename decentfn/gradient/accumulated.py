"""The gradient averaged over micro-batches.

`accumulate(loss_fn)` is a loss too, of a type of its own: whoever takes a gradient sees from it that batches have a
leading axis of micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn.core import trees
from decentfn.core.buckets import Buckets, wide
from decentfn.core.formatting import brief
from decentfn.core.trees import PyTree
from decentfn.gradient.loss import LossFn, WrappedLoss, call, require_loss
from decentfn.gradient.result import Gradient, gradient_of
from decentfn.gradient.scaled import DynamicLossScale
from decentfn.torch_private import scan


class Accumulated(WrappedLoss):
    """A loss whose batches are micro-batches; called, it is the loss of one micro-batch. Made by `accumulate`."""


def accumulate(loss_fn: LossFn) -> LossFn:
    """The same loss, whose gradient is averaged over micro-batches: one update and one exchange per step.

    Every leaf of the batch is `[M, b, ...]`: M micro-batches of b samples. Or the batch is a list of M micro-batches of one
    structure, none of them a bare tensor (a list of tensors is one batch), whose leaves have any shapes. They are gone through in a loop, which does
    not grow the compiled graph with M and holds one micro-batch's activations; buffers pass from one to the next. The
    step reports the mean loss, the norm of the mean gradient, and `aux` stacked, `[M, ...]`.

    With a loss that is a mean, M micro-batches of size b are one batch of size M b (but for batch statistics).

    Args:
        loss_fn: as an algorithm takes it, the loss of one micro-batch.

    Raises:
        ValueError: `loss_fn` is not a function, or is accumulated already; in a step, the leaves do not agree in M and b. (Where
            none of them tells, as in a single leaf `[B, T]`, a batch without the axis is taken for B micro-batches.)

    >>> import decentfn as df
    >>> loss_fn = accumulate(lambda params, batch: ((batch - params) ** 2).mean())
    >>> init, step = df.all_reduce(loss_fn, df.sgd(0.5), df.topology("complete", 1))
    >>> state, metrics = step(init(torch.zeros(1)), torch.tensor([[1.0], [3.0]]), 0)
    >>> df.params(state), metrics.loss
    (tensor([2.]), tensor(5.))
    """
    require_loss("accumulate(loss_fn)", loss_fn)
    if isinstance(loss_fn, DynamicLossScale):
        raise ValueError(
            "accumulate(dynamic_loss_scale(loss_fn)): one scale serves all micro-batches; the other way round, "
            "df.dynamic_loss_scale(df.accumulate(loss_fn))."
        )
    if isinstance(loss_fn, Accumulated):
        raise ValueError(
            f"accumulate(loss_fn={brief(loss_fn)}): expected the loss of one micro-batch, which is not accumulated yet."
        )
    return Accumulated(loss_fn)


def micro_batches(batch: PyTree) -> PyTree:
    """The batch with a leading axis of micro-batches: a list of them is stacked, anything else has it already."""
    if type(batch) is not list or not batch or any(isinstance(item, torch.Tensor) for item in batch):
        return _with_both_axes(batch)
    first = trees.enumerate_leaves(batch[0])
    if any(trees.enumerate_leaves(item) != first for item in batch[1:]):
        return _with_both_axes(batch)
    columns = zip(*(trees.leaves(item) for item in batch), strict=True)
    return trees.fill(first, [torch.stack(column) for column in columns])


def _with_both_axes(batch: PyTree) -> PyTree:
    """The batch, whose leaves are `[M, b, ...]`: one of samples alone would pass for as many micro-batches of one sample."""
    shapes = [list(x.shape) for x in trees.leaves(batch)]
    if any(len(shape) < 2 or shape[:2] != shapes[0][:2] for shape in shapes):
        raise ValueError(
            f"accumulate(loss_fn): the batch's leaves are {shapes}, but each is [M, b, ...], with the same leading axis of M >= 1 "
            "micro-batches and then that of b samples: x.unflatten(0, (M, -1)). Leaves of other shapes go into a list of M "
            "micro-batches."
        )
    return batch


def mean_gradient_of(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None
) -> Gradient:
    """The mean over micro-batches: `[M, ...]` in every leaf of `batch`."""
    stacks = trees.leaves(batch)
    count = micro_batch_count(stacks)
    batch_template, buffer_template = trees.enumerate_leaves(batch), trees.enumerate_leaves(buffers)
    # A compiled loop returns tensors only, so what stands around aux is learnt from a call whose values nobody reads.
    loss, _, aux = call(loss_fn, params.tree(), buffers, trees.fill(batch_template, [x[0] for x in stacks]))
    aux_template = trees.enumerate_leaves(aux)

    def one(carry: list[Tensor], micro: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        kept = trees.fill(buffer_template, carry[size + 1 :])
        e = gradient_of(loss_fn, params, kept, trees.fill(batch_template, micro), scale)
        sums = [total + part for total, part in zip(carry, [*e.grads, e.loss], strict=False)]
        new = [b.to(old.dtype) for b, old in zip(trees.leaves(e.buffers), carry[size + 1 :], strict=True)]
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # a compiled loop does not take what comes out as it went in: what is frozen
            new = [torch.clone(b) for b in new]
        return [*sums, *new], trees.leaves(e.aux)

    size = len(params)
    # Of the parameters' and buffers' own kind, so that under vmap the loop starts with as many workers as it ends with.
    zeros = [torch.zeros_like(b, dtype=wide(b.dtype)) for b in params]
    no_loss = params[0].new_zeros((), dtype=wide(loss.dtype))
    start = [*zeros, no_loss, *(torch.clone(b) for b in trees.leaves(buffers))]
    end, stacked = scan.loop(one, start, stacks)
    grads = [(total / count).to(b.dtype) for total, b in zip(end, params, strict=False)]
    mean_loss = (end[size] / count).to(loss.dtype)
    new_buffers = trees.fill(buffer_template, end[size + 1 :])
    return Gradient(Buckets(grads, params.plan), mean_loss, trees.fill(aux_template, stacked), new_buffers)


def micro_batch_count(stacks: list[Tensor]) -> int:
    """M, the length of every leaf's first axis."""
    shapes = [list(x.shape) for x in stacks]
    if not shapes or any(not shape or shape[0] != shapes[0][0] or not shape[0] for shape in shapes):
        raise ValueError(
            f"accumulate(loss_fn): the batch's leaves are {shapes}, but each needs the same leading axis of M >= 1 "
            "micro-batches; stack them, or pass a list of micro-batches."
        )
    # The length of a range is a constant to Dynamo also where M changes during a run, and a size is then a symbol.
    return len(range(shapes[0][0]))
