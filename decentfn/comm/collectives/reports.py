"""Reports of lost messages: worker, step, peer and slot, the cause, and the file with the last exchanges."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from pathlib import Path

from decentfn.comm.collectives.processes import World
from decentfn.comm.collectives.steps import Call, Lost, Note
from decentfn.errors import ExchangeTimeout, PeerLost, RunError, StepMismatch

FOLDER = "DECENTFN_FAILURES"
"""Environment variable that names the folder for the last exchanges of a failed rank."""

_PATIENCE_S = 3.0
"""Time that a rank with a failed message gives the others to fail, too, and to post their notes."""


def has_timed_out(error: BaseException) -> bool:
    """Return True if a backend's error is a timeout, not a broken connection."""
    return "imed out" in str(error) or "imeout" in str(error)


def is_lost(error: Exception) -> bool:
    """Return True if an error, possibly from PyTorch's own collectives, means that another process is gone or late."""
    from_torch = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    return from_torch or isinstance(error, (ExchangeTimeout, PeerLost))


def different_steps(
    here: World, call: Call, mine: int, rank: int, theirs: int, number: int = 0, nbytes: int = 0
) -> StepMismatch:
    """Build the error for a rank at another step; or at the same step, but in another call or with a larger message."""
    more = ""
    if mine == theirs:
        more = f" ({call.number} calls since init of {call.nbytes:,} bytes here, and {number} of {nbytes:,} there)"
    return StepMismatch(
        f"{call.what} {call.index} of the step on {_name(call, here.rank)}: rank {here.rank} is at t={mine}, rank {rank} "
        f"at t={theirs}{more}; every rank must call the step with the same t, equally often",
        worker=here.rank * call.local,
        process=here.rank,
        step=mine,
        peer=rank,
    )


def report(here: World, lost: Lost, next_step: int | None = None) -> RunError:
    """Build the error for a lost message, with the others' notes; `next_step`: the next one for the user's state."""
    error = _named(here, lost, *_listen(here, lost))
    error.next_step = next_step
    said = [str(error)]
    if next_step is not None:
        has = "has written over it" if next_step > lost.call.step else "has left as it was"
        said.append(f"The state that was passed is whole, that of t={next_step}, which the step {has}.")
    said.append("No further step is taken: start the run again, on all processes.")
    if path := _written(here, error):
        said.append(f"The last exchanges: {path}")
    error.args = (" ".join(f"{part.rstrip('.')}." for part in said[:-1]) + f" {said[-1]}",)
    return error


def told_outside(here: World) -> dict[int, Note]:
    """Wait briefly for the notes of the processes that this one waited for outside a step: of all, or all but one."""
    gossip = here.gossip
    end = time.monotonic() + _PATIENCE_S * (not gossip.steps.agrees)
    while True:
        notes = gossip.steps.told()
        has_heard = notes and len(notes) >= gossip.size - 2
        if has_heard or gossip.steps.board is None or time.monotonic() > end:
            return notes
        time.sleep(0.02)


def where_told(here: World, notes: dict[int, Note]) -> str:
    """Describe where the others have failed."""
    gossip = here.gossip
    where = [
        f"process {gossip.processes[note.rank]} waited in {note.outside or f'its step t={note.changes[-1][1]}'}"
        for note in sorted(notes.values())
        if note.outside or note.changes
    ]
    return f" ({', '.join(where)})" if where else ""


def _listen(here: World, lost: Lost) -> tuple[dict[int, Note], StepMismatch | None]:
    """Wait briefly for the others' notes; return them, and the error if one of them is at another step."""
    others, end = set(range(here.size)) - {here.rank}, time.monotonic() + _PATIENCE_S * (not here.steps.agrees)
    while True:
        notes = here.steps.told()
        for note in notes.values():
            if (steps := here.steps.different(note)) is not None:
                return notes, different_steps(here, lost.call, steps[0], note.rank, steps[1])
        if others <= notes.keys() | _dead(lost, notes) or time.monotonic() > end:
            return notes, None
        time.sleep(0.02)


