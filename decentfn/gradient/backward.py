"""Gradient of one worker by PyTorch's own autograd: forward, backward, and the leaves' gradients in their buckets."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decentfn.comm import collectives
from decentfn.comm.fingerprint import compare, digest
from decentfn.core import PyTree, brief, context, draws, trees
from decentfn.core.buckets import Buckets, Plan, elements, wide
from decentfn.gradient.accumulated import separate, stacked
from decentfn.gradient.gradient_checks import no_other_weights, require_none, ungiven
from decentfn.gradient.loss import LossFn, as_given, call_loss, require_graph, scalar
from decentfn.gradient.parameter_swap import ParameterSwap
from decentfn.gradient.result import unscaled
from decentfn.sharded import Partition, local
from decentfn.torch_private.autograd import dispatching_as


class Backward(NamedTuple):
    """Result of the forward and backward pass of one worker's loss."""

    grads: list[Tensor]
    loss: Tensor  # float64
    loss_dtype: torch.dtype
    used: list[bool]  # by leaf, True if it has a gradient
    buffers: list[Tensor]  # the changing ones
    aux: PyTree


class Layout:
    """Positions of the loss's leaves in buckets and in its tree of buffers."""

    def __init__(self, plan: Plan, buffers: PyTree, frozen: frozenset[str]) -> None:
        self.plan, self.buffers = plan, buffers
        self.changing = tuple(i for name, i in trees.named_leaves(buffers) if name not in frozen)
        self.names = [segment.name for bucket in plan.buckets for segment in bucket.segments]
        self.is_tried = False  # True once the loss has been evaluated without an error


class _Function:
    """Loss that is a function, with a worker's values; see `ParameterSwap`."""

    gradient = attrgetter("grad")

    def __init__(self, loss_fn: LossFn, form: Layout, views: list[Tensor], buffers: PyTree) -> None:
        self._loss_fn, self._buffers = loss_fn, buffers
        self.leaves = [x.data.requires_grad_() for x in views]  # .data gives each its own version counter
        self._params = trees.fill(form.plan.template, self.leaves)
        self.constant = dict(zip(form.names, self.leaves, strict=True))

    def of(self, batch: Any) -> tuple[Tensor, PyTree]:
        loss, new, aux = call_loss(self._loss_fn, self._params, self._buffers, batch)
        self._buffers = None if new is None else trees.map(torch.detach, new)
        return loss, aux

    def buffers(self) -> PyTree:
        return self._buffers


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
    """Compute the loss of worker `worker` in step `t`, and its unscaled gradient; of micro-batches with `many`.

    The first call also checks for errors that only values and graphs show. `params` are the buckets, `buffers` the
    leaves of the loss's buffers; the gradient of `scale * loss`, 0-d, is divided by it.
    """
    plan, is_first, partition = form.plan, not form.is_tried, getattr(loss_fn, "partition", Partition())
    tp_size = partition.tp_size
    if is_first and tp_size > 1:
        _require_one_batch(batch, tp_size)
    place = worker if here.identity.processes_per_worker == 1 else here.all_processes.rank // tp_size * tp_size
    # Sums of gradients in a narrow dtype would lose small terms.
    adds_in_place = not many or all(wide(b.dtype) == b.dtype for b in params)
    sums: list[Tensor] = []
    losses, auxes = [], []
    used_by_micro: list[tuple[int, ...]] = []
    with dispatching_as(*context.dispatching), torch.enable_grad():
        kept = list(buffers)
        for i in form.changing:
            kept[i] = kept[i].clone()
        views, given_buffers = Buckets(params, plan).leaves(), trees.fill(form.buffers, kept) if kept else form.buffers
        if (swap := getattr(loss_fn, "swap", None)) is None:
            values = nullcontext(_Function(loss_fn, form, views, given_buffers))
        else:
            values = swap(dict(zip(form.names, views, strict=True)), given_buffers)
        with values as given:
            used, before = [False] * len(views), _marks(given.constant, is_first)
            micros = separate(batch) if many else [batch]
            for index, data in enumerate(micros):
                with draws.torch_draws(t, place, index):
                    loss, aux = _forward_backward(given, data, scale, is_first)
                losses.append(loss)
                auxes.append(aux)
                if partition.processes > tp_size:
                    marks = [-1 if x.grad is None else local(x.grad)._version for x in given.leaves]
                    used_by_micro.append(tuple(marks))
                if index + 1 == len(micros) or not adds_in_place:
                    parts = _into_buckets(plan, params, given, used)
                    parts = parts if adds_in_place else [g.to(wide(g.dtype)) for g in parts]
                    sums = [s + g for s, g in zip(sums, parts, strict=True)] if sums else parts
            if used_by_micro:
                _note_use(here, hash(tuple(used_by_micro)), form.names, used)
            if (after := _marks(given.constant, is_first)) != before:
                pairs = zip(given.constant, before, after, strict=True)
                raise RuntimeError(
                    f"df.autograd(loss_fn): the loss wrote over {brief(sorted(name for name, old, new in pairs if new != old))} of the "
                    "state, which only the optimizer updates. Clip or normalize trained parameters after the step, with df.with_params, or "
                    "compute with a clipped copy (of an embedding's weights, in place of max_norm). Frozen ones that the loss moves are "
                    "named in df.functional(module, ..., overwritten=[...]). The state that the step was given is overwritten: continue "
                    "from another."
                )
            new = []
            if form.changing:
                left = trees.leaves(as_given(given_buffers, given.buffers()))
                new = [_apart(left[i], kept[i]) for i in form.changing]
    with torch.no_grad():
        grads = [g.div_(len(micros)).to(b.dtype) for g, b in zip(sums, params, strict=True)] if many else sums
        if scale is not None:
            grads = list(unscaled(Buckets(grads, plan), scale))
        # In float64, which holds any dtype's value exactly, because a graph must know the dtype; the loss may be a
        # parameter, or aux.
        mean = losses[0].to(torch.float64, copy=True)
        if many:
            mean = torch.stack([mean, *(loss.to(torch.float64) for loss in losses[1:])]).mean()
    aux = stacked(auxes) if many else auxes[0]
    return Backward(grads, mean, losses[0].dtype, used, new, aux)


