"""Files of a run's checkpoints, complete or absent, and the manifest that describes those of one.

    run/checkpoint-000002-step-100/manifest.json
                                   process-00000.safetensors
                                   process-00001.safetensors

The first number counts the checkpoints of the directory: the newest has the highest, whatever its step. What is written is on
the disk before it gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from decentfn.errors import CheckpointCorrupt
from decentfn.train.collective_calls import as_path

FORMAT = 3
"""Newest format: 3 with frozen buffers left out, 2 with several processes per worker, otherwise 1."""
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"
_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
_SLICE = 2**20
"""Bytes hashed and written at a time, so that they stay in the processor's cache."""
_REMOVED = ".removed-"
own: dict[Path, int] = {}
"""Step last restored or saved by this process, by the run's directory, resolved."""


def write(path: Path, content: Iterable[memoryview | bytes], update: Callable[[memoryview], Any] = len) -> int:
    """Write a new file and sync it to disk; return its size in bytes. The same pass may `update` a digest."""
    size = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in content:
            view = memoryview(part)
            for first in range(0, len(view), _SLICE):
                piece = view[first : first + _SLICE]
                update(piece)
                while len(piece):
                    done = os.write(file, piece)
                    piece, size = piece[done:], size + done
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, while writing", str(path)) from error
    finally:
        os.close(file)
    return size


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


def sweep(directory: Path) -> None:
    """Remove leftovers of a killed run: directories that were not finished, or were being removed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((UNFINISHED, _REMOVED)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return True for the directory of one checkpoint, by its name, or by a manifest and no checkpoints inside."""
    return _NAME.fullmatch(path.name) is not None or ((path / MANIFEST).exists() and not checkpoints(path))


def checkpoints(directory: str | Path) -> list[Path]:
    """Return the checkpoints of a run's directory, oldest first, without checking that their files are intact.

    Raises:
        NotADirectoryError: the path is a file.

    >>> checkpoints("no such directory")
    []
    """
    directory = as_path("checkpoints(directory)", directory)
    return [path for _, _, path in listed(directory)] if directory.exists() else []


def listed(directory: Path) -> list[tuple[int, int, Path]]:
    """Return number, step and path of each checkpoint, oldest first."""
    found = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found)


def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint of a run's directory, or None. It is complete unless its files were changed later.

    Raises:
        NotADirectoryError: the path is a file.

    >>> latest("no such directory") is None
    True
    """
    return next(reversed(checkpoints(as_path("latest(directory)", directory))), None)


def best(directory: str | Path) -> Path | None:
    """Return the newest checkpoint with the lowest `score`; None if none has a score. Raises as `latest`."""
    scores = {path: _score(path) for path in reversed(checkpoints(as_path("best(directory)", directory)))}
    known = {path: score for path, score in scores.items() if score is not None}
    return min(known, key=known.__getitem__, default=None)


def next_name(directory: Path, step: int) -> str:
    """Return the name of the next checkpoint."""
    number = max((number for number, *_ in listed(directory)), default=0) + 1
    return f"checkpoint-{number:06}-step-{step}"


def encode_manifest(content: dict[str, Any]) -> bytes:
    """Encode a manifest with its own digest."""
    return _text(content | {"digest": hashlib.sha256(_text(content)).hexdigest()})


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointCorrupt: missing or changed.
        ValueError: written by a newer version of the library.
    """
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
        del content["digest"]
        is_intact = raw == encode_manifest(content)
    except OSError as error:
        raise corrupt(file, f"cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise corrupt(file, "its content does not have the digest that it names")
    if (number := content["format"]) > FORMAT:
        writer = content.get("versions", {}).get("decentfn", "of a newer version")
        raise ValueError(
            f"{file}: format {number}, written by decentfn {writer}; this version reads formats up to {FORMAT}: update "
            "decentfn."
        )
    if any(Path(process["file"]).name != process["file"] for process in content["processes"]):
        raise corrupt(file, "it names a file outside its directory")
    return content


def corrupt(file: Path, reason: str) -> CheckpointCorrupt:
    """Return the error for a file that differs from the manifest."""
    way_out = "restore(directory, state) reads the newest intact checkpoint of a run's directory"
    return CheckpointCorrupt(f"{file}: {reason}; {way_out}.")


def _score(path: Path) -> float | None:
    try:
        return read_manifest(path)["score"]
    except ValueError:
        return None


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode()
