"""What every process does at once, and all of them fail at where one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decentfn import collectives
from decentfn.errors import CheckpointCorrupt, NonFinite, PeerLost

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, NonFinite, OSError, ValueError, RuntimeError)
}
"""The first that an error is of is what the others raise."""


def together(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every process; what each returned, by rank, as JSON gives it back. Collective.

    Raises:
        CheckpointCorrupt, NonFinite, OSError, ValueError, RuntimeError: on every process what the first has raised.
        PeerLost: a process is gone.
    """
    told, own = {}, None
    try:
        told["value"] = function(*arguments)
    except tuple(_KINDS.values()) as error:
        own = error
        told["kind"] = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
        told["error"] = str(error)
    try:
        everyone = collectives.gather_objects(told)
    except RuntimeError as error:
        raise PeerLost(
            f"checkpoint: another process has died, or is later than the timeout of df.init ({error})",
            process=collectives.world().rank,
        ) from error
    for rank, its in enumerate(everyone):
        if "error" in its:
            if len(everyone) == 1 and own is not None:
                raise own
            raise _KINDS[its["kind"]](f"rank {rank}: {its['error']}") from own
    return [its["value"] for its in everyone]


def on_first(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` on process 0; what it returned, on every process. Collective; raises as `together`."""
    return together(function if collectives.world().rank == 0 else lambda *_: None, *arguments)[0]
