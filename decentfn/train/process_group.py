"""The process group, from torchrun's environment and the GPUs that are there."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import decentfn
from decentfn.comm import collectives
from decentfn.comm.collectives import World
from decentfn.engine.memory import keep_freed_memory
from decentfn.errors import PlanMismatch
from decentfn.train.generation import fresh_part

_log = logging.getLogger("decentfn")

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
    the memory that it frees (`keep_freed_memory`).

    Args:
        backend: gloo, nccl (then gloo still serves the CPU) or another of torch.distributed's; None chooses, the same for all ranks,
            and warns where there are GPUs, but fewer than processes.
        timeout: how long a collective waits for the others before it fails. The first step must outlast the slowest
            compilation among the ranks, so minutes, not seconds.
        processes_per_worker: S, so many processes, next to one another by rank, share a worker's parameters: row by row, or as
            `fully_shard` or `parallelize_module` over `world.mesh["shard"]` say, see docs/large_models.md. "node": all of a machine,
            as many as torchrun says (LOCAL_WORLD_SIZE). None: what was said before, or 1. Said anew, states from before are of no use.

    Returns:
        This process's world: `rank` and `size` count processes, `worker` and `num_workers` workers, `process` is which of its
        worker's `processes_per_worker` this one is; `device`, `workers(local)`, and where a worker is several processes, `mesh`,
        with the axes "worker" and "shard".

    Raises:
        ValueError: on all processes, S does not divide their number, or another one says another; the timeout is not positive;
            torchrun's environment is incomplete, or another launcher's (srun, mpirun) with several processes stands in its place;
            NCCL was asked for, and a rank has no GPU of its own.
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
    """Return how many processes a worker is, the same on all, or raise on all. Collective."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "not set")
    number = int(local) if said == "node" and local.isdecimal() else said
    with collectives.calling("df.init(processes_per_worker=...)"):
        everyone = collectives.gather_objects([repr(said), number if type(number) is int else local], world)
    for rank, (its, size) in enumerate(everyone):
        if its == "'node'" and not isinstance(size, int):
            raise ValueError(
                f"init(processes_per_worker='node'): LOCAL_WORLD_SIZE is {size} on rank {rank}; start with torchrun, or give the number."
            )
        if not isinstance(size, int) or size < 1 or world.size % size or size != everyone[0][1]:
            raise ValueError(
                f"init(processes_per_worker={its}): a worker is so many processes of {world.size}; give a divisor of their number, on all "
                f"of them alike (rank {rank}: {its}, rank 0: {everyone[0][0]})."
            )
    return everyone[0][1]


def _takes_gpus(backend: str | None) -> bool:
    return backend is None or "nccl" in backend


def _device_alone(gpus: int) -> torch.device:
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun's environment says that this is one of several processes; what it lacks, PyTorch names."""
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return True
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
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = fresh_part(store, rank, size, timeout)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # A scheduler may show each process its own GPU alone: number 0 to all of them.
    index = 0 if gpus == 1 else local_rank
    own = {
        "versions": _versions(),
        "local rank": local_rank,
        "gpus": gpus,
        "gpu": _gpu(index) if index < gpus else None,
    }
    # They ask each other first: on some machines there may be GPUs enough.
    everyone = _told(PrefixStore("machines", store), rank, size, own)
    _require_same_versions(everyone, rank)
    taken = [its["gpu"] for its in everyone]
    without = [i for i, gpu in enumerate(taken) if gpu is None or gpu in taken[:i]]
    on_gpu = _takes_gpus(backend) and not without
    if _takes_gpus(backend) and without:
        its = everyone[without[0]]
        fact = f"rank {without[0]} has LOCAL_RANK={its['local rank']}, but its machine shows {its['gpus']} GPUs"
        if backend is not None:
            raise ValueError(
                f"init(backend={backend!r}): {fact}, and NCCL needs one for each process; start fewer processes on a machine, "
                "or leave backend out and train on the CPU."
            )
        if rank == 0 and any(its["gpus"] for its in everyone):
            warnings.warn(
                f"init(): {fact} ({len(without)} such ranks), so all ranks train on the CPU with gloo; start one process for "
                "each GPU, or say backend='gloo'.",
                stacklevel=3,
            )
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        # The CPU side serves metrics, fingerprints and the checks of a run on GPUs too.
        "cpu:gloo,cuda:nccl" if on_gpu and backend in (None, "nccl") else backend or "gloo",
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


def _told(store: Store, rank: int, size: int, value: Any) -> list[Any]:
    """Return what every rank says of itself, by rank, as JSON gives it back; collective."""
    store.set(str(rank), json.dumps(value))
    everyone = [json.loads(said) for said in store.multi_get([str(i) for i in range(size)])]
    store.set(f"heard {rank}", "")
    if rank == 0:  # its process may hold the store: if it left with an error first, the others would not hear which
        store.wait([f"heard {i}" for i in range(size)])
    return everyone


def _versions() -> dict[str, str]:
    release = str(torch.__version__).partition("+")[0]  # builds for the CPU and for GPUs may meet
    python = ".".join(platform.python_version_tuple()[:2])
    return {"decentfn": decentfn.__version__, "torch": release, "Python": python}


def _require_same_versions(everyone: list[Any], rank: int) -> None:
    for name, version in everyone[0]["versions"].items():
        for other, its in enumerate(everyone):
            if its["versions"].get(name) != version:
                raise PlanMismatch(
                    f"init(): the ranks run different versions of {name}: {version} on rank 0, {its['versions'].get(name)} on rank "
                    f"{other}; install the same everywhere.",
                    process=rank,
                    peer=other if rank != other else 0,
                )


def _gpu(index: int) -> str:
    """Return which GPU that is, as no two processes may have the same."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # tells the parts of a GPU apart
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    return f"{platform.node()} {uuid} {shown[index] if index < len(shown) else ''}"
