"""Evaluation of a loss of any kind: its inputs and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from decentfn.comm import collectives
from decentfn.core import PyTree, brief, context, require, trees
from decentfn.core.buckets import Buckets, each, mean_of_processes, mean_within_worker
from decentfn.core.stacking import in_chunks
from decentfn.errors import RunError
from decentfn.gradient.accumulated import Accumulated, is_list_of_micros, mean_gradient_of, separate
from decentfn.gradient.by_autograd import ByAutograd, gradient_by_autograd
from decentfn.gradient.gradient_checks import require_none, ungiven
from decentfn.gradient.loss import LossFn, require_unchanged, takes, tell_eval_mode, unwrapped
from decentfn.gradient.module import ModuleLoss, ShardedLoss
from decentfn.gradient.parameter_swap import lock_of_module, to_evaluate
from decentfn.gradient.result import Gradient, gradient_of
from decentfn.gradient.side_channel import SideChannel
from decentfn.sharded import Partition
from decentfn.torch_private import functorch


def partition_of_loss(loss_fn: LossFn) -> Partition:
    """Return how a worker's processes share the parameters; several need a sharded module and `df.autograd`, else ValueError."""
    size = collectives.processes_per_worker()
    if size == 1:
        return Partition()
    inner, around = unwrapped(loss_fn)
    if not isinstance(inner, ShardedLoss):
        raise ValueError(
            f"loss_fn={brief(inner)}: a worker is {size} processes, and PyTorch shards a module over them: fully_shard(module, "
            'mesh=world.mesh["shard"]), then df.functional(module, ...) and df.autograd(loss_fn) (docs/large_models.md).'
        )
    rule = "the gradient of a sharded module is PyTorch's own; write df.autograd(loss_fn)."
    require(ByAutograd in around, f"loss_fn={brief(inner)}", rule)
    return inner.partition


def require_inputs(call: str, loss_fn: LossFn, params: PyTree, buffers: PyTree) -> PyTree:
    """Return the buffers, {} for a module without any; raise ValueError unless the loss takes these inputs."""
    loss_fn, _ = unwrapped(loss_fn)
    own = getattr(loss_fn, "require_inputs", None)
    if own is not None:
        own(call, params, buffers)
        if call.startswith("init"):
            require_unchanged(call, loss_fn, params, buffers)
        for name, attributes in getattr(loss_fn, "param_attributes", {}).items():  # which copies have lost
            vars(params[name]).update(attributes)
        return {} if buffers is None else buffers
    there, form, way_out = "buffers", "(params, buffers, batch)", "leave the buffers out: init(params)"
    if buffers is None:
        there, form, way_out = "no buffers", "(params, batch)", "call init(params, buffers)"
    rule = f"there are {there}, but the loss does not take {form}; write loss_fn{form}, or {way_out}."
    require(takes(loss_fn, form.count(",") + 1), call, rule)
    return buffers


def require_first(call: str, loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, t: Tensor) -> None:
    """Raise ValueError in a first step if the loss does not take these inputs, or its module has changed since `init`.

    Later changes of the module are the user's own.
    """
    require_inputs(call, loss_fn, params.plan.without_values().tree(), buffers)
    inner, around = unwrapped(loss_fn)
    if isinstance(inner, ModuleLoss):
        if collectives.all_processes().rank == 0:
            tell_eval_mode(inner.module)
        if not functorch.has_no_value(t):
            require_unchanged(call, inner, params.tree(), buffers)
            vars(inner).pop("watch", None)
    if isinstance(batch, SideChannel):
        return  # checked before it entered the side channel
    if Accumulated in around:
        batch = separate(batch)[0]
    if (own := getattr(inner, "require_batch", None)) is not None:
        own(batch)
    if ByAutograd not in around and any(
        isinstance(x, Tensor) and x.is_nested and x.layout == torch.strided for x in trees.leaves(batch)
    ):
        raise ValueError(
            "step(state, batch, t): the batch has a nested tensor of layout torch.strided, which torch.func cannot trace; "
            "pad it, torch.nested.to_padded_tensor(x, 0.0), or let autograd take the gradient, df.autograd(loss_fn)."
        )


