"""Arithmetic of buckets, tensor by tensor. Memory and sums are kept `wide`: in float32, or float64.

Computations within a worker, across its processes, are operators of `decentfn.sharded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decentfn.core.buckets.plan import Buckets, Plan
from decentfn.core.context import context
from decentfn.core.scalars import once
from decentfn.torch_private import functorch

_ops = torch.ops.decentfn
_BLOCK = 1 << 17  # in float32, half a megabyte: its squares stay in the cache


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def each(function: Callable[..., Tensor], *buckets: Buckets) -> Buckets:
    """Apply `function` to the first, second, ... tensors of all `buckets`; the result has the first one's plan."""
    columns = zip(*[b.tensors for b in buckets], strict=True)
    return Buckets([function(*tensors) for tensors in columns], buckets[0].plan)


def zeros_like(x: Buckets) -> Buckets:
    """Return zeros in the shapes of `x`, wide."""
    return each(lambda b: torch.zeros_like(b, dtype=wide(b.dtype)), x)


def widen(x: Buckets) -> Buckets:
    """Return `x` wide, without a copy if it already is."""
    return each(lambda b: b.to(wide(b.dtype)), x)


def copy_wide(x: Buckets) -> Buckets:
    """Return a wide copy of `x`, so that small updates of slow parameters are not lost."""
    return each(lambda b: b.to(wide(b.dtype), copy=True), x)


def cast_like(x: Buckets, y: Buckets) -> Buckets:
    """Return `x` in the dtypes of `y`."""
    return each(lambda a, b: a.to(b.dtype), x, y)


def write_over(pairs: Sequence[tuple[Tensor, Any]]) -> None:
    """Copy each pair's tensor or number over its first tensor; views of first ones are read before any write."""

    def is_there(x: Tensor, y: Any) -> bool:
        return isinstance(y, Tensor) and x.data_ptr() == y.data_ptr() and x.stride() == y.stride()

    if not (moved := [(x, y) for x, y in pairs if not is_there(x, y)]):
        return
    own = {x.untyped_storage().data_ptr() for x, _ in pairs}
    values = [torch.as_tensor(y, dtype=x.dtype, device=x.device).detach().expand_as(x) for x, y in moved]
    values = [y.clone() if y.untyped_storage().data_ptr() in own else y for y in values]
    for (x, _), y in zip(moved, values, strict=True):
        x.copy_(y)


def into(old: Tensor) -> Tensor | None:
    """Return `old` as `out=` of an optimizer's next value, which an eager, donated step writes over it; otherwise None."""
    if context.overwriting is None or functorch.is_batched(old):
        return None
    context.overwriting.append(True)
    return old


def add(x: Buckets, y: Buckets) -> Buckets:
    """Return `x + y`, in the dtypes of `x`."""
    return each(lambda a, b: a + b if a.dtype == b.dtype else (a + b).to(a.dtype), x, y)  # `to` is slow under `vmap`


def multiply(x: Buckets, factor: float | Tensor, *, in_place: bool = False) -> Buckets:
    """Return `x * factor`, computed wide, in the dtypes of `x`, `in_place` perhaps over it; a tensor `factor` is 0-d."""

    def product(b: Tensor) -> Tensor:
        f = factor.to(wide(b.dtype)) if isinstance(factor, torch.Tensor) else factor
        if in_place and b.dtype == wide(b.dtype) and not functorch.is_batched(b):
            return b.mul_(f)
        return b * f if b.dtype == wide(b.dtype) else (b.to(wide(b.dtype)) * f).to(b.dtype)

    return each(product, x)


def scale(x: Buckets, factor: Tensor) -> Buckets:
    """Return `x * factor` for a 0-d factor, computed in the dtypes of `x`; a factor of 0 gives 0 for any `x`, also NaN."""

    def product(b: Tensor) -> Tensor:
        f = once(factor.to(b.dtype))
        return torch.where(f != 0, b, torch.zeros_like(b)) * f

    return each(product, x)


def divide(x: Buckets, w: Tensor) -> Buckets:
    """Return `x / w` for a 0-d divisor, computed in the dtypes of `x`."""
    return each(lambda bucket: bucket / once(w.to(bucket.dtype)), x)


def where(condition: Tensor | Buckets, new: Buckets, old: Buckets) -> Buckets:
    """Select `new` where `condition` (0-d bool, or bool buckets per element) holds, else `old`; dtypes of `old`."""
    if isinstance(condition, torch.Tensor):
        return each(lambda b, a: torch.where(condition, a.to(b.dtype), b), old, new)
    return each(lambda b, a, c: torch.where(c, a.to(b.dtype), b), old, new, condition)


