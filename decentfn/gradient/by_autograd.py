"""Gradient as one operator in the graph, run by PyTorch's own autograd.

The operator is opaque to the compiler; everything around it (posts, waits, update, write-back) is compiled as usual.
Parameters and buffers enter as tensors; the batch and `aux` use the side channel, so they may be of any kind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.comm.collectives import world
from decentfn.core import PyTree, batches_of, brief, by_handle, context, handle_of, operator, require, sent, trees
from decentfn.core.buckets import Buckets, Plan
from decentfn.gradient.accumulated import Accumulated, stacked
from decentfn.gradient.backward import Layout, backward
from decentfn.gradient.loss import LossFn, WrappedLoss, require_loss, unwrapped
from decentfn.gradient.parameter_swap import turns
from decentfn.gradient.result import Gradient
from decentfn.gradient.scaled import DynamicLossScale
from decentfn.gradient.side_channel import Outcome, SideChannel, put, value
from decentfn.torch_private import functorch, inductor
from decentfn.torch_private.autograd import missing
from decentfn.torch_private.dynamo import constant_while_traced


class ByAutograd(WrappedLoss):
    """Loss whose gradient is one operator; calling it gives the loss itself. Made by `autograd`."""

    def __init__(self, loss_fn: LossFn, skip_unused: bool) -> None:
        super().__init__(loss_fn)
        self.skip_unused = skip_unused
        self.handle = handle_of(self)
        self.name = str(int(self.handle))  # a constant to the compiler, unlike a number
        self.layouts: list[Layout] = []
        self.attributes: list[dict[int, Any]] = []  # of each simulated worker, see `turns`
        self.lock = threading.RLock()  # ranks may be threads that share it and PyTorch's generator


def autograd(loss_fn: LossFn, *, skip_unused: bool = False) -> LossFn:
    """Compute a loss's gradient by PyTorch's autograd, as one operator, instead of tracing it; works for any model.

    For losses that torch.func or the compiler cannot handle: `nn.LSTM`, activation checkpointing, hooks, Python that
    reads values, a loss that is itself `torch.compile`d. Everything around the gradient stays one compiled graph. The
    batch may be anything that the loss takes, of any shape, and `aux` anything that it returns. `df.simulate` runs the
    workers one after another (with the memory of one, so `chunk_size` has no use); what cannot be stacked, such as
    graphs of different sizes or objects, is a list of one batch per worker. Random numbers follow from (torch's
    seed, t, worker, micro-batch), the same simulated and on ranks.

    A loss that overwrites parameters is refused; `df.functional(overwritten=...)` names frozen ones that it changes.

    Args:
        loss_fn: the loss, as an algorithm takes it. `df.accumulate` and `df.dynamic_loss_scale` may wrap the result.
        skip_unused: treat a parameter without a gradient as torch.optim does: the optimizer leaves it and its state
            alone (update counts of this library's, such as Adam's, advance). Otherwise the gradient is 0, and momentum and
            weight decay move it.

    Raises:
        ValueError: `loss_fn` is not a function, or is wrapped already; this version of PyTorch lacks a needed name.

    The step cannot be differentiated.

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
    require(isinstance(skip_unused, bool), f"autograd(skip_unused={brief(skip_unused)})", "True or False.")
    if missing:
        raise ValueError(f"autograd(loss_fn): this version of PyTorch has no {missing[0]}; let the loss be traced.")
    return ByAutograd(loss_fn, skip_unused)


def is_by_autograd(loss_fn: LossFn) -> bool:
    """Return True if the gradient of this loss, possibly accumulated and scaled, is the operator."""
    return ByAutograd in unwrapped(loss_fn)[1]


