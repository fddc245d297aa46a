"""The loss and its gradient on buckets: of one batch, or averaged over micro-batches.

`accumulate(loss_fn)` is a loss too, of a type of its own: whoever takes a gradient sees from it that batches have a
leading axis of micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.func import grad_and_value

from decentfn import trees
from decentfn.buckets import Buckets, each, wide
from decentfn.stacking import in_chunks
from decentfn.torch_private import scan
from decentfn.trees import PyTree
from decentfn.words import brief

LossFn = Callable[..., Any]
"""`(params, batch) -> loss` or `(loss, aux)`; with buffers `(params, buffers, batch) -> (loss, (buffers, aux))`."""


class Accumulated:
    """A loss whose batches are micro-batches; called, it is the loss of one micro-batch. Made by `accumulate`."""

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self.frozen: frozenset[str] = getattr(loss_fn, "frozen", frozenset())

    def __call__(self, *arguments: Any) -> Any:
        """The loss of one micro-batch."""
        return self.loss_fn(*arguments)


class Evaluation(NamedTuple):
    """What one evaluation of a loss gives."""

    grads: Buckets
    buffers: PyTree
    loss: Tensor  # 0-d
    aux: PyTree  # [M, ...] of M micro-batches


def require_loss(call: str, loss_fn: Any) -> None:
    """`loss_fn` is a function, and no module."""
    if isinstance(loss_fn, torch.nn.Module):
        raise ValueError(
            f"{call}={brief(loss_fn)}: a module is not a loss; make one of it and a criterion with "
            "`params, buffers, loss_fn = df.functional(module, criterion)`."
        )
    if not callable(loss_fn):
        raise ValueError(f"{call}={brief(loss_fn)}: expected a function (params, batch) -> loss.")


def require_inputs(call: str, loss_fn: LossFn, params: PyTree, buffers: PyTree) -> None:
    """The loss takes these parameters, and buffers where there are any; `call` is what the user called."""
    if isinstance(loss_fn, Accumulated):
        return require_inputs(call, loss_fn.loss_fn, params, buffers)
    own = getattr(loss_fn, "require_inputs", None)
    if own is not None:
        return own(call, params, buffers)
    form, other = ("(params, batch)", 3) if buffers is None else ("(params, buffers, batch)", 2)
    if not _takes(loss_fn, 5 - other):
        way_out = f"write loss_fn{form}"
        if _takes(loss_fn, other):
            way_out += (
                ", or call init(params, buffers)" if buffers is None else ", or leave the buffers out: init(params)"
            )
        there = "no buffers" if buffers is None else "buffers"
        raise ValueError(f"{call}: there are {there}, but the loss does not take {form}; {way_out}.")
    return None


def require_batch(loss_fn: LossFn, batch: PyTree) -> None:
    """The batch is of the kind that the loss unpacks, where it says so."""
    if isinstance(loss_fn, Accumulated):
        require_batch(loss_fn.loss_fn, micro_batches(batch))
        return
    own = getattr(loss_fn, "require_batch", None)
    if own is not None:
        own(batch)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with so many arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def accumulate(loss_fn: LossFn) -> LossFn:
    """The same loss, whose gradient is averaged over micro-batches: one update and one exchange per step.

    Every leaf of the batch has a leading axis of M micro-batches; or the batch is a list of M micro-batches of one
    structure, none of them a bare tensor (a list of tensors is one batch). They are gone through in a loop, which does
    not grow the compiled graph with M and holds one micro-batch's activations; buffers pass from one to the next. The
    step reports the mean loss, the norm of the mean gradient, and `aux` stacked, `[M, ...]`.

    With a loss that is a mean, M micro-batches of size b are one batch of size M b (but for batch statistics).

    Args:
        loss_fn: as an algorithm takes it, the loss of one micro-batch.

    Raises:
        ValueError: `loss_fn` is not a function, or is accumulated already.

    >>> import decentfn as df
    >>> loss_fn = accumulate(lambda params, batch: ((batch - params) ** 2).mean())
    >>> init, step = df.all_reduce(loss_fn, df.sgd(0.5), df.topology("complete", 1))
    >>> state, metrics = step(init(torch.zeros(1)), torch.tensor([[1.0], [3.0]]), 0)
    >>> df.params(state), metrics.loss
    (tensor([2.]), tensor(5.))
    """
    require_loss("accumulate(loss_fn)", loss_fn)
    if isinstance(loss_fn, Accumulated):
        raise ValueError(
            f"accumulate(loss_fn={brief(loss_fn)}): expected the loss of one micro-batch, which is not accumulated yet."
        )
    return Accumulated(loss_fn)


def evaluate(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None = None
) -> Evaluation:
    """The loss and its gradient at `params`, which the loss sees as the user's tree.

    Args:
        loss_fn: a loss, perhaps accumulated.
        params: buckets.
        buffers: the tree that the loss takes and returns; None for a loss without.
        batch: what the loss takes.
        scale: 0-d, positive: the gradient is taken of `scale * loss` and divided by it, so that small gradients outlive
            sixteen-bit arithmetic within the loss; where large ones do not, it is infinite or NaN.
    """
    if not isinstance(loss_fn, Accumulated):
        return in_chunks(partial(_evaluate, loss_fn), params, buffers, batch, scale)
    return in_chunks(partial(_evaluate_all, loss_fn.loss_fn), params, buffers, micro_batches(batch), scale)


def _evaluate(loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None) -> Evaluation:
    templates: list[PyTree] = []

    # Buffers and batch are arguments, not captured: torch.func forbids writing to what is captured.
    def loss_of(x: Buckets, buffers: PyTree, batch: PyTree) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        loss, new_buffers, aux = _call(loss_fn, x.tree(), buffers, batch)
        # torch.func takes tensors only, so the tree around them is kept aside.
        templates.append(trees.enumerate_leaves((new_buffers, aux)))
        extras = [torch.as_tensor(leaf) for leaf in trees.leaves((new_buffers, aux))]
        scaled = loss if scale is None else loss.to(wide(loss.dtype)) * scale
        return scaled, (loss, extras)

    grads, (_, (loss, extras)) = grad_and_value(loss_of, has_aux=True)(params, buffers, batch)
    new_buffers, aux = trees.fill(templates[0], extras)
    return Evaluation(grads if scale is None else _unscaled(grads, scale), new_buffers, loss, aux)


def _call(loss_fn: LossFn, params: PyTree, buffers: PyTree, batch: PyTree) -> tuple[Tensor, PyTree, PyTree]:
    returned = loss_fn(params, batch) if buffers is None else loss_fn(params, buffers, batch)
    loss, beside = returned if _is_pair(returned) else (returned, None)
    if buffers is None:
        new_buffers, aux = None, beside
    elif _is_pair(beside):
        new_buffers, aux = beside
    else:
        raise ValueError(
            f"loss_fn(params, buffers, batch) returned {brief(trees.map(type, returned))}: with buffers a loss returns "
            "(loss, (buffers, aux))."
        )
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned {shape}: the loss is a 0-d floating-point tensor, or (loss, aux); take its mean."
        )
    return loss, new_buffers, aux


def _is_pair(value: Any) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(value, tuple) and len(value) == 2


def _unscaled(grads: Buckets, scale: Tensor) -> Buckets:
    inverse = scale.double().reciprocal().float()  # torch.amp.GradScaler's arithmetic
    return each(lambda g: (g.to(wide(g.dtype)) * inverse).to(g.dtype), grads)


# -- micro-batches ------------------------------------------------------------------------------------------------


def micro_batches(batch: PyTree) -> PyTree:
    """The batch with a leading axis of micro-batches: a list of them is stacked, anything else has it already."""
    if type(batch) is not list or not batch or any(isinstance(item, torch.Tensor) for item in batch):
        return batch
    first = trees.enumerate_leaves(batch[0])
    if any(trees.enumerate_leaves(item) != first for item in batch[1:]):
        return batch
    columns = zip(*(trees.leaves(item) for item in batch), strict=True)
    return trees.fill(first, [torch.stack(column) for column in columns])


def _evaluate_all(loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, scale: Tensor | None) -> Evaluation:
    """The mean over micro-batches: `[M, ...]` in every leaf of `batch`."""
    stacks = trees.leaves(batch)
    count = _count(stacks)
    batch_template, buffer_template = trees.enumerate_leaves(batch), trees.enumerate_leaves(buffers)
    # A compiled loop returns tensors only, so what stands around aux is learnt from a call whose values nobody reads.
    loss, _, aux = _call(loss_fn, params.tree(), buffers, trees.fill(batch_template, [x[0] for x in stacks]))
    aux_template = trees.enumerate_leaves(aux)

    def one(carry: list[Tensor], micro: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        kept = trees.fill(buffer_template, carry[size + 1 :])
        e = _evaluate(loss_fn, params, kept, trees.fill(batch_template, micro), scale)
        sums = [total + part for total, part in zip(carry, [*e.grads, e.loss], strict=False)]
        new = [b.to(old.dtype) for b, old in zip(trees.leaves(e.buffers), carry[size + 1 :], strict=True)]
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
    return Evaluation(Buckets(grads, params.plan), new_buffers, mean_loss, trees.fill(aux_template, stacked))


def _count(stacks: list[Tensor]) -> int:
    """M, the length of every leaf's first axis."""
    shapes = [list(x.shape) for x in stacks]
    if not shapes or any(not shape or shape[0] != shapes[0][0] or not shape[0] for shape in shapes):
        raise ValueError(
            f"accumulate(loss_fn): the batch's leaves are {shapes}, but each needs the same leading axis of M >= 1 "
            "micro-batches; stack them, or pass a list of micro-batches."
        )
    # The length of a range is a constant to Dynamo also where M changes during a run, and a size is then a symbol.
    return len(range(shapes[0][0]))
