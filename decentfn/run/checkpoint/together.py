"""What every process does at once, and all of them fail at where one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentfn import collectives
from decentfn.errors import CallMismatch, CheckpointCorrupt, NonFinite, PeerLost, RunError
from decentfn.run.paths import as_path

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, NonFinite, OSError, ValueError, RuntimeError)
}
"""The first that an error is of is what the others raise."""


def together(call: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every process; what each returned, by rank, as JSON gives it back. Collective.

    Raises:
        CheckpointCorrupt, NonFinite, OSError, ValueError, RuntimeError: on every process what the first has raised.
        RunError: on every process, where the first has raised anything else.
        CallMismatch: the processes are in different calls.
        PeerLost: a process is gone.
    """
    try:
        everyone, own = collectives.attempt(call, function, *arguments)
    except CallMismatch:
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"checkpoint: another process has died, or is later than the timeout of df.init ({error})",
            process=collectives.everyone().rank,
        ) from error
    for rank, its in enumerate(everyone):
        if "error" in its:
            if len(everyone) == 1 and own is not None:
                raise own
            kind = next((kind for name, kind in _KINDS.items() if name in its["kinds"]), None)
            if kind is None:
                raise RunError(f"{call}: rank {rank} has failed: {its['brief']}", peer=rank) from own
            raise kind(f"rank {rank}: {its['error']}") from own
    return [its["value"] for its in everyone]


def on_first(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` on process 0; what it returned, on every process. Collective; raises as `together`."""
    return together(call, function if collectives.everyone().rank == 0 else lambda *_: None, *arguments)[0]


def one_path(call: str, path: Any) -> Path:
    """The path that all processes give. Collective.

    Raises:
        ValueError: on every process, it is no path, or another one on one of them.
    """
    told = together(call, lambda: str(as_path(call, path)))
    for rank, its in enumerate(told):
        if its != told[0]:
            raise ValueError(
                f"{call}: the path is {its!r} on rank {rank} and {told[0]!r} on rank 0; give one that all of them see."
            )
    return Path(told[0])