def gradient_by_autograd(
    loss_fn: ByAutograd, params: Buckets, buffers: PyTree, batch: Any, t: Tensor, scale: Tensor | None, many: bool
) -> Gradient:
    """Evaluate the loss and its gradient, see `evaluate`; with `many` the batch is micro-batches."""
    if not torch.compiler.is_dynamo_compiling() and functorch.is_differentiated(params[0]):
        raise RuntimeError(
            "df.autograd(loss_fn): a step cannot be differentiated through its gradient operator; leave df.autograd out."
        )
    if not isinstance(batch, SideChannel):
        raise RuntimeError(
            "df.autograd(loss_fn): the batch must use the side channel; use df.compile and df.simulate, not torch.compile "
            "and torch.func.vmap, and call the step that `worker.algorithm` returned."
        )
    template, old, size = trees.enumerate_leaves(buffers), trees.leaves(buffers), len(params)
    leaves = sum(len(bucket.segments) for bucket in params.plan.buckets) if loss_fn.skip_unused else 0
    layout, changing = _remember(loss_fn.name, params.plan, [template])
    out = _gradient(loss_fn.handle, layout, changing, leaves, many, 0, t, scale, batch.number, list(params), old, None)
    loss, aux, *rest = out
    for i, new in zip(changing, rest[size:], strict=False):
        old[i] = new
    flags = None
    if leaves:  # one flag for each; to each element its leaf's
        used = iter(rest[-1].unbind())
        segments = [bucket.segments for bucket in params.plan.buckets]
        flags = Buckets([torch.cat([next(used).expand(s.numel) for s in its]) for its in segments], params.plan)
    return Gradient(Buckets(rest[:size], params.plan), loss, SideChannel(aux), trees.fill(template, old), flags)


@constant_while_traced
def _remember(name: str, plan: Plan, buffers: list[PyTree]) -> tuple[int, tuple[int, ...]]:
    """Store a layout; return its number, and the changing buffers' indices. `buffers` is a list for Dynamo."""
    loss_fn, (template,) = by_handle(name), buffers
    for index, layout in enumerate(loss_fn.layouts):
        if layout.buffers == template and (layout.plan is plan or layout.plan == plan):
            return index, layout.changing
    loss_fn.layouts.append(Layout(plan, template, loss_fn.frozen))
    return len(loss_fn.layouts) - 1, loss_fn.layouts[-1].changing


# -- the operator ---------------------------------------------------------------------------------------------------


def _kernel(
    handle: Tensor,
    layout: int,
    changing: Sequence[int],
    leaves: int,
    many: bool,
    workers: int,
    t: Tensor,
    scale: Tensor | None,
    batch: Tensor,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    after: Tensor | None,
) -> list[Tensor]:
    """Return `[loss, number of aux, *grads, *changing buffers, *used]`, workers first; `used` if `leaves`."""
    loss_fn, data, here = by_handle(handle), value(batch), context.step_world or world()
    form = loss_fn.layouts[layout]
    with loss_fn.lock:
        if not workers:
            one = backward(loss_fn.loss_fn, form, many, int(t), here, here.identity.rank, scale, params, buffers, data)
            ones, loss, aux, grads, new = [one], one.loss, one.aux, one.grads, one.buffers
        else:
            batches = batches_of(data, workers)
            grads, ones = [torch.empty_like(b) for b in params], []
            for i in turns(loss_fn.loss_fn, loss_fn.attributes, workers):
                its_scale = None if scale is None else scale[i]
                given = its_scale, [b[i] for b in params], [b[i] for b in buffers], batches[i]
                one = backward(loss_fn.loss_fn, form, many, int(t), here, here.identity.rank * workers + i, *given)
                for rows, row in zip(grads, one.grads, strict=True):
                    rows[i] = row
                ones.append(one._replace(grads=[]))
            loss = torch.stack([one.loss for one in ones])
            aux = stacked([one.aux for one in ones])
            new = [torch.stack(rows) for rows in zip(*(one.buffers for one in ones), strict=True)]
        form.is_tried = True
    shape = (workers,) if workers else ()
    out = [loss, torch.full(shape, put(Outcome(ones[0].loss_dtype, aux, [one.aux for one in ones]))), *grads, *new]
    if leaves:
        used = torch.tensor([one.used for one in ones], dtype=torch.bool)
        out.append(sent(used.view(*shape, leaves), loss.device))
    return out


def _fake(*arguments: Any) -> list[Tensor]:
    _, _, changing, leaves, _, workers, _, _, _, params, buffers, _ = arguments
    shape = (workers,) if workers else ()
    loss = params[0].new_empty(shape, dtype=torch.float64)
    aux = torch.empty(shape, dtype=torch.int64, device="cpu")
    used = [params[0].new_empty((*shape, leaves), dtype=torch.bool)] if leaves else []
    like = (*params, *(buffers[i] for i in changing))
    return [loss, aux, *(torch.empty_like(x) for x in like), *used]


_gradient = operator(
    "gradient(Tensor loss_fn, int layout, int[] changing, int leaves, bool many, int workers, Tensor t, Tensor? scale, "
    "Tensor batch, Tensor[] params, Tensor[] buffers, Tensor? after) -> Tensor[]",
    _kernel,
    _fake,
    ("scale", "params", "buffers"),
)
inductor.keep_in_order("gradient")
