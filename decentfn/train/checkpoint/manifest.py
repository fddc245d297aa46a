"""Manifests of checkpoints, and the list of checkpoints in a run's directory.

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
from decentfn.train.collective_calls import as_path

FORMAT = 3
"""Newest format: 3 with frozen buffers left out, 2 with several processes per worker, otherwise 1."""
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"

_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")


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


def encode(content: dict[str, Any]) -> bytes:
    """Encode a manifest with its own digest."""
    return _text(content | {"digest": hashlib.sha256(_text(content)).hexdigest()})


def read(path: Path) -> dict[str, Any]:
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
        is_intact = raw == encode(content)
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
        return read(path)["score"]
    except ValueError:
        return None


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode()
