"""Settings of the C allocator, for training on the CPU."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables that set glibc's allocator; a process started with one of them keeps its own settings."""


@cache
def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next step; `df.init` and the transforms of a step call it.

    glibc returns large freed blocks to the system, and the next step pays for every page again: half of the time of a
    simulated step or more. Process-wide. The allocator may then use more memory at its peak (docs/performance.md); to
    leave it alone, start the process with MALLOC_TRIM_THRESHOLD_=131072, glibc's default.

    Returns:
        True if the settings were made: the C library has them (glibc does), and no variable sets its allocator.
    """
    mallopt = None if any(name in os.environ for name in _SETTINGS) else _from_c("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Return memory freed by setup and compilation to the system; called after a first step."""
    malloc_trim = _from_c("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def device_memory(device: torch.device) -> int:
    """Return the size of a device's memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _from_c(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