def with_own(x: Buckets, own: Buckets) -> Buckets:
    """Return `x`, with those of `own` in place of the buckets that are not shared."""
    pairs = zip(x, own, x.plan.buckets, strict=True)
    return Buckets([a if plan.is_shared else b for a, b, plan in pairs], x.plan)


def part_of(x: Buckets, is_shared: bool) -> Buckets:
    """Return the buckets that are shared, or those that are not; their plan has no tree."""
    pairs = [(b, plan) for b, plan in zip(x, x.plan.buckets, strict=True) if plan.is_shared == is_shared]
    return Buckets([b for b, _ in pairs], replace(x.plan, buckets=tuple(plan for _, plan in pairs)))


def in_parts(function: Callable[[Buckets], Buckets], x: Buckets) -> Buckets:
    """Apply `function` to what is shared and to what is not, so that a norm in it joins no worker's own values to the rest."""
    shared, own = ([*function(one)] if len(one := part_of(x, is_shared)) else [] for is_shared in (True, False))
    return Buckets([(shared if plan.is_shared else own).pop(0) for plan in x.plan.buckets], x.plan)


def global_norm(x: Buckets) -> Tensor:
    """Return the l2 norm over all buckets and processes of the worker: 0-d, float32, or float64 if a bucket is."""
    squares = [_square(b) for b in x.tensors]
    if not squares:
        return torch.zeros(())
    if x.plan.processes == 1:
        return torch.sqrt(sum(squares[1:], squares[0]))
    squares = counted_once(squares, x.plan)
    return torch.sqrt(sum_within_worker(sum(squares[1:], squares[0]), x.plan.processes))


def _square(b: Tensor) -> Tensor:
    """Return `‖b‖²`, wide; eager, on a CPU, block by block, so that no vector of squares passes through memory."""
    in_blocks = b.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    squares = []
    for part in b.chunk(1 + b.shape[-1] // _BLOCK, -1) if in_blocks else [b]:
        part = part.to(wide(b.dtype))
        squares.append((part * part).sum())
    return sum(squares[1:], squares[0])


def counted_once(of_buckets: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Return each bucket's share of a sum within the worker; a fraction if a tensor-parallel group replicates it."""
    pairs = zip(of_buckets, plan.buckets, strict=True)
    return [part / plan.tp_size if bucket.is_common else part for part, bucket in pairs]


def all_finite(x: Buckets) -> Tensor:
    """Return True (0-d bool) if `x` has no infinite or NaN value on any process of the worker."""
    if x.plan.processes == 1 and known_finite(x):
        return x.tensors[0].new_ones((), dtype=torch.bool)
    return everywhere_within_worker(torch.stack([is_finite(b).all() for b in x]).all(), x.plan.processes)


def known_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if a sum, under `vmap` over all workers, shows here that no floating-point value is infinite or NaN."""
    own = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    if not own or torch.compiler.is_dynamo_compiling() or own[0].device.type != "cpu":
        return False
    sums = [functorch.unbatched(x).sum() for x in own]
    total = sum(sums[1:], sums[0])
    return type(total) is Tensor and math.isfinite(abs(total.item()))


def is_finite(x: Tensor) -> Tensor:
    """Test each element for being finite, with one comparison; compiled `torch.isfinite` makes two."""
    return x.abs() < float("inf")


def sum_within_worker(x: Tensor, processes: int) -> Tensor:
    """Sum `x` over all processes of this worker, or over its tensor-parallel group; all wait for the last."""
    return x if processes == 1 else _ops.sum_within_worker(x, processes, None)


def mean_within_worker(x: Tensor, processes: int) -> Tensor:
    """Average `x` over processes of this worker, as `sum_within_worker`."""
    return x if processes == 1 else sum_within_worker(x / processes, processes)


def everywhere_within_worker(claim: Tensor, processes: int) -> Tensor:
    """Return True if `claim` (bool) holds on all processes of this worker."""
    return claim if processes == 1 else sum_within_worker((~claim).to(torch.float32), processes) == 0


def mean_of_processes(x: Buckets, plan: Plan) -> Buckets:
    """Average the buckets that all processes of a tensor-parallel group hold; `plan` is the parameters'."""
    if not any(bucket.is_common for bucket in plan.buckets):
        return x
    pairs = zip(x, plan.buckets, strict=True)
    return Buckets([mean_within_worker(b, plan.tp_size) if one.is_common else b for b, one in pairs], plan)
