"""Collective calls outside a step, in which an error of one process is an error of all; paths that all agree on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentfn.comm import collectives
from decentfn.core import brief, brief_error, require
from decentfn.errors import CheckpointCorrupt, NonFinite, RunError

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, NonFinite, OSError, ValueError, RuntimeError)
}
"""Kinds of errors that the other processes raise too; the first match counts."""


def on_all(call: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every process and return all results by rank, after a JSON round trip. Collective.

    Raises on every process the first error, in its kind (`_KINDS`) or as a RunError; one that is not merely the loss of
    another process comes first.
    """
    told: dict[str, Any] = {"call": call}
    own = None
    try:
        told["value"] = function(*arguments)
    except Exception as error:
        own = error
        told |= {"error": str(error), "brief": brief_error(error), "kinds": [k.__name__ for k in type(error).__mro__]}
    with collectives.calling(call):
        everyone = collectives.gather_objects(told, collectives.all_processes())
    failed = [rank for rank, its in enumerate(everyone) if "error" in its]
    if not failed:
        return [its["value"] for its in everyone]
    if len(everyone) == 1 and own is not None:
        raise own
    rank = min(failed, key=lambda rank: "PeerLost" in everyone[rank]["kinds"])
    its = everyone[rank]
    for name, kind in _KINDS.items():
        if name in its["kinds"]:
            raise kind(f"rank {rank}: {its['error']}") from own
    raise RunError(f"{call}: rank {rank} has failed: {its['brief']}", peer=rank) from own


def on_first(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(*arguments)` on process 0; return its result on all. Collective; raises as `on_all`."""
    return on_all(call, function if collectives.all_processes().rank == 0 else lambda *_: None, *arguments)[0]


def as_path(call: str, path: Any) -> Path:
    """Return the path, or raise ValueError if it is empty, which would be the working directory."""
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise ValueError(f"{call}: the path is {brief(path)}; expected a str that is not empty, or a pathlib.Path.")
    return Path(path)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory unless it exists."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path}: a file is where a directory is needed; give another path.") from error


def one_path(call: str, path: Any) -> Path:
    """Return the path if all processes pass the same, or raise ValueError on all. Collective."""
    told = on_all(call, lambda: str(as_path(call, path)))
    for rank, its in enumerate(told):
        rule = f"the path is {its!r} on rank {rank} and {told[0]!r} on rank 0; give one that all of them see."
        require(its == told[0], call, rule)
    return Path(told[0])
