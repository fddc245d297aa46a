"""The process group, from torchrun's environment and the GPUs that are there."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from decentfn import collectives
from decentfn.collectives import World
from decentfn.run.generation import fresh_part
from decentfn.run.interrupts import say_interrupts_in_a_line
from decentfn.run.machines import require_fit, told
from decentfn.run.memory import keep_freed_memory

_log = logging.getLogger("decentfn")

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""What else starts processes, and its names for RANK, WORLD_SIZE and LOCAL_RANK."""


def init(
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    processes_per_worker: int | Literal["node"] | None = None,
) -> World:
    """Set up the process group that torchrun describes: NCCL where every process has a GPU of its own, else gloo.

    Without torchrun there is one process and no group. Calling it twice is harmless. Processes that torchrun has started again
    join each other, whatever the dead ones left in its store (`docs/restarts.md`). On the CPU the process also keeps
    the memory that it frees (`keep_freed_memory`). Under torchrun a Ctrl-C that nobody catches ends each process with a line.

    Args:
        backend: gloo, nccl or another of torch.distributed's; None chooses, the same for all ranks, and warns where there
            are GPUs, but fewer than processes.
        timeout: how long a collective waits for the others before it fails. The first step must outlast the slowest
            compilation among the ranks, so minutes, not seconds.
        processes_per_worker: S, so many processes, next to one another by rank, share a worker's parameters: row by row, or as
            `fully_shard` or `parallelize_module` over `world.mesh["shard"]` say, see docs/large_models.md. "node": all of a machine, as many
            as torchrun says (LOCAL_WORLD_SIZE). None: what was said before, or 1. Said anew, states from before are of no use.

    Returns:
        This process's world: `rank` and `size` count processes, `worker` and `num_workers` workers, `process` is which of its
        worker's `processes_per_worker` this one is; `device`, `workers(local)`, and where a worker is several processes, `mesh`,
        with the axes "worker" and "shard".

    Raises:
        ValueError: on all processes, S does not divide their number, or another one says another; the timeout is not positive; torchrun's environment is incomplete, or another launcher's (srun,
            mpirun) with several processes stands in its place; NCCL was asked for, and a rank has no GPU of its own;
            GLOO_SOCKET_IFNAME names a network interface that a rank's machine does not have.
        df.errors.PlanMismatch: on all processes, they run different versions of decentfn, torch or Python (3.11 and 3.12).
        df.errors.ExchangeTimeout: a process did not come within the timeout.
    """
    if timeout <= timedelta(0):
        raise ValueError(f"init(timeout={timeout}): the timeout is positive; minutes are usual.")
    if not dist.is_initialized():
        gpus = torch.cuda.device_count() if _takes_gpus(backend) and torch.cuda.is_available() else 0
        if _is_launched(os.environ):
            _start(backend, gpus, timeout)
        else:
            collectives.adopt_default_group(device=_device_alone(gpus))
    world = collectives.everyone()
    if processes_per_worker is not None:
        size = _processes_per_worker(processes_per_worker, world)
        if size != world.processes_per_worker:
            world = collectives.split_workers(size)
    if world.device.type == "cpu":
        keep_freed_memory()
    return world


