"""Levels of `torch.func`: tests for batched tensors, and access to all workers' rows of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.torch_private.autograd import dispatching_as, missing, surroundings
from decentfn.torch_private.names import BATCHING, FUNCTORCH

_c, _keys = FUNCTORCH.find(), BATCHING.find()
outside: Callable[[Tensor], Tensor] = (lambda x: all_rows(x, x)) if _c is None else _c.get_unwrapped
"""Function that returns a batched tensor outside the innermost `vmap`: the values of all workers, the axes in any order."""


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
_library.define("is_batched(Tensor x) -> Tensor")
_NO, _YES = torch.tensor(False), torch.tensor(True)  # made here, because traced code cannot make constants
_library.impl("is_batched", lambda x: _NO, "CompositeExplicitAutograd")
_library.impl("is_batched", lambda x: _YES, "FuncTorchBatched")  # cheaper than `register_vmap`: it needs no level
_ops = torch.ops.decentfn


def is_batched(x: Tensor) -> bool:
    """Return True if `vmap` batches this tensor over workers."""
    if type(x) is not Tensor:
        return False
    if _c is not None and not torch.compiler.is_dynamo_compiling():
        return _c.is_batchedtensor(x)
    return is_wrapped(x) and _ops.is_batched(x) is _YES  # fake tensors let nobody read a value


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


@cache
def _with_decompositions() -> None:
    torch.vmap(torch.clone)(_NO[None])  # PyTorch's own, with the first call


def vmap(function: Callable[..., tuple[Tensor, ...]], randomness: str, *rows: Tensor) -> Sequence[Tensor]:
    """Return `torch.vmap(function, randomness=randomness)(*rows)`, for tensors alone in a quarter of the time."""
    if _c is None or torch.compiler.is_dynamo_compiling():
        return torch.vmap(function, randomness=randomness)(*rows)
    _with_decompositions()
    level, size = _c._vmap_increment_nesting(rows[0].shape[0], randomness), rows[0].shape[0]
    try:
        found = function(*[_c._add_batch_dim(x, 0, level) for x in rows])
        return [_c._remove_batch_dim(x, level, size, 0) for x in found]
    finally:
        _c._vmap_decrement_nesting()


class Batch(NamedTuple):
    """The workers whom `vmap` batches, as a rule is told of them."""

    batch_size: int


def add_rule(name: str, rule: Callable[..., tuple[Any, Any]], library: torch.library.Library) -> None:
    """Give an operator of this library its rule for `vmap`, as `torch.library.register_vmap` does in five times the time."""
    if _c is None or _keys is None or missing:
        torch.library.register_vmap(f"decentfn::{name}", rule, lib=library)
        return
    operator, key = getattr(_ops, name).default, torch._C.DispatchKeySet(_keys.FuncTorchBatched)

    def unwrapped(x: Any, level: int) -> tuple[Any, Any]:
        if isinstance(x, Tensor):
            return _c._unwrap_batched(x, level)
        pairs = [unwrapped(one, level) for one in x] if isinstance(x, (list, tuple)) else None
        return (x, None) if pairs is None else ([one for one, _ in pairs], [dim for _, dim in pairs])

    def wrapped(x: Any, dim: Any, level: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [wrapped(*pair, level) for pair in zip(x, dim, strict=True)]
        return x if dim is None else _c._add_batch_dim(x, dim, level)

    def batched(*given: Any) -> Any:
        interpreter = _c.peek_interpreter_stack()  # which the pointer below does not keep alive
        level, (include, exclude) = interpreter.level(), surroundings()
        pairs = [unwrapped(x, level) for x in given]
        with dispatching_as(include, exclude | key):
            if all(dim is None or isinstance(dim, list) and dim.count(None) == len(dim) for _, dim in pairs):
                return operator(*given)
            dims = [dim for _, dim in pairs]
            out, out_dims = rule(Batch(_c.CVmapInterpreterPtr(interpreter).batchSize()), dims, *[x for x, _ in pairs])
        return wrapped(out, out_dims, level)

    library.impl(name, batched, "FuncTorchBatched")


add_rule("all_rows", lambda info, dims, x, like: (with_workers_first(x, dims[0], info.batch_size), None), _library)
add_rule("row", lambda info, dims, rows, like: (rows.view_as(rows), 0), _library)


def holds(condition: Tensor) -> bool:
    """Return True if a condition holds, under `vmap` for all workers; also False if to know it, one would trace or wait for a device."""
    if torch.compiler.is_dynamo_compiling() or condition.device.type != "cpu":
        return False
    while is_batched(condition):
        condition = outside(condition)
    return type(condition) is Tensor and bool(condition.all() if condition.dim() else condition)


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors hold the same values, under `vmap` for all workers; NaN equals NaN."""
    while is_batched(x) or is_batched(y):
        like = x if is_batched(x) else y
        x, y = all_rows(x, like), all_rows(y, like)
    same = (x.eq(y) | (x.ne(x) & y.ne(y))).all()
    try:
        return same.is_meta or bool(same)
    except RuntimeError:  # a fake tensor has no values
        return True
