"""Rank, size and process groups of this process, looked up in one place."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from decentfn.comm.collectives.channels import Channels
from decentfn.comm.collectives.forks import wait_for_gloo, wait_for_gloo_before_forks
from decentfn.comm.collectives.identity import CPU, Identity
from decentfn.comm.collectives.world import World, worlds
from decentfn.core.context import context
from decentfn.torch_private.dynamo import constant_while_traced


def _let_go_of_all() -> None:
    """Release all worlds at exit, also those a script keeps: a gloo thread that outlives Python aborts the process."""
    for world in list(worlds):
        world.let_go()
    wait_for_gloo()  # a script, or the traceback of its error, may keep a group itself


atexit.register(_let_go_of_all)

_default: list[World] = []  # the world of the current default group, or of one process, once requested
_kept: list[World] = []  # further worlds of the default group


def world() -> World:
    """Return the world of this thread's operators (gossip's): set by `use`, of the default group, or one process."""
    given = context.world
    if given is not None:
        return given._gossip or given
    group = dist.group.WORLD  # None without one
    if not _default or _default[0].adopted is not group:
        return adopt_default_group(device=CPU if group is None else _device_of(group))
    found = _default[0]
    return found._gossip or found


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the processes, if a script made the default group itself, as for DDP."""
    if "nccl" not in str(dist.get_backend_config()):
        return CPU
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def require_messages_from(call: str, device: torch.device) -> None:
    """Raise ValueError if the default group cannot send from this device, as NCCL from the CPU."""
    here = all_processes()
    if here.size == 1 or context.world is not None:
        return
    backends = str(dist.get_backend_config())
    if f"{device.type}:" not in backends:
        kinds = [part.partition(":")[0] for part in backends.split(",")]
        raise ValueError(
            f"{call}: the parameters are on {device}, and the process group ({backends}) carries messages from {', '.join(kinds)} "
            f"only; move the model there first, model.to({kinds[0]!r}), or leave the group to df.init()."
        )


def all_processes() -> World:
    """Return the world of all processes of all workers."""
    return world().all_processes


@constant_while_traced
def processes_per_worker() -> int:
    """Return the number of processes per worker; also works while a step is traced."""
    return world().identity.processes_per_worker


@constant_while_traced
def sends_outside_step() -> bool:
    """Return True if what is posted now travels, and belongs to no `whole_step`; also works while a step is traced."""
    return context.step_world is None and world().identity.size > 1


def require_workers_of(processes: int) -> None:
    """Raise ValueError if a state was made for another number of processes per worker; 1 suits any number."""
    now = processes_per_worker()
    if processes not in (1, now):
        raise ValueError(
            f"a state of workers of {processes} processes, but df.init(processes_per_worker={now}) was called since; make it again with "
            f"init(params), restore it from a checkpoint, or call df.init(processes_per_worker={processes}) again."
        )


def kept_world(processes_per_worker: int) -> World | None:
    """Return the world of the default group that was made for workers of so many processes, or None."""
    return next((one for one in _kept if one.processes_per_worker == processes_per_worker), None)


def replace_world(made: World) -> None:
    """Take another world of the default group; it is kept, because each of its groups has threads."""
    if made not in _kept:
        _kept.append(made)
    _default[:] = [made]


def adopt_default_group(timeout: timedelta | None = None, device: torch.device = CPU) -> World:
    """Take the default group as the world, each process a worker, or this process alone; later groups use `timeout`."""
    if dist.is_initialized():
        wait_for_gloo_before_forks()
        identity = Identity.of(dist.get_rank(), dist.get_world_size(), device)
    else:
        identity = Identity.of(0, 1, device)
    world = World(Channels(identity, dist.group.WORLD, timeout))
    _forget()
    _default[:] = [world]
    return world


def leave_default_group() -> None:
    """Destroy the default group and all groups made within it; no messages may be in flight."""
    for world in (*_default, *_kept):
        for one in (world, world.gossip):
            one.let_go()
    _forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget() -> None:
    for world in (*_default, *_kept):
        world.split(None)  # gossip's world refers back to it
    _default.clear()
    _kept.clear()


@contextmanager
def use(given: World) -> Iterator[World]:
    """Context in which this thread's operators use `given` instead of the default process group's world."""
    with context.having(world=given):
        yield given
