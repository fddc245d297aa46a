"""One worker's gradient by PyTorch's own autograd: forward, backward, and the leaves' gradients in their buckets."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decentfn import collectives, draws, trees
from decentfn.buckets import Buckets, wide
from decentfn.fingerprint import compare
from decentfn.gradient.accumulated import micro_batch_count, micro_batches
from decentfn.gradient.attributes import At
from decentfn.gradient.beside import around
from decentfn.gradient.joining import Joining, in_buckets
from decentfn.gradient.layout import Layout
from decentfn.gradient.loss import LossFn, call, scalar
from decentfn.gradient.others import Others, no_other_weights, require_no_own_weights
from decentfn.gradient.traced import unscaled
from decentfn.replicas import digest
from decentfn.torch_private import functorch
from decentfn.torch_private.autograd import Enabled, run_backward
from decentfn.torch_private.profiler import nothing
from decentfn.trees import PyTree

WROTE = (
    "df.autograd(loss_fn): the loss wrote over parameters, or over frozen ones, that it left alone in its first evaluation, where "
    "is learnt what it writes over; let it write in every step, or make buffers of what changes (register_buffer)."
)


_version = operator.attrgetter("_version")


class Learnt(RuntimeError):
    """The loss was seen to write over what its layout does not say; now it does."""


class Backward(NamedTuple):
    """What the loss of one worker gives."""

    grads: list[Tensor]
    loss: Tensor  # float64
    loss_dtype: torch.dtype
    used: set[int]  # the leaves that have a gradient
    written: list[Tensor]  # the buckets as the loss left them, where it writes over its parameters
    buffers: list[Tensor]  # the changing ones
    aux: PyTree


def backward(
    loss_fn: LossFn,
    form: Layout,
    many: bool,
    t: int,
    here: collectives.World,
    worker: int,
    scale: Tensor | None,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    batch: Any,
) -> Backward:
    """The loss of worker number `worker` in step `t`, and its gradient, unscaled.

    Args:
        loss_fn: the loss of one batch.
        form: what is known of it.
        many: whether the batch is micro-batches, `[M, ...]` in every leaf: the gradient's mean is taken over them.
        t: the step.
        here: the world that the operator was called in.
        worker: draws its own random numbers, as each team of its processes does.
        scale: 0-d; the gradient is taken of `scale * loss`.
        params: the buckets.
        buffers: the leaves of the loss's buffers.
        batch: what the loss takes.

    Raises:
        Learnt: the loss writes over more than `form` said; called again, it is right.
    """
    plan, changing = form.plan, form.changing
    team = getattr(loss_fn, "team", 1)
    trial = not form.is_tried  # what is written through `.data` shows in the values alone
    if trial and team > 1:
        _require_one_batch(batch, team)
    flat = [b.detach().clone() for b in params] if trial or form.writes else params
    kept = [b.clone() if trial or i in changing else b for i, b in enumerate(buffers)]
    # Sums of gradients in a narrow dtype would lose what they add.
    in_place = not many or all(wide(b.dtype) == b.dtype for b in flat)
    sums: list[Tensor] = []
    losses, auxes = [], []
    leaves = form.leaves(flat)
    joining = Joining(form, leaves)
    constant = [i for i in range(len(kept)) if i not in changing]
    watched = [*leaves, *(kept[i] for i in constant)]
    marks = _marks(watched)
    with Enabled(around()):
        micros = _rows(micro_batches(batch)) if many else [batch]
        for index, data in enumerate(micros):
            with draws.torch_draws(t, worker * here.processes_per_worker + here.process // team * team, index):
                tree, old = form.arguments(leaves, kept)
                if trial:  # it may be thrown away, with what it does to the batch
                    data = trees.cloned(data)
                loss, new, aux, others = _forward_backward(
                    loss_fn, tree, old, data, scale, trial, (worker, (t, index)), joining.watch, leaves
                )
                if others is not None:
                    others.require_none()
            kept = [_apart(b, k) if i in changing else k for i, (b, k) in enumerate(zip(new, kept, strict=True))]
            losses.append(loss)
            auxes.append(aux)
            if not in_place:
                parts = joining.collect()
                sums = (
                    [s + g for s, g in zip(sums, parts, strict=True)] if sums else [g.to(wide(g.dtype)) for g in parts]
                )
        if (now := _marks(watched)) != marks or trial:
            touched = [x != y for x, y in zip(zip(*marks, strict=True), zip(*now, strict=True), strict=True)]
            if trial:
                given = (*Buckets(params, plan).leaves(), *(buffers[i] for i in constant))
                touched = [t or not functorch.are_equal(x, y) for t, x, y in zip(touched, watched, given, strict=True)]
            writes = any(touched[: len(leaves)])
            over = [i for i, is_touched in zip(constant, touched[len(leaves) :], strict=True) if is_touched]
            if over or writes > form.writes:
                if trial:
                    form.changing, form.writes = tuple(sorted((*changing, *over))), form.writes or writes
                raise (Learnt if trial else RuntimeError)(WROTE)
    with torch.no_grad():
        grads = sums or joining.collect()
        if flat is params and now == marks:
            form.keep(leaves, params)
        if many:
            grads = [(g / len(micros)).to(b.dtype) for g, b in zip(grads, flat, strict=True)]
        if scale is not None:
            grads = list(unscaled(Buckets(grads, plan), scale))
        # In float64, which holds the value of any dtype exactly, as a graph must know the dtype; it may be a parameter, or aux.
        wide_losses = [loss.to(torch.float64, copy=True) for loss in losses]
        mean = torch.stack(wide_losses).mean() if many else wide_losses[0]
    aux = trees.map(lambda *rows: stacked(rows), *auxes) if many else auxes[0]
    written = in_buckets(plan, [leaf.detach() for leaf in leaves]) if form.writes else []
    return Backward(grads, mean, losses[0].dtype, joining.used, written, [kept[i] for i in changing], aux)


def _require_one_batch(batch: Any, team: int) -> None:
    """Raise ValueError on every rank unless the processes of each team have one batch. Collective."""
    tensors = [(name, x) for name, x in trees.named_leaves(trees.plain(batch)) if isinstance(x, torch.Tensor)]
    lines = [f"{name or 'a batch'} {list(x.shape)} with digest {digest(x)}" for name, x in tensors]
    by = "world.worker" if team == collectives.processes_per_worker() else f"world.rank // {team}"
    rule = f"a tensor-parallel worker's processes compute one batch together: draw it by {by}, not by world.rank"
    compare("step(state, batch, t)", [], rule, of_team=lines, team=team)


def _forward_backward(
    loss_fn: LossFn,
    params: PyTree,
    buffers: PyTree,
    batch: Any,
    scale: Tensor | None,
    trial: bool,
    at: At,
    before: Callable[[], None],
    leaves: list[Tensor],
) -> tuple[Tensor, list[Tensor], PyTree, Others | None]:
    """The loss, the leaves of its new buffers, and aux; the gradients are added to `.grad`, after `before` was called.

    In a trial also what else it takes a gradient of; not of a sharded module, whose parameters PyTorch gathers anew.
    """
    held, others = getattr(loss_fn, "held", None), None
    if held is None:
        loss, new, aux = call(loss_fn, params, buffers, batch)
        others = Others(loss, leaves, batch) if trial else None
        with no_other_weights(loss) if trial else nothing:
            before()
            _backward(loss, scale)
    else:
        # What is computed again while gradients are taken (activation checkpointing) must meet the same weights.
        own = loss_fn.own_weights() if trial else []  # type: ignore[attr-defined]
        with held(params, buffers, at) as new:
            loss, aux = loss_fn.of(batch)  # type: ignore[attr-defined]
            loss = scalar(loss)
            if own:
                require_no_own_weights(loss, own)
                others = Others(loss, leaves, batch)
            before()
            _backward(loss, scale)
    aux = None if aux is None else trees.map(_beyond, trees.plain(aux))
    return loss.detach(), trees.leaves(new) if new else [], aux, others


def _backward(loss: Tensor, scale: Tensor | None) -> None:
    if not loss.requires_grad:
        raise RuntimeError(
            "df.autograd(loss_fn): the loss does not depend on the parameters that it was given; compute it from `params` "
            "(torch.func.functional_call(module, params, ...), or df.functional), and not under torch.no_grad."
        )
    run_backward(loss if scale is None else loss.to(wide(loss.dtype)) * scale)


def _marks(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """Of each tensor two numbers of which one changes where it is written over, or comes to lie elsewhere."""
    return list(map(_version, tensors)), list(map(torch.Tensor.data_ptr, tensors))


def _rows(batch: PyTree) -> list[PyTree]:
    """Micro-batches one by one."""
    return [trees.map(lambda x, i=i: x[i], batch) for i in range(micro_batch_count(trees.leaves(batch)))]


def _apart(new: Tensor, own: Tensor) -> Tensor:
    """A new buffer in memory of its own, laid out as the old one."""
    if new is own and not new.requires_grad:
        return new
    if new.shape != own.shape or not torch.can_cast(new.dtype, own.dtype):
        raise ValueError(
            f"df.autograd(loss_fn): a buffer of shape {list(own.shape)}, {own.dtype}, became one of {list(new.shape)}, {new.dtype}; "
            "a state's buffers keep both. What grows is a plain attribute of the module, without register_buffer."
        )
    return torch.empty_like(own).copy_(new.detach())


def _beyond(x: Any) -> Any:
    """Return a leaf of aux without the graph, in memory of its own: a tensor may be the batch's or the state's."""
    return torch.as_tensor(x) if isinstance(x, (bool, int, float)) else _detached(x, {})


def _detached(x: Any, copies: dict[int, Any]) -> Any:
    """Return a tensor without the graph, or a copy of an object and of all in it that holds tensors, with those detached.

    `copies` has the copies by the ids of their originals, as objects may be cycles.
    """
    if isinstance(x, torch.Tensor):
        return x.detach().clone() if x.grad_fn is None or x._is_view() else x.detach()
    if id(x) in copies or not _holds_tensors(x, set()):
        return copies.get(id(x), x)
    if isinstance(x, (set, frozenset)):
        return type(x)(_detached(item, copies) for item in x)
    copies[id(x)] = new = copy.copy(x)
    for name, value in _attributes(x).items():
        object.__setattr__(new, name, trees.map(lambda leaf: _detached(leaf, copies), trees.plain(value)))
    return new


def _holds_tensors(x: Any, seen: set[int]) -> bool:
    """Return True if a tensor is in an object, at any depth; `seen` are the ids of objects that hold none."""
    if isinstance(x, torch.Tensor) or id(x) in seen:
        return isinstance(x, torch.Tensor)
    seen.add(id(x))
    inside = list(x) if isinstance(x, (set, frozenset)) else list(_attributes(x).values())
    return any(_holds_tensors(leaf, seen) for value in inside for leaf in trees.leaves(trees.plain(value)))


def _attributes(x: Any) -> dict[str, Any]:
    """Return what an object holds by name, in slots too; nothing of a module, whose parameters are lent, or of code."""
    if isinstance(x, (nn.Module, type, FunctionType, ModuleType)):
        return {}
    slots = chain.from_iterable(vars(kind).get("__slots__", ()) for kind in type(x).__mro__)
    return {name: getattr(x, name) for name in {*getattr(x, "__dict__", ()), *slots} if hasattr(x, name)}


def stacked(rows: Sequence[Any]) -> Any:
    """One leaf of many rows' trees: a tensor `[N, ...]`, or a list of what are none."""
    return torch.stack(list(rows)) if isinstance(rows[0], torch.Tensor) else list(rows)
