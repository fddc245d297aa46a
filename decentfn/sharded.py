"""Workers of several processes: their groups and the sum over them; modules that PyTorch has sharded over them.

A module is sharded by `fully_shard` (FSDP2) or `parallelize_module`. FSDP2 takes a second to import, so it is imported only
for a sharded module.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from decentfn.comm.collectives import World, all_processes, close, kept_world, met, outside_error, replace_world, world
from decentfn.comm.collectives.session import places_named
from decentfn.core import brief, context, operator, require
from decentfn.core.buckets import Place, Places
from decentfn.errors import RunError, StepMismatch
from decentfn.torch_private import inductor
from decentfn.torch_private.distributed import offset_of_shard

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
        mark, words = session.gradient_of
        numbers = [session.place, x.nbytes, mark]
        if (other := session.board.other_in_group(group, ranks, numbers, total)) is not None:
            rank, place, nbytes, _ = other
            here_at, there_at = places_named(session.place, place)
            why = (
                f"process {every.rank} is at {here_at} with {x.nbytes:,} bytes, process {rank} at {there_at} with "
                f"{nbytes:,}; every process must call the step with the same t, equally often"
            )
            if [place, nbytes] == numbers[:2]:
                why = (
                    f"in step {here_at} processes {every.rank} and {rank} took gradients of different parameters (process "
                    f"{every.rank}: {words}), and fully_shard gives each the other's; run the same layers on all processes of a "
                    "worker, times 0 where one is not wanted, or choose them by world.worker and t."
                )
            raise StepMismatch(f"{what}: {why}", process=every.rank, step=session.at, peer=rank)
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


# -- modules -----------------------------------------------------------------------------------------------------------


def is_sharded(module: nn.Module) -> bool:
    """Return True if a part of the module is sharded over processes."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return any(map(is_fully_sharded, module.modules())) or any(map(is_placed, module.parameters()))


def require_unwrapped(module: nn.Module) -> None:
    """Raise ValueError for a module in a wrapper that communicates by itself, or that hides `fully_shard`."""
    for m in module.modules():
        name, way_out = type(m).__name__, None
        if isinstance(m, nn.parallel.DistributedDataParallel):
            way_out = "averages the gradients of all processes by itself; pass the module that it wraps, its .module"
        elif isinstance(m, nn.DataParallel):
            way_out = "spreads one process over GPUs; start a process for each with torchrun, and pass its .module"
        elif isinstance(m, nn.SyncBatchNorm) and m.process_group is None:
            way_out = (
                "averages over all processes within the gradient; use nn.BatchNorm with df.average_buffers(algorithm), or "
                "nn.GroupNorm"
            )
        elif name == "FullyShardedDataParallel":
            way_out = "is FSDP1; call torch.distributed.fsdp.fully_shard(module, mesh=world.mesh['shard']) in its place"
        elif (inner := getattr(m, "_orig_mod", None)) is not None and is_sharded(inner):
            way_out = "hides the module that fully_shard was called on; compile that in place, module.compile()"
        require(way_out is None, f"df.functional({type(module).__name__})", f"{name} {way_out}.")


def local(x: Tensor) -> Tensor:
    """Return this process's shard of a parameter as a view; a plain tensor is returned unchanged."""
    return x.to_local() if is_placed(x) else x


def is_placed(x: object) -> TypeGuard[Any]:
    """Return True for a DTensor."""
    return hasattr(x, "device_mesh")


def is_fully_sharded(module: nn.Module) -> TypeGuard[Any]:
    """Return True if `fully_shard` was called on the module: each process has its own batch and gathers parameters."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


class Partition(NamedTuple):
    """Sharing of a worker's parameters between its processes."""

    processes: int = 1
    tp_size: int = 1  # size of a tensor-parallel group: consecutive processes that compute one batch together
    common: frozenset[str] = frozenset()  # names of the leaves that every process of the tensor-parallel group holds
    places: Places = ()  # places of this process's shards of the parameters and of the module's buffers


