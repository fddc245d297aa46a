"""Operators within a worker: the collectives of its processes behind `buckets.arithmetic`. Each waits for all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decentfn.comm.collectives import World, everyone, met, named_outside, world
from decentfn.core.buckets import rows_of
from decentfn.core.scalars import operator
from decentfn.errors import RunError, StepMismatch
from decentfn.torch_private import distributed, inductor
from decentfn.torch_private.functorch import with_workers_first

_ops = torch.ops.decentfn


def _sum_within_worker(x: Tensor, processes: int, after: Tensor | None) -> Tensor:
    here = world()
    total = x.clone(memory_format=torch.contiguous_format)
    if here.channels.intra_worker is not None:
        with _begun(here, "a sum over a worker's processes", total, processes) as group:
            group.allreduce([total]).wait()
    return total


def _gather_within_worker(x: Tensor, rows: Sequence[int], widths: Sequence[int], after: Tensor | None) -> Tensor:
    here = _several()
    sizes = _sizes(rows, widths, here.processes_per_worker)
    longest = max(map(sum, sizes))
    parts = x.new_empty((len(sizes), *x.shape[:-1], longest))
    own = x.contiguous()
    if x.shape[-1] < longest:
        own = x.new_zeros((*x.shape[:-1], longest))
        own[..., : x.shape[-1]] = x
    if longest:
        with _begun(here, "gathering a worker's parameters", parts) as group:
            distributed.gather_into(group, parts, own)
    if len(rows) == 1 and x.dim() == 1:  # no reordering needed: only the last part that is not empty may be short
        return parts.view(-1)[: rows[0] * widths[0]]
    of_each = [part[..., : sum(its)].split(its, dim=-1) for part, its in zip(parts, sizes, strict=True)]
    return torch.cat([piece for of_leaf in zip(*of_each, strict=True) for piece in of_leaf], dim=-1)


def _scatter_within_worker(
    x: Tensor, rows: Sequence[int], widths: Sequence[int], numel: int, after: Tensor | None
) -> Tensor:
    here = _several()
    sizes = _sizes(rows, widths, here.processes_per_worker)
    longest = max(map(sum, sizes))
    parts = x.new_zeros((len(sizes), *x.shape[:-1], longest))
    pieces = iter(x.split([size for of_leaf in zip(*sizes, strict=True) for size in of_leaf], dim=-1))
    of_leaves = [[next(pieces) for _ in sizes] for _ in rows]
    for part, its, of_one in zip(parts, sizes, zip(*of_leaves, strict=True), strict=True):
        part[..., : sum(its)] = torch.cat(of_one, dim=-1)
    parts /= len(sizes)
    mean = torch.empty_like(parts[0])
    if longest:
        with _begun(here, "averaging a worker's gradients", parts) as group:
            distributed.reduce_scatter_into(group, mean, parts)
    return mean if numel == longest else mean[..., :numel].clone(memory_format=torch.contiguous_format)


def _tp_group(here: World, size: int) -> Any:
    """Return this process's tensor-parallel group of `size` consecutive processes, made by `make_tp_groups`."""
    whole = here.all_processes
    if size == whole.processes_per_worker:
        return whole.channels.intra_worker
    first = whole.rank - whole.rank % size
    return whole.channels.subgroup(tuple(range(first, first + size)))


def make_tp_groups(size: int) -> None:
    """Make the missing tensor-parallel groups of `size` processes; collective over all processes."""
    whole = everyone()
    if size < whole.processes_per_worker:
        whole.channels.make_subgroups([tuple(range(i, i + size)) for i in range(0, whole.size, size)])


def _several() -> World:
    """Return the world, or raise if the state was made for workers of several processes and a worker is now one."""
    here = world()
    if here.channels.intra_worker is None:
        raise ValueError(
            "a state of workers of several processes, but a worker is one process now; call df.init(processes_per_worker=...) "
            "as when the state was made."
        )
    return here


@contextmanager
def _begun(here: World, what: str, x: Tensor, processes: int | None = None) -> Iterator[Any]:
    """Yield the group of this worker's processes, or of `processes` consecutive ones, once all are at the same call."""
    every, session, size = here.all_processes, here.session, processes or here.processes_per_worker
    first = every.rank - every.rank % size
    group, ranks = _tp_group(here, size), range(first, first + size)
    if not session.is_running:
        with met(here, what, x, ranks, group) as (outside, _):
            yield outside
        return
    try:
        if (other := session.board.other_in_group(group, ranks, [session.at, x.nbytes], x, True)) is not None:
            rank, t, nbytes = other
            raise StepMismatch(
                f"{what}: process {every.rank} is at t={session.at} with {x.nbytes:,} bytes, process {rank} at t={t} with "
                f"{nbytes:,}; every process must call the step with the same t, equally often",
                process=every.rank,
                step=session.at,
                peer=rank,
            )
        since = time.monotonic()
        yield group
        for counted in here.counters:  # rings: a sum passes twice
            share = round((size - 1) / size * x.nbytes) * (1 if processes is None else 2)
            counted.within_worker.bytes_sent += share
            counted.within_worker.bytes_received += share
            counted.within_worker.seconds_waited += time.monotonic() - since
    except RunError:
        raise
    except RuntimeError as error:
        raise named_outside(here, what, error, listens=False) from error


def _sizes(rows: Sequence[int], widths: Sequence[int], processes: int) -> list[list[int]]:
    return [
        [len(rows_of(process, processes, r)) * w for r, w in zip(rows, widths, strict=True)]
        for process in range(processes)
    ]


operator(
    "sum_within_worker(Tensor x, int processes, Tensor? after) -> Tensor",
    _sum_within_worker,
    lambda x, processes, after: torch.empty_like(x),
    lambda info, in_dims, x, *others: (_ops.sum_within_worker(x, *others), in_dims[0]),
)
operator(
    "gather_within_worker(Tensor x, int[] rows, int[] widths, Tensor? after) -> Tensor",
    _gather_within_worker,
    lambda x, rows, widths, after: x.new_empty((*x.shape[:-1], sum(r * w for r, w in zip(rows, widths, strict=True)))),
    lambda info, in_dims, x, *others: (
        _ops.gather_within_worker(with_workers_first(x, in_dims[0], info.batch_size), *others),
        0,
    ),
)
operator(
    "scatter_within_worker(Tensor x, int[] rows, int[] widths, int numel, Tensor? after) -> Tensor",
    _scatter_within_worker,
    lambda x, rows, widths, numel, after: x.new_empty((*x.shape[:-1], numel)),
    lambda info, in_dims, x, *others: (
        _ops.scatter_within_worker(with_workers_first(x, in_dims[0], info.batch_size), *others),
        0,
    ),
)
for _name in ("sum_within_worker", "gather_within_worker", "scatter_within_worker"):
    inductor.keep_in_order(_name)