def _dead(lost: Lost, notes: dict[int, Note]) -> set[int | None]:
    """Return the ranks with broken connections: they post no more notes, while late ones still may."""
    broken = {note.peer for note in notes.values() if not note.timed_out}
    return broken if has_timed_out(lost.error) else broken | {lost.peer}


def _named(here: World, lost: Lost, notes: dict[int, Note], mismatch: StepMismatch | None) -> RunError:
    call = lost.call
    if mismatch is not None or isinstance(lost.error, StepMismatch):
        return mismatch or lost.error  # pyright: ignore[reportReturnType]
    peer, why = _blamed(here, lost, notes)
    if lost.peer is None:
        whom = f"over {', '.join(_name(call, rank) for rank in call.hears)}"
    else:
        whom = f"with {_name(call, lost.peer)}" + ("" if lost.slot is None else f" in slot {lost.slot}")
    is_late = has_timed_out(lost.error) or any(note.timed_out for note in notes.values())
    return (ExchangeTimeout if is_late else PeerLost)(
        f"step t={call.step} on {_name(call, here.rank)}: {call.what} {call.index} of the step ({call.nbytes:,} bytes) {whom} "
        f"failed; {why}: {_brief(lost.error)}",
        worker=here.rank * call.local,
        process=here.rank,
        step=call.step,
        peer=peer,
    )


def _blamed(here: World, lost: Lost, notes: dict[int, Note]) -> tuple[int | None, str]:
    """Return the rank to blame, if known, and a sentence: in a chain of ranks that lost one another, the silent one."""
    for note in notes.values():
        if note.outside:
            return (
                note.rank,
                f"{_name(lost.call, note.rank)} waited in {note.outside}, which all processes call together",
            )
    call, told = lost.call, notes.get(lost.peer if lost.peer is not None else -1)
    # Ranks whose messages did not arrive and that posted no note.
    silent = {lost.peer, *(note.peer for note in notes.values())} - {None, here.rank} - notes.keys()
    if not silent and lost.peer is None:
        silent = set(call.hears) - {here.rank} - notes.keys()
    blamed = silent.pop() if len(silent) == 1 else lost.peer
    if has_timed_out(lost.error):
        whose = "nobody" if lost.peer is None else _name(call, lost.peer)
        late = whose if blamed is None or blamed == lost.peer else _name(call, blamed)
        return blamed, f"nothing came within the timeout of df.init ({here.timeout}); {late} is late, or hangs"
    if told is not None and told.peer is not None:
        gave_up = "gave up waiting for" if told.timed_out else "has lost"
        whom = "this one" if told.peer == here.rank else _name(call, told.peer)
        return blamed, f"{_name(call, told.rank)} {gave_up} {whom}"
    is_late = any(note.timed_out for note in notes.values())
    who = "one of them" if blamed is None else _name(call, blamed)
    return blamed, f"{who} {'is late, or hangs' if is_late else 'has died, or has left'}"


def _brief(error: Exception) -> str:
    """Return the first sentence of gloo's error, without the source location."""
    return re.sub(r"^\[\S*\] ", "", str(error)).split(". ")[0]


def _name(call: Call, rank: int) -> str:
    if call.local == 1:
        return f"worker {rank}"
    return f"process {rank} (workers {rank * call.local} to {(rank + 1) * call.local - 1})"


def _written(here: World, error: RunError) -> Path | None:
    """Write the last exchanges of this rank to a file; return its path, or None if it cannot be written."""
    kept = {name: getattr(error, name) for name in ("worker", "process", "step", "peer", "next_step")}
    content = {
        "error": {"type": type(error).__name__, "message": str(error), **kept},
        "host": platform.node(),
        "time": time.time(),
        "exchanges": [call.as_dict() for call in here.steps.record],
    }
    try:
        folder = Path(os.environ.get(FOLDER) or _cache() / "failures")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-process{here.rank}-{os.getpid()}.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
    except (OSError, RuntimeError):  # no space, no permission, no home directory
        return None
    return path


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "decentfn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
