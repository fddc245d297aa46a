"""Workers of several processes: their groups, and the operator between them, behind `buckets.arithmetic`, that waits for all."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from decentfn.comm.collectives import World, all_processes, kept_world, met, outside_error, replace_world, world
from decentfn.core import context, require
from decentfn.core.scalars import operator
from decentfn.errors import RunError, StepMismatch
from decentfn.torch_private import inductor

_ops = torch.ops.decentfn


def split_workers(processes_per_worker: int) -> World:
    """Make every `processes_per_worker` consecutive ranks one worker and return the world of all; collective."""
    before, size = all_processes(), processes_per_worker
    rule = "ranks that are threads (df.testing.on_ranks) are a worker each; start processes, with torchrun."
    require(context.world is None, f"init(processes_per_worker={size})", rule)
    if (known := kept_world(size)) is not None:
        replace_world(known)
        return known
    own, outer, within, mesh, gossip = before.identity, before.channels, None, None, None
    identity = replace(own, processes_per_worker=size, num_workers=own.size // size)
    if size > 1:
        ranks = torch.arange(own.size).view(-1, size)
        rows = [outer.new_group(tuple(row)) for row in ranks.tolist()]
        columns = [outer.new_group(tuple(column)) for column in ranks.T.tolist()]
        across, within = columns[identity.process], rows[identity.worker]
        names = ("worker", "shard")
        mesh = DeviceMesh.from_group([across, within], own.device.type, mesh=ranks, mesh_dim_names=names)
        of_gossip = replace(
            identity,
            rank=identity.worker,
            size=identity.num_workers,
            processes=range(identity.process, own.size, size),
            size_at_start=identity.num_workers,
        )
        gossip = World(outer.partitioned(of_gossip, within, mesh, across))
    here = World(outer.partitioned(identity, within, mesh))
    here.split(gossip)
    replace_world(here)
    return here


def _sum_within_worker(x: Tensor, size: int, after: Tensor | None) -> Tensor:
    """Sum over this worker's `size` consecutive processes, all of them or a tensor-parallel group, once all are at this call."""
    here, what = world(), "a sum over a worker's processes"
    total = x.clone(memory_format=torch.contiguous_format)
    every, session, group = here.all_processes, here.session, here.channels.intra_worker
    if group is None:
        return total
    first = every.rank - every.rank % size
    ranks = range(first, first + size)
    if size < every.processes_per_worker:
        group = every.channels.subgroup(tuple(ranks))
    if not session.is_running:
        with met(here, what, total, ranks, group) as (outside, _):
            outside.allreduce([total]).wait()
        return total
    try:
        if (other := session.board.other_in_group(group, ranks, [session.at, x.nbytes], total)) is not None:
            rank, t, nbytes = other
            raise StepMismatch(
                f"{what}: process {every.rank} is at t={session.at} with {x.nbytes:,} bytes, process {rank} at t={t} with "
                f"{nbytes:,}; every process must call the step with the same t, equally often",
                process=every.rank,
                step=session.at,
                peer=rank,
            )
        since = time.monotonic()
        group.allreduce([total]).wait()
    except RunError:
        raise
    except RuntimeError as error:
        raise outside_error(here, what, error, listens=False) from error
    for counted in here.counters:  # rings: a sum passes twice
        share = round((size - 1) / size * x.nbytes) * 2
        counted.within_worker.bytes_sent += share
        counted.within_worker.bytes_received += share
        counted.within_worker.seconds_waited += time.monotonic() - since
    return total


def make_tp_groups(size: int) -> None:
    """Make the missing tensor-parallel groups of `size` processes; collective over all processes."""
    whole = all_processes()
    if size < whole.processes_per_worker:
        whole.channels.make_subgroups([tuple(range(i, i + size)) for i in range(0, whole.size, size)])


operator(
    "sum_within_worker(Tensor x, int processes, Tensor? after) -> Tensor",
    _sum_within_worker,
    lambda x, processes, after: torch.empty_like(x),
    lambda info, in_dims, x, *others: (_ops.sum_within_worker(x, *others), in_dims[0]),
)
inductor.keep_in_order("sum_within_worker")