def tell_of_batch(error: Exception, loss_fn: LossFn | None, batch: PyTree) -> None:
    """Note in an error of a first step how `accumulate` has divided a batch that is no list of micro-batches."""
    if loss_fn is None or isinstance(error, RunError) or "accumulate(" in str(error):
        return
    if Accumulated in unwrapped(loss_fn)[1] and not is_list_of_micros(batch):
        error.add_note(
            f"step(state, batch, t): df.accumulate has taken the batch, whose leaves are {[list(x.shape) for x in trees.leaves(batch)]}, "
            "for M micro-batches of b samples, [M, b, ...] on each worker. One batch is a list of one, [batch]; "
            "x.unflatten(0, (M, -1)) divides it into M."
        )


def lock_of(loss_fn: LossFn | None) -> AbstractContextManager[Any]:
    """Return the lock of the module of a traced loss, for compiled steps; the autograd operator takes it by itself."""
    inner, around = (None, ()) if loss_fn is None else unwrapped(loss_fn)
    return lock_of_module(inner.module) if isinstance(inner, ModuleLoss) and ByAutograd not in around else nullcontext()


def evaluate(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, t: Tensor, scale: Tensor | None = None
) -> Gradient:
    """Compute the loss and its gradient at `params`, seen as the user's tree; averaged over a worker's processes.

    The gradient of `scale * loss` (0-d, positive) is divided by it, so that small ones are not lost in sixteen bits.
    """
    e, plan = _evaluate(loss_fn, params, buffers, batch, t, scale), params.plan
    if plan.processes == 1:
        return e
    used = e.used
    if used is not None:  # by any process
        counts = mean_of_processes(each(lambda flag: flag.to(torch.float32), used), plan)
        used = each(lambda count: count > 0, counts)
    grads, loss = mean_of_processes(e.grads, plan), mean_within_worker(e.loss, plan.processes)
    return e._replace(grads=grads, loss=loss, used=used)


def _evaluate(
    loss_fn: LossFn, params: Buckets, buffers: PyTree, batch: PyTree, t: Tensor, scale: Tensor | None
) -> Gradient:
    many = isinstance(loss_fn, Accumulated)
    one = loss_fn.loss_fn if many else loss_fn
    if isinstance(one, ByAutograd):
        return gradient_by_autograd(one, params, buffers, batch, t, scale, many)
    traced = partial(mean_gradient_of if many else gradient_of, one)
    if context.chunks is not None:
        traced = partial(in_chunks, traced)
    batch = separate(batch) if many else batch
    if torch.compiler.is_dynamo_compiling():
        return traced(params, buffers, batch, scale)
    try:
        with record_function("decentfn::gradient"):
            e = traced(params, buffers, batch, scale)
        loss = functorch.unbatched(e.loss)
        if loss.requires_grad and not (_require_grad((params, buffers)) or _require_grad(batch, functorch.is_wrapped)):
            require_none(ungiven(loss, ()))  # after its gradient
        return e
    except Exception as error:
        if "df.autograd" not in str(error):
            error.add_note(_WAY_OUT)
        raise


@contextmanager
def swapping(loss_fn: ModuleLoss) -> Iterator[Callable[[PyTree, PyTree], AbstractContextManager[Callable[[Any], Any]]]]:
    """Context that yields `to_evaluate` of parameters and buffers."""
    with lock_of_module(loss_fn.module):
        yield partial(to_evaluate, loss_fn, loss_fn.entries(), [*loss_fn.network.modules()])


_WAY_OUT = (
    "step(state, batch, t): torch.func traced the loss's gradient, under df.simulate for all workers at once. Where the loss runs in a "
    "plain PyTorch loop, let PyTorch's autograd take the gradient, of one worker after another: df.autograd(loss_fn)."
)


def _require_grad(given: PyTree, counts: Callable[[Tensor], bool] = lambda x: True) -> bool:
    """Return True if a tensor that the loss was given requires a gradient, and counts."""
    return any(isinstance(x, Tensor) and x.requires_grad and counts(x) for x in trees.leaves(given))