def _processes_per_worker(said: int | str, world: World) -> int:
    """How many processes a worker is, the same everywhere, or all of them raise. Collective."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "not set") if said == "node" else None
    number = int(told) if told and told.isdecimal() else said
    with collectives.calling("df.init(processes_per_worker=...)"):
        everyone = collectives.gather_objects([repr(said), number if type(number) is int else None, told], world)
    for rank, (its, size, local) in enumerate(everyone):
        call, way_out = (
            f"init(processes_per_worker={its})",
            f"a divisor of their number, {world.size}, on all of them alike",
        )
        if its == "'node'" and size is None:
            raise ValueError(
                f"{call}: LOCAL_WORLD_SIZE is {local} on rank {rank}; start with torchrun, or give the number."
            )
        if size is None or size < 1 or world.size % size:
            raise ValueError(f"{call}: a worker is so many processes of {world.size}; give {way_out}.")
        if size != everyone[0][1]:
            raise ValueError(f"{call}: {size} on rank {rank}, but {everyone[0][1]} on rank 0; give {way_out}.")
    return everyone[0][1]


def _takes_gpus(backend: str | None) -> bool:
    return backend is None or "nccl" in backend


def _device_alone(gpus: int) -> torch.device:
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's environment says that this is one of several processes."""
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if not missing:
        return True
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        raise ValueError(
            f"init(): the environment has {', '.join(name for name in _TORCHRUN if name not in missing)} but not "
            f"{', '.join(missing)}, and a process group needs all four; start with torchrun, or export them."
        )
    for launcher, (rank, size, local_rank) in _LAUNCHERS.items():
        if rank in environment and int(environment.get(size, "1")) > 1:
            raise ValueError(
                f"init(): {rank}={environment[rank]} and {size}={environment[size]}: {launcher} started several processes, "
                f"but RANK is not set, so each would train alone; start them with torchrun, or export RANK=${rank}, "
                f"WORLD_SIZE=${size}, LOCAL_RANK=${local_rank}, MASTER_ADDR and MASTER_PORT in every process "
                f"(for one process alone, unset {size})."
            )
    return False


def _start(backend: str | None, gpus: int, timeout: timedelta) -> None:
    """Make the default group, of the backend that all ranks can take."""
    say_interrupts_in_a_line()
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = fresh_part(store, rank, size, timeout)
    notes = PrefixStore("machines", store)
    require_fit(notes, rank, size, backend)
    place = _place(_local_rank(gpus, size), gpus)
    # They ask each other first: on some machines there may be GPUs enough.
    everyone = [_Place(*its) for its in told(notes, "place", rank, size, place)]
    taken = [its.gpu for its in everyone]
    without = {i: its for i, its in enumerate(everyone) if its.gpu is None or its.gpu in taken[:i]}
    if without and _takes_gpus(backend):
        _say_who_has_none(without, backend, is_speaker=rank == 0 and any(its.gpus for its in everyone))
    on_gpu = _takes_gpus(backend) and not without
    device = torch.device("cuda", place.index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        # The CPU side serves metrics, fingerprints and the checks of a run on GPUs too.
        backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo"),
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if on_gpu else None,  # communicators are made now, not by the first message
    )
    collectives.adopt_default_group(timeout, device)
    if rank == 0:
        _log.info("world: %d processes, %s, on %s, timeout %s", size, dist.get_backend_config(), device.type, timeout)
    atexit.register(collectives.leave_default_group)


class _Place(NamedTuple):
    """Where a process would compute."""

    local_rank: int
    gpus: int  # that it sees
    index: int  # of the one that would be its own
    gpu: str | None  # which one that is; None where there is none


def _place(local_rank: int, gpus: int) -> _Place:
    # A scheduler may show each process its own GPU alone: number 0 to all of them.
    index = 0 if gpus == 1 else local_rank
    if index >= gpus:
        return _Place(local_rank, gpus, index, None)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # tells the parts of a GPU apart
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    return _Place(local_rank, gpus, index, f"{platform.node()} {uuid} {shown[index] if index < len(shown) else ''}")


def _local_rank(gpus: int, size: int) -> int:
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None and gpus > 1 and size > 1:
        raise ValueError(
            f"init(): LOCAL_RANK is not set, so nothing says which of {gpus} GPUs is this process's own; start with "
            "torchrun, or export LOCAL_RANK."
        )
    return int(local_rank or 0)


def _say_who_has_none(without: dict[int, _Place], backend: str | None, *, is_speaker: bool) -> None:
    """Ranks lack a GPU of their own: an error where NCCL was asked for, else a warning where others have one."""
    rank, place = next(iter(without.items()))
    fact = f"rank {rank} has LOCAL_RANK={place.local_rank}, but its machine shows {place.gpus} GPUs"
    if backend is not None:
        raise ValueError(
            f"init(backend={backend!r}): {fact}, and NCCL needs one for each process; start fewer processes on a machine, "
            "or leave backend out and train on the CPU."
        )
    if is_speaker:
        warnings.warn(
            f"init(): {fact} ({len(without)} such ranks), so all ranks train on the CPU with gloo; start one process for "
            "each GPU, or say backend='gloo'.",
            stacklevel=4,
        )
