"""Sharded buckets: each process of a worker holds some rows of every leaf, as `Plan.unsharded` states.

Operators of `decentfn.sharded` assemble a whole bucket, and return each process's rows of the mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from decentfn.core.buckets.arithmetic import mean_within_worker, rows_of
from decentfn.core.buckets.plan import BucketPlan, Buckets, Place, Plan, Segment

_ops = torch.ops.decentfn


def part_shape(shape: tuple[int, ...], process: int, processes: int) -> tuple[int, ...]:
    """Return the shape of one process's rows of a leaf; a scalar is one row."""
    rows, *others = shape or (1,)
    return len(rows_of(process, processes, rows)), *others


def part_of(x: Buckets, process: int, processes: int) -> Buckets:
    """Copy the part of unsharded buckets `[*workers, D]` that one of `processes` holds."""
    plans, vectors, places = [], [], []
    for bucket, tensor in zip(x.plan.buckets, x, strict=True):
        segments, pieces, start = [], [], 0
        for segment in bucket.segments:
            rows, width = _rows(segment)
            mine = rows_of(process, processes, rows)
            begin, numel = segment.start + mine.start * width, len(mine) * width
            shape = part_shape(segment.shape, process, processes)
            segments.append(replace(segment, shape=shape, start=start, numel=numel))
            places.append((segment.name, Place(segment.shape or (1,), (mine.start, *[0] * (len(shape) - 1)))))
            pieces.append(tensor[..., begin : begin + numel])
            start += numel
        plans.append(BucketPlan(bucket.dtype, tuple(segments), start))
        vectors.append(torch.cat(pieces, dim=-1))
    return Buckets(vectors, Plan(tuple(plans), x.plan.template, processes, places=tuple(places), unsharded=x.plan))


def unsharded(x: Buckets) -> Buckets:
    """Gather the unsharded buckets within the worker; return `x` itself if it is not sharded."""
    plan = x.plan.unsharded
    if plan is None:
        return x
    pairs = zip(x, plan.buckets, strict=True)
    return Buckets([_ops.gather_within_worker(b, *_cuts(one), None) for b, one in pairs], plan)


def without_values(x: Buckets) -> Buckets:
    """Return buckets like `unsharded(x)` on the meta device."""
    return (x.plan.unsharded or x.plan).without_values(x[0].shape[:-1])


def mean_of_processes(x: Buckets, plan: Plan) -> Buckets:
    """Average `x` over the worker's processes; values held by one process alone stay.

    If `plan`, the parameters' plan, has an unsharded one, `x` is laid out as that.
    """
    if plan.unsharded is not None:
        pairs = zip(x, plan.unsharded.buckets, plan.buckets, strict=True)
        return Buckets([_ops.scatter_within_worker(b, *_cuts(one), part.numel, None) for b, one, part in pairs], plan)
    if not any(bucket.is_common for bucket in plan.buckets):
        return x
    pairs = zip(x, plan.buckets, strict=True)
    return Buckets([mean_within_worker(b, plan.tp_size) if one.is_common else b for b, one in pairs], plan)


def _rows(segment: Segment) -> tuple[int, int]:
    """Return the number of rows of a leaf and of elements in each; a scalar is one row."""
    rows = segment.shape[0] if segment.shape else 1
    return rows, segment.numel // max(rows, 1)


def _cuts(bucket: BucketPlan) -> tuple[list[int], list[int]]:
    rows, widths = zip(*map(_rows, bucket.segments), strict=True)
    return list(rows), list(widths)
