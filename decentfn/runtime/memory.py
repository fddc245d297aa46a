"""The C allocator, for training on the CPU."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its own next step.

    glibc gives large blocks back to the system when they are freed, and the next step pays for every page again: a
    fifth of the step of a 10M-parameter network. Process-wide; peak memory does not change.

    Returns:
        Whether the C library knows the settings (glibc does).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
