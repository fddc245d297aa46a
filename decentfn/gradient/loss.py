"""Losses: their form, their mode and their results."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from decentfn import sharded
from decentfn.comm.fingerprint import as_bytes, digest
from decentfn.core import PyTree, brief, log, require, trees
from decentfn.gradient.parameter_swap import lock_of_module
from decentfn.torch_private.autograd import version

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout

LossFn = Callable[..., Any]
"""Loss `(params, batch) -> loss` or `(loss, aux)`, or `(params, buffers, batch) -> (loss, (buffers, aux))`."""


def tell_eval_mode(module: nn.Module) -> None:
    """Log that a module trains in eval mode, if some of its layers compute otherwise when they train."""
    if not module.training and any(
        getattr(m, "track_running_stats", 0) or isinstance(m, _DROPOUTS) and m.p for m in module.modules()
    ):
        log.warning(
            f"{type(module).__name__} is in eval mode, as from_pretrained returns it, so it trains without dropout and with the "
            "stored batch statistics; module.train() before the first step switches them on"
        )


def watched(loss_fn: Any) -> Any:
    """Return a module's loss that remembers the module's tensors as they are now, until a first step."""
    loss_fn.watch = {name: (_stamp(x), _sample(sharded.local(x))) for name, x in _tensors(loss_fn).items()}
    return loss_fn


def require_unchanged(call: str, loss_fn: Any, params: PyTree, buffers: PyTree) -> None:
    """Raise ValueError if the module has changed since `watched`, and the copies made then are to be trained."""
    watch: dict[str, tuple[Any, str]] = getattr(loss_fn, "watch", {})
    copies = {name: x for name, x in {**params, **(buffers or {})}.items() if name in watch}
    copies = {name: x for name, x in copies.items() if _sample(x) == watch[name][1]}
    if not watch or not copies.keys() >= params.keys():
        return  # others are given on purpose
    with lock_of_module(loss_fn.module):  # a thread's step may have swapped its values
        for name, p in _tensors(loss_fn).items():
            if name not in copies or p.is_meta or not p.numel() or watch[name][0] == _stamp(p) is not None:
                continue  # or its memory was freed
            x, copy = sharded.local(p), copies[name]
            if x.dtype != copy.dtype or copy.is_meta or not torch.equal(as_bytes(x).to(copy.device), as_bytes(copy)):
                raise ValueError(
                    f"{call}: {name!r} of the module has changed since df.functional copied it, and training would start from the older "
                    "copy: the module keeps its weights, and the state has its own. Load, initialize and convert the module first; "
                    "then call df.functional(module, ...) again, and init with what it returns, or on purpose with the older copies."
                )


def constants(loss_fn: LossFn, buffers: PyTree) -> dict[str, Tensor]:
    """Return those of a module's buffers that nothing mixes: frozen parameters, and buffers that are no statistics."""
    inner: Any = unwrapped(loss_fn)[0]
    own = _tensors(inner).items() if hasattr(inner, "network") else ()
    kept = {name for name, x in own if name in inner.frozen or not isinstance(x, nn.Parameter)}
    return {name: buffers[name] for name in kept if name in buffers}


def _tensors(loss_fn: Any) -> dict[str, Tensor]:
    """Return a module's plain tensors by name, without the running statistics, which its calls in train mode move."""
    if sharded.is_sharded(loss_fn.module):
        sharded.own_shards(loss_fn.module)
    norms = [m for m in loss_fn.network.modules() if m.training and hasattr(m, "track_running_stats")]
    moved = {id(b) for m in norms for b in m.buffers(recurse=False)}
    own = loss_fn.own().items()
    return {n: x for n, x in own if id(x) not in moved and type(sharded.local(x)) in (Tensor, nn.Parameter)}


def _sample(x: Tensor) -> str:
    """Return a digest of up to 16 elements; it tells a copy made at the start from trained parameters."""
    return "" if x.is_meta else digest(x.detach().flatten()[:: max(1, x.numel() // 16)][:16])


def _stamp(x: Tensor) -> Any:
    """Return what changes when a shard is replaced or written to, except by the loss itself; None for a plain tensor."""
    return (id(x), version(x), x.dtype) if hasattr(x, "to_local") else None


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
    require(callable(loss_fn), f"{call}={brief(loss_fn)}", "expected a function (params, batch) -> loss.")


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return True if `function` can be called with `count` arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def call_loss(loss_fn: LossFn, params: PyTree, buffers: PyTree, batch: PyTree) -> tuple[Tensor, PyTree, PyTree]:
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


def scalar(loss: Any) -> Tensor:
    """Return the loss as a 0-d tensor, or raise ValueError unless it has one element."""
    if type(loss) is not Tensor and sharded.is_placed(loss):
        raise ValueError(
            "loss_fn returned a DTensor, as its predictions are one, and the gradient of some losses of sharded predictions is "
            "wrong (mse_loss, torch 2.13); make them whole before the loss: predictions.full_tensor()."
        )
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        loss = trees.unclassed(loss)
        if not loss.dim():
            return loss
        if loss.numel() == 1:
            return loss.reshape(())
    given = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ValueError(
        f"loss_fn returned {given}: a loss is a 0-d floating-point tensor (its mean), or (loss, aux), of df.functional by forward= alone."
    )


def require_graph(loss: Tensor) -> None:
    """Raise ValueError if the loss has no graph at all, so that no parameter would get a gradient."""
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: the loss does not depend on the parameters that it was given, so nothing would be trained; compute it "
            "from `params` (torch.func.functional_call(module, params, ...), or df.functional) with torch operations, without "
            "NumPy, .item() or .detach(), and not under torch.no_grad, nor the step under torch.inference_mode. To mix without "
            "training, multiply a loss by 0."
        )


def as_given(old: PyTree, new: PyTree, name: str = "") -> PyTree:
    """Return the new buffers in the old ones' containers: a dict and an OrderedDict order their leaves differently."""
    if isinstance(old, Tensor) and isinstance(new, Tensor) and new.shape != old.shape:
        raise ValueError(
            f"loss_fn: the buffer{name} of shape {list(old.shape)} became one of {list(new.shape)}; a state's buffers keep their "
            "shapes. If a module's first call shapes it, call the module once on a batch before df.functional, and then write "
            "df.autograd(loss_fn). What grows is a plain attribute, without register_buffer."
        )
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            raise ValueError(
                f"loss_fn(params, buffers, batch) returned buffers {brief(list(new))} where it was given {brief(list(old))}; "
                "return all of them, changed or not."
            )
        pairs = [(key, as_given(old[key], new[key], f" {key!r}")) for key in old]
        return OrderedDict(pairs) if isinstance(old, OrderedDict) else dict(pairs)
    if type(old) in (list, tuple) and isinstance(new, (list, tuple)) and len(old) == len(new):
        return type(old)([as_given(o, n) for o, n in zip(old, new, strict=True)])
    return new


def is_pair(value: Any) -> TypeGuard[tuple[Any, Any]]:
    """Return True for a pair, such as `(loss, aux)`."""
    return isinstance(value, tuple) and len(value) == 2
