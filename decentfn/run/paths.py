"""Paths as users give them, and directories for their owner alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decentfn.words import brief


def as_path(call: str, path: Any) -> Path:
    """The path.

    Raises:
        ValueError: it is no path, or an empty one, which would be the working directory.
    """
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise ValueError(f"{call}: the path is {brief(path)}; expected a str that is not empty, or a pathlib.Path.")
    return Path(path)


def require_no_file(path: Path) -> None:
    """A directory can be at the path.

    Raises:
        NotADirectoryError: a file is in its way.
    """
    for part in (path, *path.parents):
        if part.is_file():
            under = "" if part == path else f"{str(path)!r}: "
            raise NotADirectoryError(f"{under}{str(part)!r} is a file, where a directory is needed; give another path.")


def directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory; one that exists stays as it is. Raises as `require_no_file`."""
    require_no_file(path)
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def private_directory(path: Path) -> None:
    """Make a directory that only its owner can enter; one that exists stays as it is. Raises as `require_no_file`."""
    directory(path, 0o700)
