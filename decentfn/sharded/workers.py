"""Groups of processes that are one worker."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from decentfn.comm import collectives
from decentfn.comm.collectives import World
from decentfn.core import context, require


def split_workers(processes_per_worker: int) -> World:
    """Make every `processes_per_worker` consecutive ranks one worker and return the world of all; collective."""
    before, size = collectives.all_processes(), processes_per_worker
    rule = "ranks that are threads (df.testing.on_ranks) are a worker each; start processes, with torchrun."
    require(context.world is None, f"init(processes_per_worker={size})", rule)
    if (known := collectives.kept_world(size)) is not None:
        collectives.replace_world(known)
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
    collectives.replace_world(here)
    return here
