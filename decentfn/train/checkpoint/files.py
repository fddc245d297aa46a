"""Files that are complete or absent: written to the disk, then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from uuid import uuid4

_SLICE = 2**20
"""Bytes hashed and written at a time, so that they stay in the processor's cache."""

_REMOVED = ".removed-"

own: dict[Path, int] = {}
"""Step last restored or saved by this process, by the run's directory, resolved."""


def write(path: Path, content: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write a new file and sync it to disk; return its size in bytes and its SHA-256."""
    size, digest = 0, hashlib.sha256()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in content:
            view = memoryview(part)
            for first in range(0, len(view), _SLICE):
                piece = view[first : first + _SLICE]
                digest.update(piece)
                while len(piece):
                    done = os.write(file, piece)
                    piece, size = piece[done:], size + done
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, while writing", str(path)) from error
    finally:
        os.close(file)
    return size, digest.hexdigest()


def digest_of(path: Path, into: Iterable[tuple[int, memoryview]] = ()) -> tuple[int, str]:
    """Return a file's size in bytes and the SHA-256 of its content.

    The same pass fills memory with the bytes at these positions, which ascend; a position is asked for when the memory
    before it is full.
    """
    digest, spare, at = hashlib.sha256(), memoryview(bytearray(_SLICE)), 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start, memory in chain(into, [(size, spare[:0])]):
            skipped = [spare[: start - first] for first in range(at, start, _SLICE)]
            for piece in (*skipped, *(memory[first : first + _SLICE] for first in range(0, len(memory), _SLICE))):
                digest.update(piece[: file.readinto(piece)])
            at = start + len(memory)
    return size, digest.hexdigest()


def sync_directory(path: Path) -> None:
    """Sync a directory's list of files to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def publish(path: Path, name: Path) -> None:
    """Rename a complete file or directory; it replaces an older file of that name."""
    os.replace(path, name)
    sync_directory(name.parent)


def replace(path: Path, content: Iterable[memoryview | bytes]) -> None:
    """Write a file, and then replace an older one of that name."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        write(temporary, content)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Rename a directory, then remove its files, so that a partial one is never visible."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f"{_REMOVED}{path.name.lstrip('.')}")
    os.replace(path, gone)
    shutil.rmtree(gone)


def sweep(directory: Path, unfinished: str) -> None:
    """Remove leftovers of a killed run: directories that begin with `unfinished`, or were being removed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((unfinished, _REMOVED)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def is_from_torch_save(path: Path) -> bool:
    """Return True if a file begins like those of PyTorch's own `save`: a zip archive, or its former format."""
    with path.open("rb") as file:
        start = file.read(2)
    return start in (b"PK", b"\x80\x02")