def partition_of(module: nn.Module) -> Partition:
    """Return how PyTorch has sharded a module over this worker's processes, or raise ValueError.

    The consecutive processes that compute one batch together: all under tensor parallelism, one under `fully_shard`,
    and under both as many as the mesh's inner axis.
    """
    from torch.distributed.tensor import Replicate, Shard

    here, call = all_processes(), f"df.functional({type(module).__name__})"
    way_out = (
        'world = df.init(processes_per_worker=S) and then fully_shard or parallelize_module with world.mesh["shard"]'
    )
    if here.mesh is None:
        raise ValueError(f"{call}: the module is sharded, but a worker is one process; call {way_out}.")
    own_shards(module)
    mine = here.mesh["shard"].mesh.flatten().tolist()
    has_shards = any(map(is_fully_sharded, module.modules()))
    meshes = [p.device_mesh for p in module.parameters() if is_placed(p)]
    tp_size = max((mesh.shape[-1] for mesh in meshes if mesh.ndim == 2), default=1) if has_shards else len(mine)
    of_other_tp_groups = mine[here.process % tp_size :: tp_size]  # with this one's index in its own group
    common = set[str]()
    for name, p in module.named_parameters():
        if not is_placed(p):
            if has_shards:
                raise ValueError(
                    f"{call}: parameter {name!r} is whole on every process and others are sharded; call fully_shard on the "
                    "whole module, too, not on its parts alone."
                )
            common.add(name)
            continue
        mesh, theirs = p.device_mesh, p.device_mesh.mesh.flatten().tolist()
        is_one_axis, is_both = mesh.ndim == 1, has_shards and mesh.ndim == 2
        if not (is_both or is_one_axis) or theirs != (of_other_tp_groups if has_shards and is_one_axis else mine):
            raise ValueError(
                f"{call}: parameter {name!r} is sharded over processes {brief(theirs)} (a mesh of {mesh.ndim} axes), but this worker "
                f"is processes {brief(mine)}; call {way_out}."
            )
        first, *others = p.placements
        is_known = {*map(type, others if has_shards else p.placements)} <= {Shard, Replicate}
        if has_shards and (first.is_replicate() or first.is_partial() or not is_fully_sharded(module)) or not is_known:
            raise ValueError(
                f"{call}: parameter {name!r} is placed as {brief(p.placements)}; call fully_shard on the whole module, if on any part, "
                "and parallelize_module before it, over the inner axis of one mesh."
            )
        if any(placement.is_replicate() for placement in p.placements) or has_shards and is_one_axis and tp_size > 1:
            common.add(name)
    strange = [name for name, b in module.named_buffers() if is_placed(b)]
    require(not strange, call, f"the buffers {brief(strange)} are DTensors; give their modules no parallel style.")
    found = [(name, _offset(p), p.shape) for name, p in module.named_parameters()]
    places = tuple((name, Place(tuple(shape), offset)) for name, offset, shape in found if offset is not None)
    return Partition(here.processes_per_worker, tp_size, frozenset(common), places)


def own_shards(module: nn.Module) -> None:
    """Reset the module's parameters to its shards: after a forward pass alone, some are unsharded."""
    for m in module.modules():
        if is_fully_sharded(m):
            m.reshard()
            m.set_requires_gradient_sync(True, recurse=False)


def leave(module: nn.Module) -> None:
    """Close the module's connections: the other processes fail in it at once instead of waiting for this one."""
    meshes = {p.device_mesh for p in module.parameters() if is_placed(p)}
    close([group for mesh in meshes for group in mesh.get_all_groups()])


def placed_like(grad: Tensor, p: nn.Parameter) -> Tensor:
    """Return this process's shard of a parameter's gradient as a view, after any pending sum."""
    return local(grad.redistribute(placements=p.placements) if is_placed(grad) and is_placed(p) else grad)


def unsharded(shards: Iterable[tuple[nn.Parameter, Tensor]]) -> list[Tensor | None]:
    """Gather the unsharded tensors, one by one, on the CPU of the worker's process 0; None on others. Collective."""
    here = all_processes()
    tensors: list[Tensor | None] = []
    with torch.no_grad():
        for p, shard in shards:
            one = as_placed(p, shard)
            if one is not shard:
                with met(here, "gathering a parameter", 0, _own_processes(here)):
                    one = one.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            tensors.append(one.cpu() if here.process == 0 else None)
    return tensors


def as_placed(p: nn.Parameter, shard: Tensor) -> Tensor:
    """Return this process's shard as a DTensor placed like the parameter; itself if the parameter is not sharded."""
    from torch.distributed.tensor import DTensor

    if not is_placed(p):
        return shard
    return DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def sharded(tensors: Iterable[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Return this process's shards of tensors whose values process 0 of the worker has, in their dtypes. Collective."""
    here, parts = all_processes(), []
    assert here.channels.intra_worker is not None
    for p, unsharded in tensors:
        own = local(p.detach())
        one = torch.empty(p.shape, dtype=own.dtype, device=own.device)
        if here.process == 0:
            assert unsharded is not None
            one.copy_(unsharded)
        if one.numel():
            with met(here, "sharing a parameter", one, _own_processes(here), here.channels.intra_worker) as (group, _):
                group.broadcast([one.view(-1).view(torch.uint8)]).wait()
        offset = _offset(p) or (0,) * p.dim()
        parts.append(one[tuple(slice(a, a + n) for a, n in zip(offset, own.shape, strict=True))].clone())
    return parts


def _own_processes(here: World) -> range:
    """Return the processes of this worker, by their rank among all."""
    size = here.processes_per_worker
    return range(here.worker * size, (here.worker + 1) * size)


def _offset(p: Tensor) -> tuple[int, ...] | None:
    """Return the offset of this process's shard; None if the tensor is not sharded."""
    return offset_of_shard(p) if is_placed(p) else None
