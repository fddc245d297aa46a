"""Losses: their form, their mode and their results."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from decentfn.core import trees
from decentfn.core.context import context
from decentfn.core.formatting import brief
from decentfn.core.trees import PyTree
from decentfn.torch_private.autograd import version

_log = logging.getLogger("decentfn")

_BY_MODE = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)

LossFn = Callable[..., Any]
"""Loss `(params, batch) -> loss` or `(loss, aux)`, or `(params, buffers, batch) -> (loss, (buffers, aux))`."""


def tell_eval_mode(module: nn.Module) -> None:
    """Log that a module trains in eval mode, if some of its layers compute otherwise when they train."""
    if not module.training and any(isinstance(m, _BY_MODE) and getattr(m, "p", 1) for m in module.modules()):
        _log.warning(
            "%s is in eval mode, as from_pretrained returns it, so it trains without dropout and with the "
            "stored batch statistics; module.train() before the first step switches them on",
            type(module).__name__,
        )


def watched(loss_fn: Any) -> Any:
    """Return a module's loss that remembers its module's parameters as they are now, until a first step."""
    loss_fn.stamps = {name: _stamp(x) for name, x in loss_fn.network.named_parameters()}
    return loss_fn


def require_unchanged(call: str, loss_fn: Any, given: PyTree) -> None:
    """Raise ValueError if the module has changed since `watched`, and not to the parameters that are `given`."""
    for name, x in loss_fn.network.named_parameters() if getattr(loss_fn, "stamps", None) else ():
        was = loss_fn.stamps.get(name)
        start = given.get(name if name in given else name.removeprefix("module."))
        if was == _stamp(x) or not isinstance(start, Tensor) or start.shape != x.shape or x.is_meta:
            continue  # or its memory has been freed
        if x.dtype != start.dtype or not torch.equal(x.to(start.device), start):
            raise ValueError(
                f"{call}: {name!r} of the module has changed since df.functional copied it, and training would start from the older "
                "copy: the module keeps its weights, and the state has its own. Load, initialize and convert the module first; "
                "then call df.functional(module, ...) again, and init with what it returns."
            )


def _stamp(x: Tensor) -> tuple[Any, ...]:
    return id(x), version(x), x.dtype, x.data_ptr()


class WrappedLoss:
    """Wrapper of a loss whose type determines how the gradient is computed; calling it gives the inner loss."""

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self.frozen: frozenset[str] = getattr(loss_fn, "frozen", frozenset())

    def __call__(self, *arguments: Any) -> Any:
        """Evaluate the inner loss."""
        return self.loss_fn(*arguments)


def unwrapped(loss_fn: LossFn) -> tuple[LossFn, set[type]]:
    """Return the innermost loss, and the types of its wrappers."""
    around = set()
    while isinstance(loss_fn, WrappedLoss):
        around.add(type(loss_fn))
        loss_fn = loss_fn.loss_fn
    return loss_fn, around


def require_loss(call: str, loss_fn: Any) -> None:
    """Raise ValueError unless `loss_fn` is a function, not a module."""
    if isinstance(loss_fn, torch.nn.Module):
        raise ValueError(
            f"{call}={brief(loss_fn)}: a module is not a loss; make one of it and a criterion with "
            "`params, buffers, loss_fn = df.functional(module, criterion)`."
        )
    if not callable(loss_fn):
        raise ValueError(f"{call}={brief(loss_fn)}: expected a function (params, batch) -> loss.")


def require_criterion(criterion: Any, forward: Any) -> None:
    """Raise ValueError unless the criterion of `df.functional` is a function or None, and None with a `forward`."""
    if isinstance(criterion, type) or not (criterion is None or callable(criterion)):
        raise ValueError(
            f"functional(criterion={brief(criterion)}): expected a function (output, *targets) -> loss: "
            "nn.functional.mse_loss, or the object nn.MSELoss()."
        )
    if criterion is not None and forward is not None:
        raise ValueError("functional(module, criterion, forward=...): forward returns the loss itself; leave one out.")


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return True if `function` can be called with `count` arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def call(loss_fn: LossFn, params: PyTree, buffers: PyTree, batch: PyTree) -> tuple[Tensor, PyTree, PyTree]:
    """Evaluate the loss; return it, its new buffers and its aux."""
    returned = loss_fn(params, batch) if buffers is None else loss_fn(params, buffers, batch)
    loss, extra = returned if is_pair(returned) else (returned, None)
    if buffers is None:
        new_buffers, aux = None, extra
    elif is_pair(extra):
        new_buffers, aux = as_given(buffers, extra[0]), extra[1]
    else:
        raise ValueError(
            f"loss_fn(params, buffers, batch) returned {brief(trees.map(type, returned))}: with buffers a loss returns "
            "(loss, (buffers, aux))."
        )
    return scalar(loss), new_buffers, aux


@contextmanager
def in_mode(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in eval mode if a metric runs; its modes are restored at exit."""
    were = [(inner, inner.training) for inner in module.modules()] if context.evaluates else []
    for inner, _ in were:
        inner.training = False
    try:
        yield
    finally:
        for inner, was in were:
            inner.training = was


def scalar(loss: Any) -> Tensor:
    """Return the loss as a 0-d tensor, or raise ValueError unless it has one element."""
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        loss = trees.unclassed(loss)
        if not loss.dim():
            return loss
        if loss.numel() == 1:
            return loss.reshape(())
    shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ValueError(
        f"loss_fn returned {shape}: the loss is a 0-d floating-point tensor, or (loss, aux); take its mean."
    )


def refuse_numpy(error: Exception) -> None:
    """Raise ValueError if a loss passed a tensor with a gradient to NumPy; PyTorch's advice, `detach`, trains nothing."""
    if "call numpy()" in str(error):
        raise ValueError(
            "loss_fn: the loss leaves torch, so it has no gradient; write it with torch operations in place of NumPy's."
        ) from error


def require_graph(loss: Tensor) -> None:
    """Raise ValueError if the loss has no graph at all, so that no parameter would get a gradient."""
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: the loss does not depend on the parameters that it was given, so nothing would be trained; compute it "
            "from `params` (torch.func.functional_call(module, params, ...), or df.functional) with torch operations, without "
            "NumPy, .item() or .detach(), and not under torch.no_grad. To mix without training, multiply a loss by 0."
        )


def as_given(old: PyTree, new: PyTree) -> PyTree:
    """Return the new buffers in the old ones' containers: a dict and an OrderedDict order their leaves differently."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            raise ValueError(
                f"loss_fn(params, buffers, batch) returned buffers {brief(list(new))} where it was given {brief(list(old))}; "
                "return all of them, changed or not."
            )
        pairs = [(key, as_given(old[key], new[key])) for key in old]
        return OrderedDict(pairs) if isinstance(old, OrderedDict) else dict(pairs)
    if type(old) in (list, tuple) and isinstance(new, (list, tuple)) and len(old) == len(new):
        return type(old)([as_given(o, n) for o, n in zip(old, new, strict=True)])
    return new


def is_pair(value: Any) -> TypeGuard[tuple[Any, Any]]:
    """Return True for a pair, such as `(loss, aux)`."""
    return isinstance(value, tuple) and len(value) == 2
