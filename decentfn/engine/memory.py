"""Settings of the C allocator, for training on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next step.

    glibc returns large freed blocks to the system, and the next step pays for every page again: a fifth of the step of
    a 10M-parameter network. Process-wide; peak memory does not change.

    Returns:
        True if the C library supports the settings (glibc does).
    """
    mallopt = _from_c("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Return memory freed by setup and compilation to the system; called after a first step."""
    malloc_trim = _from_c("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _from_c(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
