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


def private_directory(path: Path) -> None:
    """Make a directory that only its owner can enter; one that exists stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
