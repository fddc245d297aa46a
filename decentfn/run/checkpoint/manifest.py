"""The manifest of a checkpoint, and the checkpoints in a run's directory.

    run/checkpoint-000002-step-100/manifest.json
                                   process-00000.safetensors
                                   process-00001.safetensors

The first number counts the checkpoints of the directory: the newest has the highest, whatever its step.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from decentfn.errors import CheckpointCorrupt
from decentfn.together import as_path

FORMAT = 2
"""Of a checkpoint of workers of several processes; that of workers of one is 1."""
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"

_FILE = re.compile(r"process-\d{5,}\.safetensors")
_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")


def is_checkpoint(path: Path) -> bool:
    """Return True if this is the directory of one checkpoint: by its name, or it has a manifest and no checkpoints."""
    return _NAME.fullmatch(path.name) is not None or ((path / MANIFEST).exists() and not saved(path))


def saved(directory: Path) -> list[Path]:
    """Return the checkpoints in a run's directory, oldest first."""
    if not directory.exists():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint in a run's directory, or None. It is complete, unless its files were changed later.

    Raises:
        NotADirectoryError: `directory` is a file.

    >>> latest("no such directory") is None
    True
    """
    return next(reversed(saved(as_path("latest(directory)", directory))), None)


def best(directory: str | Path) -> Path | None:
    """Return the checkpoint with the lowest `score` (of equal ones the newest), or None without one. Raises as `latest`."""
    scores = {path: _score(path) for path in reversed(saved(as_path("best(directory)", directory)))}
    return min((path for path in scores if scores[path] is not None), key=lambda path: scores[path] or 0, default=None)


def next_name(directory: Path, step: int) -> str:
    """Return the name of the next checkpoint."""
    newest = latest(directory)
    match = _NAME.fullmatch(newest.name) if newest else None
    return f"checkpoint-{int(match[1]) + 1 if match else 1:06}-step-{step}"


def encode(content: dict[str, Any]) -> bytes:
    """Return a manifest as a file, with its own digest."""
    return _text(content | {"digest": hashlib.sha256(_text(content)).hexdigest()})


def read(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointCorrupt: it is missing or changed, or names a file that is not the checkpoint's.
        ValueError: a newer version of the library has written it.
    """
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
        del content["digest"]
        is_whole = raw == encode(content)
    except OSError as error:
        raise corrupt(file, f"cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise corrupt(file, "its content does not have the digest that it names")
    if content["format"] > FORMAT:
        raise ValueError(
            f"{file}: format {content['format']}, written by decentfn {content['versions']['decentfn']}; this version reads formats "
            f"up to {FORMAT}: update decentfn."
        )
    for process in content["processes"]:
        if not _FILE.fullmatch(process["file"]):
            raise corrupt(file, f"it names {process['file']!r}, which is not a file of a checkpoint")
    return content


def corrupt(file: Path, reason: str) -> CheckpointCorrupt:
    """Return the error for a file that is not what the manifest says."""
    return CheckpointCorrupt(f"{file}: {reason}; restore an earlier checkpoint of the run's directory by its own path.")


def _score(path: Path) -> float | None:
    try:
        return read(path)["score"]
    except ValueError:
        return None


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()
