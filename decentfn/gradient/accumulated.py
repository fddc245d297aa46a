"""Gradient averaged over micro-batches.

`accumulate(loss_fn)` is a loss too, of a separate type, which tells the gradient code that batches have a leading axis
of micro-batches.
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
from decentfn.torch_private.dynamo import constant_while_traced


class Accumulated(WrappedLoss):
    """Loss whose batches are micro-batches; calling it gives the loss of one micro-batch. Made by `accumulate`."""


def accumulate(loss_fn: LossFn) -> LossFn:
    """Average the gradient of a loss over micro-batches: one update and one exchange per step.

    Every leaf of the batch is `[M, b, ...]`: M micro-batches of b samples. Alternatively the batch is a list of M
    micro-batches of one structure, none of them a bare tensor (a list of tensors is one batch). Their leaves are of any
    shapes, the same in all micro-batches; with `df.autograd` they may differ between them. A loop processes them: the
    compiled graph does not grow with M, and the activations of one micro-batch are held at a time; buffers pass from
    one to the next. The step reports the mean loss, the norm of the mean gradient, and `aux` stacked, `[M, ...]` (a
    list, where its shapes or names differ).

    If the loss is a mean, M micro-batches of size b equal one batch of size M b (except for batch statistics). Each
    micro-batch counts alike, whatever its size. Each step may have another M: the mean is over its own. A compiled
    traced step compiles again for a second M.

    Args:
        loss_fn: the loss of one micro-batch, as an algorithm takes it.

    Raises:
        ValueError: `loss_fn` is not a function, or is accumulated already; in a step, the leaves do not agree in M and
            b, or traced micro-batches of a list in their shapes. (If no leaf shows it, such as a single leaf `[B, T]`,
            a batch without the axis is taken for B micro-batches.)

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
    """Return the batch with a leading axis of micro-batches; a list of them is stacked."""
    if (micros := _listed(batch)) is None:
        return _with_both_axes(batch)
    rows = [trees.leaves(micro) for micro in micros]
    first = [list(x.shape) for x in rows[0]]
    for index, row in enumerate(rows):
        if (shapes := [list(x.shape) for x in row]) != first:
            raise ValueError(
                f"accumulate(loss_fn): micro-batch {index} has leaves {shapes}, and micro-batch 0 {first}, but the loop over traced "
                "micro-batches needs equal shapes: drop the last, short batch (DataLoader(drop_last=True)), or write "
                "df.accumulate(df.autograd(loss_fn)), which takes any shapes."
            )
    return trees.fill(trees.enumerate_leaves(micros[0]), [torch.stack(column) for column in zip(*rows, strict=True)])


def separate(batch: PyTree) -> list[PyTree]:
    """Return the micro-batches of a batch; those of a list may differ in their shapes."""
    if (micros := _listed(batch)) is not None:
        return micros
    stacks = trees.leaves(_with_both_axes(batch))
    return [trees.map(lambda x, i=i: x[i], batch) for i in range(micro_batch_count(stacks))]


def _listed(batch: PyTree) -> list[PyTree] | None:
    """Return a batch that is a list of micro-batches of one structure, else None."""
    if type(batch) is not list or not trees.leaves(batch) or any(isinstance(item, torch.Tensor) for item in batch):
        return None
    first = trees.enumerate_leaves(batch[0])
    return None if any(trees.enumerate_leaves(item) != first for item in batch[1:]) else batch


def _with_both_axes(batch: PyTree) -> PyTree:
    """Require leaves `[M, b, ...]`, or a batch of samples would pass for micro-batches of one; return the batch."""
    shapes = [list(x.shape) for x in trees.leaves(batch)]
    if not shapes or any(len(shape) < 2 or shape[:2] != shapes[0][:2] or not shape[0] for shape in shapes):
        raise ValueError(
            f"accumulate(loss_fn): the batch's leaves are {shapes}, but each is [M, b, ...], with the same leading axis of M >= 1 "
            "micro-batches and then that of b samples: x.unflatten(0, (M, -1)). Leaves of other shapes go into a list of M "
            "micro-batches. A list of bare tensors is one batch: torch.stack(batch) has the axes, and of unequal shapes "
            "[(x,) for x in batch] is a list of micro-batches (x,)."
        )
    return batch


def mean_gradient_of(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None
) -> Gradient:
    """Average the gradient over micro-batches: every leaf of `batch` is `[M, ...]`."""
    stacks = trees.leaves(batch)
    count = micro_batch_count(stacks)
    batch_template, buffer_template = trees.enumerate_leaves(batch), trees.enumerate_leaves(buffers)
    # A compiled loop returns tensors only, so the structure of aux comes from a call whose values are not used.
    loss, _, aux = call(loss_fn, params.tree(), buffers, trees.fill(batch_template, [x[0] for x in stacks]))
    aux_template = trees.enumerate_leaves(aux)

    def one(carry: list[Tensor], micro: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        kept = trees.fill(buffer_template, carry[size + 1 :])
        e = gradient_of(loss_fn, params, kept, trees.fill(batch_template, micro), scale)
        sums = [total + part for total, part in zip(carry, [*e.grads, e.loss], strict=False)]
        new = [_kept_dtype(b, old.dtype) for b, old in zip(trees.leaves(e.buffers), carry[size + 1 :], strict=True)]
        if torch.compiler.is_dynamo_compiling():
            new = [torch.clone(b) for b in new]  # a compiled loop refuses outputs that are its inputs: frozen buffers
        return [*sums, *new], trees.leaves(e.aux)

    size = len(params)
    # Made from the parameters and buffers, so that under vmap the loop starts and ends with the same number of workers.
    zeros = [torch.zeros_like(b, dtype=wide(b.dtype)) for b in params]
    no_loss = params[0].new_zeros((), dtype=wide(loss.dtype))
    start = [*zeros, no_loss, *(torch.clone(b) for b in trees.leaves(buffers))]
    end, stacked = scan.loop(one, start, stacks)
    grads = [(total / count).to(b.dtype) for total, b in zip(end, params, strict=False)]
    mean_loss = (end[size] / count).to(loss.dtype)
    new_buffers = trees.fill(buffer_template, end[size + 1 :])
    return Gradient(Buckets(grads, params.plan), mean_loss, trees.fill(aux_template, stacked), new_buffers)


def _kept_dtype(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new buffer in the old one's dtype; raise ValueError if that would truncate it."""
    if not _can_cast(new.dtype, dtype):
        raise ValueError(
            f"accumulate(loss_fn): a buffer of {dtype} became one of {new.dtype}; a state's buffers keep their dtype."
        )
    return new.to(dtype)


@constant_while_traced
def _can_cast(new: torch.dtype, old: torch.dtype) -> bool:
    return torch.can_cast(new, old)


def micro_batch_count(stacks: list[Tensor]) -> int:
    """Return M, the length of every leaf's first axis."""
    # To Dynamo the length of a range is a constant even if M changes during a run, while a size becomes a symbol.
    return len(range(stacks[0].shape[0]))
