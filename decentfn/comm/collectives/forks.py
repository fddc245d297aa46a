"""Safe forks (of a DataLoader's workers) beside gloo's threads, on Python versions that can hang there."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_CAN_HANG = sys.version_info < (3, 11, 8)

_GLOO = "pt_gloo_runloop"  # PyTorch's name for the threads that run a gloo group's collectives

_PAUSE_S = 0.001
_PATIENCE_S = 1.0


@cache
def wait_for_gloo_before_forks() -> None:
    """Make every fork wait until gloo's threads rest, if Python needs it (Linux, before 3.11.8).

    There the child hangs if another thread creates its Python thread state during the fork
    (https://github.com/python/cpython/issues/112275), as gloo's do to release the tensors of a finished collective. A
    DataLoader is often started right after one; without this, one start in a hundred hung.
    """
    if _CAN_HANG and sys.platform == "linux":
        os.register_at_fork(before=wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until no gloo thread runs during a pause; the pause frees the GIL, so a thread that needs it would run."""
    end = time.monotonic() + _PATIENCE_S
    before = None
    while (now := _gloo_threads()) and time.monotonic() < end:
        if now == before and all(state.startswith("State:\tS") for state, *_ in now):
            return
        before = now
        time.sleep(_PAUSE_S)


def _gloo_threads() -> list[tuple[str, ...]]:
    """Return each gloo thread's state and its counts of context switches."""
    threads = []
    for status in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            name, *lines = status.read_text().splitlines()
            if name.endswith(_GLOO):
                threads.append(tuple(line for line in lines if line.startswith("State") or "ctxt_switches" in line))
    return threads
