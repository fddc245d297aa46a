"""Levels of `torch.func`: tests for batched tensors, and access to all workers' rows of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from decentfn.torch_private.autograd import dispatching_as, missing, surroundings
from decentfn.torch_private.names import BATCHING, FUNCTORCH

_c, _keys = FUNCTORCH.find(), BATCHING.find()


def is_differentiated(x: Tensor) -> bool:
    """Return True if autograd tracks a tensor, as under `torch.func.grad`."""
    return x.requires_grad and torch.is_grad_enabled()


def has_no_value(x: Tensor) -> bool:
    """Return True if a tensor has no readable value in this thread: tracing, fake or functional, or under `vmap`."""
    return torch.compiler.is_dynamo_compiling() or type(x) is not Tensor or is_batched(x)


def with_workers_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return an argument of a `vmap` rule as `[size, ...]`; `dim` is its worker axis, None if it is unbatched."""
    return (x if dim == 0 else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()


_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("all_rows(Tensor x, Tensor[] like) -> Tensor")
_library.define("row(Tensor rows, Tensor[] like) -> Tensor")
_ops = torch.ops.decentfn


def is_batched(x: Tensor) -> bool:
    """Return True if `vmap` batches this tensor over workers."""
    return type(x) is Tensor and (is_wrapped(x) if _c is None else _c.is_batchedtensor(x))


def unbatched(x: Tensor) -> Tensor:
    """Return a tensor outside every `vmap`: the values of all workers, the axes in any order."""
    while is_batched(x):
        x = all_rows(x, x) if _c is None else _c.get_unwrapped(x)
    return x


def is_wrapped(x: Tensor) -> bool:
    """Return True if a transform of torch.func wraps this tensor, which then has no memory of its own."""
    try:
        x.data_ptr()
    except RuntimeError:
        return True
    return False


def all_rows(x: Tensor, *like: Tensor) -> Tensor:
    """Return `x` of all workers, `[N, ...]`, unbatched at this level of `vmap`, which batches one of `like`."""
    return _ops.all_rows(x, like)


def row(rows: Tensor, *like: Tensor) -> Tensor:
    """Return to each worker its row `[...]` of `[N, ...]`: the inverse of `all_rows`."""
    return _ops.row(rows, like)


def vmap(function: Callable[..., tuple[Tensor, ...]], randomness: str, *rows: Tensor) -> Sequence[Tensor]:
    """Return `torch.vmap(function, randomness=randomness)(*rows)`: without trees, which take longer than small tensors."""
    size = rows[0].shape[:1]
    if _c is None or torch.compiler.is_dynamo_compiling() or any([x.shape[:1] != size for x in rows]):
        return torch.vmap(function, randomness=randomness)(*rows)
    _load()
    level = _c._vmap_increment_nesting(*size, randomness)
    try:
        found = function(*[_c._add_batch_dim(x, 0, level) for x in rows])
        return [_c._remove_batch_dim(x, level, *size, 0) for x in found]
    finally:
        _c._vmap_decrement_nesting()


def grad(function: Callable[..., tuple[Tensor, list[Tensor]]], x: list[Tensor], others: list[Any]) -> Any:
    """Return `torch.func.grad(function, has_aux=True)(x, others)`, likewise without trees."""
    if _c is None or torch.compiler.is_dynamo_compiling():
        return torch.func.grad(function, has_aux=True)(x, others)
    level = _c._grad_increment_nesting()
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.disable_saved_tensors_hooks("torch.func supports no saved tensor hooks"),
        ):
            own = [_c._wrap_for_grad(y, level) for y in x]
            for y in own:
                y.requires_grad = True
            given = [_c._wrap_for_grad(y, level) if isinstance(y, Tensor) else y for y in others]
            value, aux = function(own, given)
            found = torch.autograd.grad(value, own, create_graph=True, retain_graph=False, allow_unused=True)
            pairs = zip(found, own, strict=True)
            found = [_c._unwrap_for_grad(torch.zeros_like(y) if g is None else g, level) for g, y in pairs]
            return found, [_c._unwrap_for_grad(y, level) for y in aux]
    finally:
        _c._grad_decrement_nesting()


_load = cache(lambda: torch.vmap(torch.clone)(torch.zeros(1)))  # which loads PyTorch's own rules


def add_rule(name: str, rule: Callable[..., tuple[Any, Any]], library: torch.library.Library) -> None:
    """Give an operator its rule for `vmap`, as `torch.library.register_vmap`, whose trees take five times as long."""
    if _c is None or _keys is None or missing:
        torch.library.register_vmap(f"decentfn::{name}", rule, lib=library)
        return
    operator, key = getattr(_ops, name).default, torch._C.DispatchKeySet(_keys.FuncTorchBatched)

    def unwrapped(x: Any, level: int) -> tuple[Any, Any]:
        if isinstance(x, (list, tuple)):
            pairs = [unwrapped(one, level) for one in x]
            return [one for one, _ in pairs], tuple([dim for _, dim in pairs])
        return _c._unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None)

    def batched(*given: Any) -> Any:
        interpreter = _c.peek_interpreter_stack()  # which the pointer below does not keep alive
        level, (include, exclude) = interpreter.level(), surroundings()
        values, dims = unwrapped(given, level)
        with dispatching_as(include, exclude | key):
            if all([dim is None or isinstance(dim, tuple) and set(dim) <= {None} for dim in dims]):
                return operator(*given)
            out, its = rule(SimpleNamespace(batch_size=_c.CVmapInterpreterPtr(interpreter).batchSize()), dims, *values)
        pairs = zip(out, its, strict=True) if isinstance(out, list) else [(out, its)]
        found = [x if dim is None else _c._add_batch_dim(x, dim, level) for x, dim in pairs]
        return found if isinstance(out, list) else found[0]

    library.impl(name, batched, "FuncTorchBatched")


add_rule("all_rows", lambda info, dims, x, like: (with_workers_first(x, dims[0], info.batch_size), None), _library)
add_rule("row", lambda info, dims, rows, like: (rows.view_as(rows), 0), _library)


def holds(condition: Tensor) -> bool:
    """Return True if a condition holds, under `vmap` for all workers; also False if to know it, one would trace or wait for a device."""
    if torch.compiler.is_dynamo_compiling() or condition.device.type != "cpu":
        return False
    condition = unbatched(condition)
    return type(condition) is Tensor and bool(condition.all() if condition.dim() else condition)


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors hold the same values, under `vmap` for all workers; NaN equals NaN."""
    same = unbatched(x.eq(y) | (x.ne(x) & y.ne(y))).all()
    try:
        return same.is_meta or bool(same)
    except RuntimeError:  # a fake tensor has no values
        return True
