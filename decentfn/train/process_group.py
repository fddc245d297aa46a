"""Setup of the process group from torchrun's environment and the available GPUs."""

from __future__ import annotations

import atexit
import json
import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.utils.store import synchronize

from decentfn import sharded
from decentfn.comm import collectives
from decentfn.comm.collectives import World
from decentfn.core import brief, checks_numbers, log, real, require, warn
from decentfn.elastic.connections import default_group, reported_as
from decentfn.elastic.joining import versions, wait_for_run
from decentfn.engine.memory import keep_freed_memory
from decentfn.errors import ExchangeTimeout, PlanMismatch
from decentfn.train.signals import end_with_agent, report_root_cause
from decentfn.train.store import answered, fresh_part, store_of_environment, store_of_run, unknown_interface

_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "submitit's local executor": ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "Kubeflow's Trainer": ("PET_NODE_RANK", "PET_NNODES", ""),  # torchrun's flags; a pod has one process
}
"""Other launchers, and their names for RANK, WORLD_SIZE and LOCAL_RANK."""

_TIMEOUT = timedelta(minutes=10)

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")


@checks_numbers
def init(
    backend: str | None = None,
    *,
    timeout: timedelta | float | None = None,
    processes_per_worker: int | Literal["node"] | None = None,
    join: bool = False,
) -> World:
    """Set up the process group that torchrun describes: NCCL if every process has its own GPU, else gloo.

    Without torchrun there is one process and no group. Repeated calls are harmless. Processes restarted by torchrun
    find each other despite stale entries in its store (`docs/restarts.md`). If torchrun itself is killed, they end (Linux). On
    the CPU the process also keeps the memory that it frees (docs/performance.md).

    Args:
        backend: gloo, nccl (then gloo still serves the CPU) or another of torch.distributed's, except mpi; None chooses
            the same for all ranks, and warns if there are fewer GPUs than processes.
        timeout: how long a collective waits before it fails, a timedelta or seconds. It must cover the slowest compilation among the ranks in
            the first step, so minutes, not seconds. None: 10 minutes; a group that another launcher made (Ray Train, Fabric,
            mp.spawn) keeps its own. A number is set for that group, too.
        processes_per_worker: S, the number of processes with consecutive ranks that share a worker's parameters: row by
            row, or as `fully_shard` or `parallelize_module` over `world.mesh["shard"]` shard them
            (docs/large_models.md). "node": all processes of a machine (torchrun's LOCAL_WORLD_SIZE). None: the earlier
            value, or 1. A change invalidates earlier states.
        join: True in a new process that `df.join` shall bring into the run of `df.survive` whose store is at MASTER_ADDR
            and MASTER_PORT. It waits, up to the timeout, until that run has begun. `world.num_workers` is the number of
            workers that the run began with until the process has joined.

    Returns:
        This process's world: `rank` and `size` count processes; `worker` and `num_workers` count workers; `process` is
        this process's number among its worker's `processes_per_worker`; `device`; `workers(local)`; and, if a worker is
        several processes, `mesh` with axes "worker" and "shard".

    Raises:
        ValueError: on all processes, S does not divide their number, or differs between them; the timeout is not
            positive; torchrun's environment is incomplete, or another launcher (srun, mpirun) started several processes
            without it; there is no such backend; GLOO_SOCKET_IFNAME names no interface; NCCL was requested, and a rank has no
            GPU of its own; a group that exists has another backend, or another timeout from an earlier call; `join` in a
            process that has a group, without the store's address, or to a run on GPUs.
        df.errors.PlanMismatch: on all processes, their versions of decentfn, torch or Python (3.11 and 3.12) differ; in a
            process with `join`, they are not those of the run.
        df.errors.ExchangeTimeout: a process, or the store of rank 0, did not answer within the timeout.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=real("init", "timeout", timeout))
    given, timeout = timeout, _TIMEOUT if timeout is None else timeout
    require(timeout > timedelta(0), f"init(timeout={timeout})", "the timeout is positive; minutes are usual.")
    _require_backend(backend)
    if join:
        return _newcomer(timeout)
    if dist.is_initialized():
        _take_over(backend, given)
    if not dist.is_initialized():
        gpus = torch.cuda.device_count() if _takes_gpus(backend) and torch.cuda.is_available() else 0
        if _is_launched(os.environ):
            report_root_cause()
            end_with_agent()
            _start(backend, gpus, timeout)
        else:
            place = f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}" if gpus else "cpu"
            collectives.adopt_default_group(device=torch.device(place))
            if gpus > 1:
                log.warning(
                    f"init(): this is one process, one worker, and {gpus} GPUs are here; `torchrun --nproc-per-node {gpus} script.py` "
                    "starts a worker on each"
                )
    world = collectives.all_processes()
    if processes_per_worker is not None:
        size = _processes_per_worker(processes_per_worker, world)
        if size != world.processes_per_worker:
            world = sharded.split_workers(size)
    if world.device.type == "cpu":
        keep_freed_memory()
    return world


def _require_backend(backend: Any) -> None:
    """Raise ValueError unless torch.distributed has the backend, and it can carry messages."""
    if backend is None:
        return
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "mpi")]
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")] if isinstance(backend, str) else [backend]
    if "mpi" in names:
        raise ValueError(
            f"init(backend={backend!r}): torch.distributed's MPI ignores timeouts, so a lost process would hang the others, and "
            "PyTorch's wheels lack it; leave backend out. mpirun may start the processes (docs/launching.md)."
        )
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"init(backend={brief(backend)}): there is no {brief(unknown[0])}; leave backend out, or take one of {', '.join(known)}."
        )


def _take_over(backend: str | None, timeout: timedelta | None) -> None:
    """Give the default group that exists this timeout; raise ValueError if it has another one from here, or another backend."""
    has = str(dist.get_backend_config())
    wanted = [part.rpartition(":")[2].lower() for part in backend.split(",")] if backend else []
    if [name for name in wanted if name not in has]:
        raise ValueError(
            f"init(backend={backend!r}): the process group exists, with {has}, made by the launcher or the script; leave backend out, "
            "or make that group with this backend."
        )
    known = collectives.all_processes()
    if timeout is None or known.channels.timeout == timeout:
        return
    rule = (
        f"an earlier df.init set {known.channels.timeout}; pass the timeout to the first call, and leave it out here."
    )
    require(known.channels.timeout is None, f"init(timeout={timeout})", rule)
    group: Any = dist.group.WORLD
    group.set_timeout(timeout)
    collectives.adopt_default_group(timeout, known.device)


def _newcomer(timeout: timedelta) -> World:
    if dist.is_initialized():
        raise ValueError("init(join=True): this process is in a group already; start another one, without torchrun.")
    if (known := collectives.all_processes()).identity.size_at_start > 1:  # an earlier call
        return known
    world = collectives.adopt_default_group(timeout)
    keep_freed_memory()
    log.info("init(join=True): waiting for the run at %s:%s", *map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
    return wait_for_run(world, answered(lambda: store_of_environment(timeout), timeout), timeout)


def _processes_per_worker(said: int | str, world: World) -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "not set")
    number = int(local) if said == "node" and local.isdecimal() else said
    with collectives.calling("df.init(processes_per_worker=...)"):
        everyone = collectives.gather_objects([repr(said), number if type(number) is int else local], world)
    for rank, (its, size) in enumerate(everyone):
        rule = f"LOCAL_WORLD_SIZE is {size} on rank {rank}; start with torchrun, or give the number."
        require(its != "'node'" or isinstance(size, int), "init(processes_per_worker='node')", rule)
        if not isinstance(size, int) or size < 1 or world.size % size or size != everyone[0][1]:
            raise ValueError(
                f"init(processes_per_worker={its}): the number must divide {world.size}, the number of "
                f"processes, and be the same on all (rank {rank}: {its}, rank 0: {everyone[0][0]})."
            )
    return everyone[0][1]


def _takes_gpus(backend: str | None) -> bool:
    return backend is None or "nccl" in backend


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun's environment describes several processes; PyTorch reports missing variables."""
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return True
    for launcher, (rank, size, local_rank) in _LAUNCHERS.items():
        if rank in environment and int(environment.get(size, "1").rpartition(":")[2]) > 1:
            raise ValueError(
                f"init(): {rank}={environment[rank]} and {size}={environment[size]}: {launcher} started several "
                "processes, but RANK is not set, so each would train alone; start them with torchrun, or export "
                f"RANK=${rank}, WORLD_SIZE=${size}, LOCAL_RANK={local_rank and '$' + local_rank or 0}, MASTER_ADDR and "
                f"MASTER_PORT in every process (for one process alone, unset {size})."
            )
    if (index := environment.get("JOB_COMPLETION_INDEX", "0")) != "0":
        raise ValueError(
            f"init(): JOB_COMPLETION_INDEX={index}: a Job of Kubernetes started several pods, but RANK is not set, so each "
            "would train alone; export RANK=$JOB_COMPLETION_INDEX, WORLD_SIZE (its completions), LOCAL_RANK=0, MASTER_ADDR "
            "(pod 0's name in a headless service) and MASTER_PORT in every pod (for one process alone, unset "
            "JOB_COMPLETION_INDEX)."
        )
    return False


