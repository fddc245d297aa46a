"""Connections of a generation of processes, over gloo, and over NCCL on GPUs: made, watched and ended.

gloo tells a process of a loss: its waits raise. NCCL does not: `wait` orders streams, and a kernel that waits for a lost
process holds the GPU until its communicator is aborted. So on GPUs, under `df.survive`:

* gloo, beside NCCL, carries the sum that shows that all have begun a step.
* A step ends once the GPU has its messages. The host polls for that (`Generation.wait_on_gpu`) and looks for losses meanwhile.
* A thread aborts the communicators if the host is blocked in a step, for example by a copy from the GPU (`watch`).
* What has ended since an abort counts as lost: the kernels have left anything in its memory.

PyTorch's watchdog, which would end the process or sleep for a minute, is kept away by `ENVIRONMENT`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store

from decentfn.core import brief_error, log
from decentfn.errors import RunError

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither ends the process nor aborts by itself
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # its monitor does not end the process after a dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # it does not sleep with its lock, four times as long
}
"""Variables that PyTorch reads when it makes a group of NCCL."""

_LOOK_S = 0.2
_POLL_S = 0.005
_CONNECTING = timedelta(seconds=1)
"""Timeout of each of gloo's five attempts to connect to a process that has come, which may have died since."""


@contextmanager
def reported_as(kind: type[RunError], what: str, **place: int) -> Iterator[None]:
    """Turn PyTorch's error into one of this library's, whose message says what failed, and why."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        raise kind(f"{what}: {brief_error(error)}", **place) from error


def require_recoverable(call: str) -> None:
    """Raise ValueError if PyTorch would end this process, or could not tell it of a loss."""
    wrong = [f"{name}={value}" for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if wrong:
        raise ValueError(
            f"{call} on GPUs: NCCL's watchdog would end the process that has lost another; export {' '.join(wrong)} before the "
            "program starts."
        )
    if "cpu:gloo" not in (backends := str(dist.get_backend_config())):
        raise ValueError(
            f"{call} on GPUs: the process group ({backends}) lacks gloo, which notices a loss; leave the group to df.init()."
        )


def connected(
    store: Store, rank: int, size: int, timeout: timedelta, within: timedelta, require_present: Callable[[], None]
) -> dist.ProcessGroup:
    """Connect processes over gloo; raise RuntimeError if one is lost, or does not come within this time.

    The group's timeout applies to sums; a message has that of its wait.
    """
    end = time.monotonic() + within.total_seconds()
    store.set(f"came {rank}", "")
    while not store.check([f"came {other}" for other in range(size)]):
        require_present()
        if time.monotonic() > end:
            raise RuntimeError(f"timed out after {within}: another process did not come to connect")
        time.sleep(_POLL_S)
    group = dist.ProcessGroupGloo(store, rank, size, min(timeout, _CONNECTING))
    group.set_timeout(timeout)
    return cast(dist.ProcessGroup, group)


def default_group(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, backend: str | None = None
) -> dist.ProcessGroup:
    """Make torch.distributed's default group; collective, of processes that have met.

    The store is one that no group has used. On a GPU, gloo beside NCCL serves metrics, fingerprints and checks.
    """
    on_gpu = device.type != "cpu"
    try:
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo"),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,  # create communicators now, not with the first message
        )
    except RuntimeError:
        # PyTorch names a group by their number, which must be the same everywhere. It restarts with the end of a default group.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise
    return cast(dist.ProcessGroup, dist.group.WORLD)


def abort_default_group() -> None:
    """Abort and destroy the default group, and all made within it, without the other processes."""
    if dist.is_initialized():
        cast(dist.ProcessGroup, dist.group.WORLD).abort()  # else NCCL would wait for its kernels
        dist.destroy_process_group()


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """End these groups' kernels on the GPU; what they have not received stays undefined."""
    for group in groups:
        try:
            group.abort()
        except RuntimeError as error:
            log.error("NCCL does not end its kernels: %s", brief_error(error))


def watch(of: weakref.ref[Any], require_present: Callable[[Any], None]) -> None:
    """Start a thread that hangs up for a world whose step is blocked by a loss, or for longer than its timeout."""

    def run() -> None:
        seen, since = None, 0.0
        while (here := of()) is not None:
            session, now = here.session, time.monotonic()
            step = (here.hooks.changes, session.at) if session.is_running else None
            if step != seen:
                seen, since = step, now
            if step is not None and not here.channels.has_hung_up:
                try:
                    require_present(here)
                    is_late = now - since > here.channels.longest_wait.total_seconds()
                except RuntimeError:
                    is_late = True
                if is_late:
                    here.hang_up()
            del here
            time.sleep(_LOOK_S)

    threading.Thread(target=run, name="decentfn watch of the GPU", daemon=True).start()
