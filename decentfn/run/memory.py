"""The C allocator, for training on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST, _SMALLEST = 2**23, 2**16
"""Bytes of what fills holes; smaller ones are left."""

_filled: list[int] = []
_keeps_freed = False


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its own next step.

    glibc gives large blocks back to the system when they are freed, and the next step pays for every page again: a
    fifth of the step of a 10M-parameter network. Process-wide; peak memory does not change.

    Returns:
        Whether the C library knows the settings (glibc does).
    """
    global _keeps_freed
    mallopt = _from_c("mallopt")
    _keeps_freed = mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    return _keeps_freed


@contextmanager
def settling() -> Iterator[None]:
    """Around a first step: what setting up and compiling freed is given back to the system, and later steps leave its holes alone.

    glibc puts a block into the smallest hole that takes it. After setting up and compiling there are holes of all sizes, and a
    process that keeps what it frees comes to use more and more of them from step to step. So they are filled, and what is
    allocated afterwards lies together above them. What fills them is never touched, and takes no memory.
    """
    free = _from_c("free")
    while _filled:
        free(ctypes.c_void_p(_filled.pop()))
    give_back_freed_memory()
    try:
        yield
    finally:
        give_back_freed_memory()
        _fill_holes()


def give_back_freed_memory() -> None:
    """Give back to the system what this process has freed so far."""
    malloc_trim = _from_c("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _fill_holes() -> None:
    sbrk, malloc, free, mallinfo = (_from_c(name) for name in ("sbrk", "malloc", "free", "mallinfo2"))
    if not _keeps_freed or mallinfo is None:
        return
    sbrk.restype = malloc.restype = ctypes.c_void_p
    sbrk.argtypes, malloc.argtypes, free.argtypes = [ctypes.c_ssize_t], [ctypes.c_size_t], [ctypes.c_void_p]
    mallinfo.restype = _Mallinfo
    end, left, size = sbrk(0), mallinfo().fordblks, _LARGEST
    while size >= _SMALLEST:
        block = malloc(size) if left >= size else None
        if block is not None and block + size <= end:
            _filled.append(block)
            left -= size
        else:
            free(block)
            size //= 2


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` is the number of free bytes."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _from_c(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