def _require_complete(environment: Mapping[str, str]) -> None:
    """Raise ValueError unless the four variables of torchrun are there, and numbers in their ranges."""
    rank, size, port, address = given = [environment.get(name, "") for name in _VARIABLES]
    are_numbers = all(value.isdecimal() for value in (rank, size, port, environment.get("LOCAL_RANK") or "0"))
    if not (address and are_numbers and int(rank) < int(size)):
        said = ", ".join(f"{name}={value or '(not set)'}" for name, value in zip(_VARIABLES, given, strict=True))
        raise ValueError(
            f"init() with {said}, LOCAL_RANK={environment.get('LOCAL_RANK', '(not set)')}: all but the address are numbers, "
            "and ranks count from 0 to WORLD_SIZE - 1; torchrun sets them. By hand, set in every process its own RANK, and "
            "the same WORLD_SIZE (the number of processes), MASTER_ADDR and MASTER_PORT (host and free port of rank 0); for "
            "one process alone, unset RANK and WORLD_SIZE."
        )


def _start(backend: str | None, gpus: int, timeout: timedelta) -> None:
    _require_complete(os.environ)
    store, rank, size = store_of_run(timeout)
    store.set_timeout(timeout)
    store = fresh_part(store, rank, size, timeout)
    local_rank = int(os.environ.get("LOCAL_RANK") or "0")
    # A scheduler may show each process only its own GPU, as number 0.
    index = 0 if gpus == 1 else local_rank
    own = {
        "versions": versions(),
        "local rank": os.environ.get("LOCAL_RANK", "(not set)"),
        "gpus": gpus,
        "gpu": _gpu(index) if index < gpus else None,
        "interface": unknown_interface(),
    }
    # Compare over ranks first: only some machines may have enough GPUs.
    what = f"init(): WORLD_SIZE={size} on rank {rank}, and not all of these ranks answered; is it the same in every process?"
    with reported_as(ExchangeTimeout, what):  # rank 0, whose process may hold the store, is the last to go on
        told = synchronize(store, json.dumps(own).encode(), rank, size, "machine ", timeout.total_seconds())
    everyone = [json.loads(said) for said in told]
    _require_same_versions(everyone, rank)
    for other, its in enumerate(everyone):
        require(its["interface"] is None, "init()", f"GLOO_SOCKET_IFNAME on rank {other}: {its['interface']}.")
    taken = [its["gpu"] for its in everyone]
    without = [i for i, gpu in enumerate(taken) if gpu is None or gpu in taken[:i]]
    on_gpu = _takes_gpus(backend) and not without
    if _takes_gpus(backend) and without:
        its = everyone[without[0]]
        fact = f"rank {without[0]} has LOCAL_RANK={its['local rank']}, but its machine shows {its['gpus']} GPUs"
        if backend is not None:
            raise ValueError(
                f"init(backend={backend!r}): {fact}, and NCCL needs one for each process; start fewer processes on a "
                "machine, or leave backend out and train on the CPU."
            )
        if rank == 0 and any(its["gpus"] for its in everyone):
            warn(
                f"init(): {fact} ({len(without)} such ranks), so all ranks train on the CPU with gloo; start one "
                "process for each GPU, or pass backend='gloo'."
            )
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    default_group(PrefixStore("default_pg", store), rank, size, timeout, device, None if backend == "nccl" else backend)
    collectives.adopt_default_group(timeout, device)
    if rank == 0:
        log.info("world: %d processes, %s, on %s, timeout %s", size, dist.get_backend_config(), device.type, timeout)
    atexit.register(collectives.leave_default_group)


def _require_same_versions(everyone: list[Any], rank: int) -> None:
    for name, version in everyone[0]["versions"].items():
        for other, its in enumerate(everyone):
            if its["versions"].get(name) != version:
                raise PlanMismatch(
                    f"init(): the ranks run different versions of {name}: {version} on rank 0, "
                    f"{its['versions'].get(name)} on rank {other}; install the same everywhere.",
                    process=rank,
                    peer=other if rank != other else 0,
                )


def _gpu(index: int) -> str:
    """Return an identifier of the GPU, to check that no two processes share one."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # distinguishes the parts of a GPU
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    return f"{platform.node()} {uuid} {shown[index] if index < len(shown) else ''}"
