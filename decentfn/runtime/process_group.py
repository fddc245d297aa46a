"""The process group, from torchrun's environment."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from decentfn import collectives
from decentfn.collectives import World
from decentfn.runtime.memory import keep_freed_memory


def init(*, backend: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> World:
    """Set up the process group that torchrun describes: gloo on the CPU, NCCL where each process has a GPU.

    Without torchrun there is one process and no group. Calling it twice is harmless. On the CPU the process also keeps
    the memory that it frees (`keep_freed_memory`).

    Args:
        backend: gloo, nccl or another of torch.distributed's; None chooses.
        timeout: how long a collective waits for the others before it fails. The first step must outlast the slowest
            compilation among the ranks, so minutes, not seconds.

    Returns:
        This process's world: `rank`, `size`.

    Raises:
        ValueError: the timeout is not positive.
    """
    if timeout <= timedelta(0):
        raise ValueError(f"init(timeout={timeout}): the timeout is positive; minutes are usual.")
    if not torch.cuda.is_available():
        keep_freed_memory()
    if "RANK" in os.environ and not dist.is_initialized():
        on_gpu = torch.cuda.is_available() and backend != "gloo"
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # The CPU side serves metrics, fingerprints and the checks of a run on GPUs too.
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo"), timeout=timeout)
        collectives.adopt_default_group(timeout)
        # gloo's threads must end before the interpreter takes their memory away.
        atexit.register(collectives.leave_default_group)
    return collectives.world()
