"""Files that are there whole or not at all: written to the disk, then renamed; and the lock of a run's directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from decentfn.run.paths import private_directory

_SLICE = 2**20
"""So many bytes are hashed while they are in the processor's cache, and written."""

_REMOVED = ".removed-"


def write(path: Path, content: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Write a new file through to the disk; its size in bytes and the SHA-256 of its content."""
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


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_SLICE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync_directory(path: Path) -> None:
    """Write through to the disk which files a directory has."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def publish(path: Path, name: Path) -> None:
    """Give a file or directory that is complete its name, over an older file of that name."""
    os.replace(path, name)
    sync_directory(name.parent)


def remove(path: Path) -> None:
    """Take a directory's name away, then its files, so that no half of it is ever seen."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f"{_REMOVED}{path.name.lstrip('.')}")
    os.replace(path, gone)
    shutil.rmtree(gone)


def sweep(directory: Path, unfinished: str) -> None:
    """Remove what a run that was killed has left: what begins with `unfinished`, or was about to be removed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((unfinished, _REMOVED)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


class Lock:
    """A run's directory, for one run at a time; the system takes it back when the process ends, however it does.

    Raises:
        RuntimeError: another process has it.
    """

    def __init__(self, directory: Path) -> None:
        private_directory(directory)
        self._lock = FileLock(directory / "lock")
        holder = directory / "lock.json"
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RuntimeError(
                f"{directory}: {_said(holder)} holds the lock of this directory, and two runs would mix their checkpoints; "
                "end that run first, or give this one a directory of its own."
            ) from error
        holder.unlink(missing_ok=True)  # never write through a link
        write(holder, [json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()])

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


def _said(holder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        who = json.loads(holder.read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']}"
    return "another process"
