"""Operators within a worker: the collectives of its processes behind `buckets.arithmetic`. Each waits for all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decentfn.comm.collectives import World, all_processes, met, outside_error, world
from decentfn.core.scalars import operator
from decentfn.errors import RunError, StepMismatch
from decentfn.torch_private import inductor

_ops = torch.ops.decentfn


def _sum_within_worker(x: Tensor, processes: int, after: Tensor | None) -> Tensor:
    here = world()
    total = x.clone(memory_format=torch.contiguous_format)
    if here.channels.intra_worker is not None:
        with _begun(here, "a sum over a worker's processes", total, processes) as group:
            group.allreduce([total]).wait()
    return total


def _tp_group(here: World, size: int) -> Any:
    """Return this process's tensor-parallel group of `size` consecutive processes, made by `make_tp_groups`."""
    whole = here.all_processes
    if size == whole.processes_per_worker:
        return whole.channels.intra_worker
    first = whole.rank - whole.rank % size
    return whole.channels.subgroup(tuple(range(first, first + size)))


def make_tp_groups(size: int) -> None:
    """Make the missing tensor-parallel groups of `size` processes; collective over all processes."""
    whole = all_processes()
    if size < whole.processes_per_worker:
        whole.channels.make_subgroups([tuple(range(i, i + size)) for i in range(0, whole.size, size)])


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
        if (other := session.board.other_in_group(group, ranks, [session.at, x.nbytes], x)) is not None:
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
        raise outside_error(here, what, error, listens=False) from error


operator(
    "sum_within_worker(Tensor x, int processes, Tensor? after) -> Tensor",
    _sum_within_worker,
    lambda x, processes, after: torch.empty_like(x),
    lambda info, in_dims, x, *others: (_ops.sum_within_worker(x, *others), in_dims[0]),
)
inductor.keep_in_order("sum_within_worker")
