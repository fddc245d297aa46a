"""The gradient as one operator in the graph, run by PyTorch's own autograd.

The compiler does not look into it: what is posted before it, waited for after it, updated and written back is compiled
as ever. Parameters and buffers enter as tensors; the batch and `aux` travel beside the graph, so they may be of any kind.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from decentfn import draws, trees
from decentfn.buckets import Buckets, Plan, wide
from decentfn.collectives import world
from decentfn.gradient.accumulated import Accumulated, micro_batch_count, micro_batches
from decentfn.gradient.beside import Beside, around, arrived, put, step, travelling, value
from decentfn.gradient.loss import LossFn, WrappedLoss, call, require_loss
from decentfn.gradient.scaled import DynamicLossScale
from decentfn.gradient.traced import Evaluation, unscaled
from decentfn.torch_private import autograd as torch_autograd
from decentfn.torch_private import functorch
from decentfn.trees import PyTree
from decentfn.words import brief


@dataclass
class _Layout:
    """What the operator gives to the loss, apart from values."""

    plan: Plan
    buffers: PyTree  # template
    changing: tuple[int, ...]  # which of the buffers' leaves are not frozen
    is_tried: bool = False
    """Whether the loss has been seen to leave the rest alone."""


class ByAutograd(WrappedLoss):
    """A loss whose gradient is one operator; called, it is the loss itself. Made by `autograd`."""

    def __init__(self, loss_fn: LossFn) -> None:
        super().__init__(loss_fn)
        number = next(_numbers)
        self.name = str(number)  # a constant to the compiler, as a number would not be
        self.handle = torch.tensor(number)  # data to the graph, so that code is shared between losses
        self.layouts: list[_Layout] = []
        self.lock = threading.RLock()  # of the module: ranks may be threads that share it
        _losses[number] = self


_numbers = itertools.count()
_losses: WeakValueDictionary[int, ByAutograd] = WeakValueDictionary()


def autograd(loss_fn: LossFn) -> LossFn:
    """The same loss, whose gradient is taken by PyTorch's autograd instead of being traced: any model, one operator.

    For what torch.func or the compiler cannot take: `nn.LSTM`, activation checkpointing, hooks, Python that looks at
    values, a loss that is itself `torch.compile`d. Everything around the gradient stays one compiled graph. The batch
    may be anything that the loss takes, of any shape, and `aux` anything that it returns. `df.simulate` goes through
    the workers one after another (N in a row need no more memory than one, so `chunk_size` is of no use). Random numbers
    follow from (torch's seed, t, worker, micro-batch), the same simulated and on ranks.

    Args:
        loss_fn: as an algorithm takes it. Around it may stand `df.accumulate` and `df.dynamic_loss_scale`.

    Raises:
        ValueError: `loss_fn` is not a function, or is wrapped already.

    The loss that is reported is float32, or float64 where parameters are. The step cannot be differentiated.

    >>> import decentfn as df
    >>> loss_fn = autograd(lambda params, batch: ((batch - params) ** 2).mean())
    >>> init, step = df.all_reduce(loss_fn, df.sgd(0.5), df.topology("complete", 1))
    >>> state, metrics = step(init(torch.zeros(1)), torch.tensor([1.0, 3.0]), 0)
    >>> df.params(state), metrics.loss
    (tensor([2.]), tensor(5.))
    """
    require_loss("autograd(loss_fn)", loss_fn)
    if isinstance(loss_fn, WrappedLoss):
        name = {Accumulated: "accumulate", DynamicLossScale: "dynamic_loss_scale"}.get(type(loss_fn), "autograd")
        way_out = "once is enough" if name == "autograd" else f"the other way round, df.{name}(df.autograd(loss_fn))"
        raise ValueError(f"autograd({name}({brief(loss_fn.loss_fn)})): {way_out}.")
    return ByAutograd(loss_fn)


def is_by_autograd(loss_fn: LossFn) -> bool:
    """Whether the gradient of this loss, perhaps accumulated and scaled, is the operator's."""
    return isinstance(loss_fn, WrappedLoss) and (isinstance(loss_fn, ByAutograd) or is_by_autograd(loss_fn.loss_fn))


def gradient_by_autograd(
    loss_fn: ByAutograd, params: Buckets, buffers: PyTree, batch: Any, t: Tensor, scale: Tensor | None, many: bool
) -> Evaluation:
    """See `evaluate`; with `many` the batch is micro-batches."""
    if not torch.compiler.is_compiling():
        if functorch.is_differentiated(params[0]):
            raise RuntimeError(
                "df.autograd(loss_fn): a step cannot be differentiated through its gradient operator; leave df.autograd out."
            )
        if not isinstance(batch, Beside) and not functorch.has_no_value(params[0]):
            with step():
                e = gradient_by_autograd(loss_fn, params, buffers, travelling(batch), t, scale, many)
                return e._replace(aux=arrived(e.aux))
    if not isinstance(batch, Beside):
        raise RuntimeError(
            "df.autograd(loss_fn): the batch must travel beside the graph; use df.compile and df.simulate, not torch.compile "
            "and torch.func.vmap, and decorate the function that builds the algorithm with df.kit.algorithm."
        )
    template = trees.enumerate_leaves(buffers)
    layout, changing = _remember(loss_fn.name, params.plan, template)
    old = trees.leaves(buffers)
    out = _gradient(loss_fn.handle, layout, changing, many, 0, t, scale, batch.number, list(params), old)
    size = len(params)
    loss, aux, *new = out[size:]
    leaves = [new[changing.index(i)] if i in changing else leaf for i, leaf in enumerate(old)]
    return Evaluation(Buckets(out[:size], params.plan), trees.fill(template, leaves), loss, Beside(aux))


@torch.compiler.assume_constant_result
def _remember(name: str, plan: Plan, buffers: PyTree) -> tuple[int, tuple[int, ...]]:
    """The number of a layout, and which of the buffers the loss may change; runs while the step is traced."""
    loss_fn = _losses[int(name)]
    for index, layout in enumerate(loss_fn.layouts):
        if layout.buffers == buffers and (layout.plan is plan or layout.plan == plan):
            return index, layout.changing
    named = trees.named_leaves(buffers)
    changing = tuple(i for name, i in named if name not in loss_fn.frozen)
    loss_fn.layouts.append(_Layout(plan, buffers, changing))
    return len(loss_fn.layouts) - 1, changing


# -- the operator ---------------------------------------------------------------------------------------------------

_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define(
    "gradient(Tensor loss_fn, int layout, int[] changing, bool many, int workers, Tensor t, Tensor? scale, Tensor batch, "
    "Tensor[] params, Tensor[] buffers) -> Tensor[]"
)
_gradient = torch.ops.decentfn.gradient


def _kernel(
    handle: Tensor,
    layout: int,
    changing: Sequence[int],
    many: bool,
    workers: int,
    t: Tensor,
    scale: Tensor | None,
    batch: Tensor,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> list[Tensor]:
    """`[*grads, loss, number of aux, *changing buffers]`, every one with a first axis of workers where there are any."""
    loss_fn, data, step_number = _losses[int(handle)], value(batch), int(t)
    form = loss_fn.layouts[layout]
    if not workers:
        one = _of_worker(loss_fn, form, many, step_number, world().rank, scale, params, buffers, data)
        return [*one.grads, one.loss, torch.tensor(put(one.aux)), *one.buffers]
    data = trees.plain(data)
    _require_rows(data, workers)
    first = world().rank * workers
    grads = [torch.empty_like(b) for b in params]
    ones = []
    for i in range(workers):
        own, kept = [b[i] for b in params], [b[i] for b in buffers]
        its_batch = trees.map(lambda x, i=i: x[i], data)
        its_scale = None if scale is None else scale[i]
        one = _of_worker(loss_fn, form, many, step_number, first + i, its_scale, own, kept, its_batch)
        for rows, row in zip(grads, one.grads, strict=True):
            rows[i] = row
        ones.append(one._replace(grads=[]))
    aux = trees.map(lambda *rows: _stacked(rows), *(one.aux for one in ones))
    new = [torch.stack(rows) for rows in zip(*(one.buffers for one in ones), strict=True)]
    return [*grads, torch.stack([one.loss for one in ones]), torch.full((workers,), put(aux)), *new]


class _One(NamedTuple):
    """What the loss of one worker gives."""

    grads: list[Tensor]
    loss: Tensor
    buffers: list[Tensor]  # the changing ones
    aux: PyTree


def _of_worker(
    loss_fn: ByAutograd,
    form: _Layout,
    many: bool,
    t: int,
    worker: int,
    scale: Tensor | None,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    batch: Any,
) -> _One:
    plan, changing = form.plan, form.changing
    trial = not form.is_tried  # what is written through `.data` shows in the values alone
    flat = [b.detach().clone() if trial else b.detach() for b in params]
    kept = [b.clone() if trial or i in changing else b for i, b in enumerate(buffers)]
    in_place = all(wide(b.dtype) == b.dtype for b in flat)  # else sums of gradients would lose what they add
    sums: list[Tensor] = []
    losses, auxes = [], []
    with loss_fn.lock, torch_autograd.enabled(around()):
        leaves = [leaf.detach().requires_grad_() for leaf in Buckets(flat, plan).leaves()]
        places = [leaf.data_ptr() for leaf in leaves]
        constants = [*flat, *(b for i, b in enumerate(kept) if i not in changing)]
        versions = [b._version for b in constants]
        micros = _rows(micro_batches(batch)) if many else [batch]
        for index, data in enumerate(micros):
            with draws.torch_draws(t, worker, index):
                tree, old = trees.fill(plan.template, leaves), trees.fill(form.buffers, kept)
                loss, new, aux = _forward_backward(loss_fn.loss_fn, tree, old, data, scale)
            kept = [_apart(b, k) if i in changing else k for i, (b, k) in enumerate(zip(new, kept, strict=True))]
            losses.append(loss)
            auxes.append(aux)
            if many and not in_place:
                parts = _collect(plan, leaves)
                sums = (
                    [s + g for s, g in zip(sums, parts, strict=True)] if sums else [g.to(wide(g.dtype)) for g in parts]
                )
        moved_away = any(leaf.data_ptr() != place for leaf, place in zip(leaves, places, strict=True))
        given = [*params, *(b for i, b in enumerate(buffers) if i not in changing)]
        if [b._version for b in constants] != versions or moved_away or (trial and not _alike(constants, given)):
            raise RuntimeError(
                "df.autograd(loss_fn): the loss wrote over its parameters, or over frozen ones; a step is a function of them. Let "
                "it work on copies, and keep what changes from step to step in buffers (register_buffer)."
            )
        form.is_tried = True
    with torch.no_grad():
        grads = sums or _collect(plan, leaves)
        if many:
            grads = [(g / len(micros)).to(b.dtype) for g, b in zip(grads, flat, strict=True)]
        if scale is not None:
            grads = list(unscaled(Buckets(grads, plan), scale))
        loss_dtype = torch.float64 if any(b.dtype == torch.float64 for b in flat) else torch.float32
        mean = torch.stack([loss.to(loss_dtype) for loss in losses]).mean()
    aux = trees.map(lambda *rows: _stacked(rows), *auxes) if many else auxes[0]
    return _One(grads, mean, [kept[i] for i in changing], aux)


def _forward_backward(
    loss_fn: LossFn, params: PyTree, buffers: PyTree, batch: Any, scale: Tensor | None
) -> tuple[Tensor, list[Tensor], PyTree]:
    """The loss, the leaves of its new buffers, and aux; the gradients are added to `.grad`."""
    held = getattr(loss_fn, "held", None)
    if held is None:
        loss, new, aux = call(loss_fn, params, buffers, batch)
        _backward(loss, scale)
    else:
        # What is computed again while gradients are taken (activation checkpointing) must meet the same weights.
        with held(params, buffers) as new:
            loss, aux = loss_fn.of(batch)  # type: ignore[attr-defined]
            _backward(loss, scale)
    aux = trees.map(_beyond, trees.plain(aux))
    return loss.detach(), trees.leaves(new), aux


def _backward(loss: Tensor, scale: Tensor | None) -> None:
    if not loss.requires_grad:
        raise RuntimeError(
            "df.autograd(loss_fn): the loss does not depend on the parameters that it was given; compute it from `params` "
            "(torch.func.functional_call(module, params, ...), or df.functional), and not under torch.no_grad."
        )
    (loss if scale is None else loss.to(wide(loss.dtype)) * scale).backward()


def _collect(plan: Plan, leaves: list[Tensor]) -> list[Tensor]:
    """The buckets of the leaves' gradients, which are given up: that of a leaf alone in its bucket is the bucket."""
    grads, rest = [], iter(leaves)
    for bucket in plan.buckets:
        parts = []
        for _ in bucket.segments:
            leaf = next(rest)
            part, leaf.grad = leaf.grad, None
            part = torch.zeros_like(leaf) if part is None else part.to_dense() if part.is_sparse else part
            parts.append(part.reshape(-1))
        grads.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return grads


def _rows(batch: PyTree) -> list[PyTree]:
    """Micro-batches one by one."""
    return [trees.map(lambda x, i=i: x[i], batch) for i in range(micro_batch_count(trees.leaves(batch)))]


def _alike(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(xs, ys, strict=True))


def _apart(new: Tensor, own: Tensor) -> Tensor:
    """A new buffer in memory of its own, of the old one's dtype."""
    new = new.detach()
    return new if new is own else new.to(own.dtype, copy=True)


def _beyond(x: Any) -> Any:
    """A leaf of aux in memory of its own: what was not computed may be the batch's, or the state's."""
    if not isinstance(x, torch.Tensor):
        return torch.as_tensor(x) if isinstance(x, (bool, int, float)) else x
    return x.detach().clone() if x.grad_fn is None or x._is_view() else x.detach()


def _stacked(rows: Sequence[Any]) -> Any:
    return torch.stack(list(rows)) if isinstance(rows[0], torch.Tensor) else list(rows)


def _require_rows(batch: Any, workers: int) -> None:
    shapes = [list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in trees.leaves(batch)]
    if any(type(shape) is not list or shape[:1] != [workers] for shape in shapes):
        raise ValueError(
            f"simulate(num_workers={workers}): the batch's leaves are {shapes}; the first axis of each must be the {workers} "
            "workers: stack one batch per worker."
        )


@torch.library.register_fake("decentfn::gradient", lib=_library)
def _fake(
    handle: Tensor,
    layout: int,
    changing: Sequence[int],
    many: bool,
    workers: int,
    t: Tensor,
    scale: Tensor | None,
    batch: Tensor,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
) -> list[Tensor]:
    shape = (workers,) if workers else ()
    dtype = torch.float64 if any(b.dtype == torch.float64 for b in params) else torch.float32
    grads = [torch.empty_like(b) for b in params]
    loss, aux = params[0].new_empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.int64, device="cpu")
    return [*grads, loss, aux, *(torch.empty_like(buffers[i]) for i in changing)]


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
    handle, layout, changing, many, _, t, scale, batch, params, buffers = arguments
    *_, scale_dim, _, param_dims, buffer_dims = in_dims

    def first(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.contiguous()

    scale = None if scale is None else first(scale, scale_dim)
    stacked = [
        [first(x, d) for x, d in zip(*pair, strict=True)] for pair in ((params, param_dims), (buffers, buffer_dims))
    ]
    out = _gradient(handle, layout, changing, many, info.batch_size, t, scale, batch, *stacked)
    return out, [0] * len(out)


_library.impl("gradient", _kernel, "CompositeExplicitAutograd")
torch.library.register_vmap("decentfn::gradient", _vmap, lib=_library)
