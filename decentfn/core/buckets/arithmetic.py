"""Arithmetic of buckets, tensor by tensor. What is remembered or added up is kept `wide`: in float32, or float64.

What the processes of one worker compute together is an operator of `collectives.within_worker`. Where they share a worker's
parameters row by row, each has a part of every leaf's rows: `gather_within_worker` puts the parts of a bucket together, `scatter_within_worker`
gives each process the mean of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentfn.core.buckets.plan import Buckets, Plan
from decentfn.core.scalars import once

_ops = torch.ops.decentfn


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def each(function: Callable[..., Tensor], *buckets: Buckets) -> Buckets:
    """`function` of the first, second, ... tensors of all `buckets`, as buckets with the first one's plan."""
    columns = zip(*[b.tensors for b in buckets], strict=True)
    return Buckets([function(*tensors) for tensors in columns], buckets[0].plan)


def zeros_like(x: Buckets) -> Buckets:
    """Zeros in the shapes of `x`, wide."""
    return each(lambda b: torch.zeros_like(b, dtype=wide(b.dtype)), x)


def widen(x: Buckets) -> Buckets:
    """`x` itself, wide."""
    return each(lambda b: b.to(wide(b.dtype)), x)


def copy_wide(x: Buckets) -> Buckets:
    """A copy of `x`, wide, so that small steps of slow parameters are not lost."""
    return each(lambda b: b.to(wide(b.dtype), copy=True), x)


def cast_like(x: Buckets, y: Buckets) -> Buckets:
    """`x` in the dtypes of `y`."""
    return each(lambda a, b: a.to(b.dtype), x, y)


def add(x: Buckets, y: Buckets) -> Buckets:
    """`x + y`, in the dtypes of `x`."""
    return each(lambda a, b: (a + b).to(a.dtype), x, y)


def multiply(x: Buckets, factor: float | Tensor) -> Buckets:
    """`x * factor`, computed wide, in the dtypes of `x`; a tensor as factor is 0-d."""

    def product(b: Tensor) -> Tensor:
        f = factor.to(wide(b.dtype)) if isinstance(factor, torch.Tensor) else factor
        return (b.to(wide(b.dtype)) * f).to(b.dtype)

    return each(product, x)


def scale(x: Buckets, factor: Tensor) -> Buckets:
    """`x * factor` for a 0-d factor, computed in the dtypes of `x`."""
    return each(lambda bucket: bucket * once(factor.to(bucket.dtype)), x)


def divide(x: Buckets, w: Tensor) -> Buckets:
    """`x / w` for a 0-d divisor, computed in the dtypes of `x`."""
    return each(lambda bucket: bucket / once(w.to(bucket.dtype)), x)


def where(condition: Tensor | Buckets, new: Buckets, old: Buckets) -> Buckets:
    """`new` where `condition` (0-d bool, or bool buckets: one answer per element), else `old`; in the dtypes of `old`."""
    if isinstance(condition, torch.Tensor):
        return each(lambda b, a: torch.where(condition, a.to(b.dtype), b), old, new)
    return each(lambda b, a, c: torch.where(c, a.to(b.dtype), b), old, new, condition)


def global_norm(x: Buckets) -> Tensor:
    """The l2 norm over all buckets, of all processes of the worker: 0-d, float32, or float64 where a bucket is."""
    squares = [(b.to(wide(b.dtype)) ** 2).sum() for b in x.tensors]
    if not squares:
        return torch.zeros(())
    if x.plan.processes == 1:
        return torch.sqrt(sum(squares[1:], squares[0]))
    squares = counted_once(squares, x.plan)
    return torch.sqrt(sum_within_worker(sum(squares[1:], squares[0]), x.plan.processes))


def counted_once(of_buckets: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """What is to be summed over the worker's processes, of each bucket; of one that a team holds alike, a part."""
    pairs = zip(of_buckets, plan.buckets, strict=True)
    return [part / plan.tp_size if bucket.is_common else part for part, bucket in pairs]


def all_finite(x: Buckets) -> Tensor:
    """Whether nothing in `x` is infinite or NaN, on no process of the worker, 0-d bool."""
    return everywhere_within_worker(torch.stack([is_finite(b).all() for b in x]).all(), x.plan.processes)


def is_finite(x: Tensor) -> Tensor:
    """For each element whether it is neither infinite nor NaN; one comparison, where compiled `torch.isfinite` makes two."""
    return x.abs() < float("inf")


def sum_within_worker(x: Tensor, processes: int) -> Tensor:
    """The sum of `x` over so many processes of this worker next to one another, all or a team; all wait for the last."""
    return x if processes == 1 else _ops.sum_within_worker(x, processes, None)


def mean_within_worker(x: Tensor, processes: int) -> Tensor:
    """The mean of `x` over processes of this worker, as `sum_within_worker`."""
    return x if processes == 1 else sum_within_worker(x / processes, processes)


def everywhere_within_worker(claim: Tensor, processes: int) -> Tensor:
    """Whether `claim` (bool) holds on all processes of this worker."""
    return claim if processes == 1 else sum_within_worker((~claim).to(torch.float32), processes) == 0


def gather_within_worker(x: Tensor, rows: Sequence[int], widths: Sequence[int]) -> Tensor:
    """A bucket whole, `[*workers, D]`, from each process's rows `[*workers, d]` of it; all wait for the last.

    Of each leaf `rows` are those of the whole, and `widths` the elements in a row.
    """
    return _ops.gather_within_worker(x, rows, widths, None)


def scatter_within_worker(x: Tensor, rows: Sequence[int], widths: Sequence[int], numel: int) -> Tensor:
    """This process's rows, `[*workers, numel]`, of the mean of whole buckets `[*workers, D]`; see `gather_within_worker`."""
    return _ops.scatter_within_worker(x, rows, widths, numel, None)


def rows_of(process: int, processes: int, rows: int) -> range:
    """Which of a leaf's rows a process has, as `torch.chunk` (and `fully_shard`) cuts them: of five, three and two."""
    each = -(-rows // processes)
    return range(min(process * each, rows), min((process + 1) * each, rows))