def _require_one_batch(batch: Any, tp_size: int) -> None:
    """Raise ValueError on every rank unless each tensor-parallel group has one batch. Collective."""
    tensors = [(name, x) for name, x in trees.named_leaves(trees.plain(batch)) if isinstance(x, torch.Tensor)]
    lines = [f"{name or 'a batch'} {list(x.shape)} with digest {digest(x)}" for name, x in tensors]
    by = "world.worker" if tp_size == collectives.processes_per_worker() else f"world.rank // {tp_size}"
    rule = f"a tensor-parallel worker's processes compute one batch together: draw it by {by}, not by world.rank"
    compare("step(state, batch, t)", [], rule, of_tp_group=lines, tp_size=tp_size)


def _note_use(here: collectives.World, mark: int, names: Sequence[str], used: Sequence[bool]) -> None:
    """Let the worker's next sum compare which parameters its processes have used: `fully_shard` pairs their gradients by order."""
    unused = [name for name, is_used in zip(names, used, strict=True) if not is_used]
    words = f"of all but {brief(unused)}" if unused else "of all"
    here.session.note_gradient(mark, words, here.channels.intra_worker)


def _forward_backward(
    given: _Function | ParameterSwap, batch: Any, scale: Tensor | None, is_first: bool
) -> tuple[Tensor, PyTree]:
    """Return the loss and aux; add the gradients to the leaves' `.grad`."""
    loss, aux = given.of(batch)
    loss = scalar(loss) if isinstance(given, ParameterSwap) else loss  # a function's is one already
    others = ungiven(loss, (given.leaves, getattr(given, "own", None), batch)) if is_first and given.constant else []
    require_graph(loss)
    if is_first and isinstance(given, ParameterSwap):
        given.require_dropped()
    with no_other_weights(loss) if is_first and isinstance(given, _Function) else nullcontext():
        (loss if scale is None else loss.to(wide(loss.dtype)) * scale).backward()
    value, aux = loss.detach(), None if aux is None else trees.map(_without_graph, trees.plain(aux))
    del loss
    require_none(others)
    return value, aux


def _into_buckets(
    plan: Plan, params: Sequence[Tensor], given: _Function | ParameterSwap, used: list[bool]
) -> list[Tensor]:
    """Move the leaves' gradients into buckets, 0 for a leaf without one; note in `used` which have one."""
    leaves, gradient, found, first = given.leaves, given.gradient, [], 0
    for bucket, tensor in zip(plan.buckets, params, strict=True):
        parts = []
        for number, segment in enumerate(bucket.segments, first):
            grad = gradient(leaves[number])
            leaves[number].grad = None
            if grad is None:
                grad = tensor.new_zeros(segment.numel)
            else:
                used[number] = True
                grad = (grad if grad.layout == torch.strided else grad.to_dense()).detach()
            parts.append(elements(grad) if segment.is_complex else grad.reshape(-1))
        first += len(parts)
        found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return found


def _marks(tensors: dict[str, Tensor], is_first: bool) -> list[tuple[int, int, str | None]]:
    """Return marks that change if a tensor is overwritten or moved."""
    return [(x._version, x.data_ptr(), digest(x) if is_first else None) for x in tensors.values()]


def _apart(new: Tensor, own: Tensor) -> Tensor:
    """Copy a new buffer into its own memory, with the old one's layout."""
    new = trees.unclassed(new)
    if new.data_ptr() == own.data_ptr() and (new.shape, new.dtype, new.stride()) == (
        own.shape,
        own.dtype,
        own.stride(),
    ):
        return own
    if not torch.can_cast(new.dtype, own.dtype):
        raise ValueError(
            f"df.autograd(loss_fn): a buffer of {own.dtype} became one of {new.dtype}; a state's buffers keep their dtype."
        )
    return torch.empty_like(own).copy_(new.detach())


def _without_graph(x: Any) -> Any:
    """Return a leaf of aux without the graph, in its own memory, with all tensors that it holds at any depth."""
    if isinstance(x, (bool, int, float)):
        return torch.as_tensor(x)
    copies: dict[int, Any] = {}
    seen, found, has_tensors = set(), [x], False
    while found:
        item = found.pop()
        if isinstance(item, torch.Tensor):
            has_tensors = True
            copies[id(item)] = item.detach().clone() if item.grad_fn is None or item._is_view() else item.detach()
        elif isinstance(item, (nn.Module, type, FunctionType, ModuleType)):
            copies[id(item)] = item
        elif id(item) not in seen:
            seen.add(id(item))
            found += gc.get_referents(item)
    return copy.deepcopy(x, copies) if has_tensors else x
