"""Errors that name a failure: the worker, step, peer and slot of a lost message, and the cause."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from decentfn.comm.collectives.session import RUN, Call, FailureNote, Lost, places_named
from decentfn.comm.collectives.world import World
from decentfn.errors import ExchangeTimeout, PeerLost, RunError, StepMismatch

_PATIENCE_S = 3.0  # time that a rank with a failed message gives the others to fail, too, and to post their notes


def has_timed_out(error: BaseException) -> bool:
    """Return True if a backend's error is a timeout, not a broken connection."""
    return "imed out" in str(error) or "imeout" in str(error)


def is_peer_lost(error: Exception) -> bool:
    """Return True if an error, possibly from PyTorch's own collectives, means that another process is gone or late."""
    from_torch = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    return from_torch or isinstance(error, (ExchangeTimeout, PeerLost))


def step_mismatch(
    here: World, call: Call, mine: int, rank: int, theirs: int, number: int = 0, nbytes: int = 0
) -> StepMismatch:
    """Build the error for a rank at another place; or at the same one, but in another call or with a larger message."""
    more, [here_at, there_at] = "", places_named(mine, theirs)
    if mine == theirs:
        more = f" ({call.number} calls since init of {call.nbytes:,} bytes here, and {number} of {nbytes:,} there)"
    return StepMismatch(
        f"{call.what} {call.index} of the step on {_name(call, here.rank)}: rank {here.rank} is at {here_at}, rank {rank} "
        f"at {there_at}{more}; every rank must call the step with the same t, equally often, and those of several states in one order",
        worker=here.rank * call.local,
        process=here.rank,
        step=mine % RUN,
        peer=rank,
    )


def lost_message_error(here: World, lost: Lost, next_step: int | None = None) -> RunError:
    """Build the error for a lost message, with the others' notes; `next_step`: the next one for the user's state."""
    error = _named(here, lost)
    error.next_step = next_step
    said = f"{str(error).rstrip('.')}."
    if next_step is not None:
        has = "written over by the whole step" if next_step > lost.call.step else "unmodified"
        said += f" The state that was passed is intact ({has}), and t={next_step} is its next step."
    if here.hooks.failure_is_final:
        said += " No further step is taken: start the run again, on all processes."
    error.args = (said,)
    return error


def outside_error(here: World, call: str, error: RuntimeError, *, listens: bool) -> RunError:
    """Convert PyTorch's error to this library's, which states the failed call and, if it `listens`, the others' notes."""
    gossip = here.gossip
    # Those that this process waited for tell it: all, or all but one.
    notes = _heard(gossip, lambda notes: notes and len(notes) >= gossip.size - 2) if listens else {}
    silent = set(range(gossip.size)) - {gossip.rank} - notes.keys()
    gave_up = [rank for rank, note in sorted(notes.items()) if note.timed_out]
    blamed = silent or set(gave_up) or set(notes)
    # If a worker is several processes, notes are exchanged among those with the same index.
    peer = blamed.pop() if len(blamed) == 1 and here.processes_per_worker == 1 else None
    who = "a process" if peer is None else f"process {peer}"
    if has_timed_out(error):
        why = f"{who} exceeded the timeout of df.init ({here.channels.timeout})"
    elif gave_up:
        why = f"process {gossip.identity.processes[gave_up[0]]} gave up waiting"
    else:
        why = f"{who} exited"
    where = ", ".join(
        f"process {gossip.identity.processes[note.rank]} waited in {note.outside or f'its step t={note.steps[-1][1] % RUN}'}"
        for note in sorted(notes.values())
        if note.outside or note.steps
    )
    step = gossip.session.at if gossip.session.board.steps else None
    after = "" if step is None else f" after step t={step}"
    return (ExchangeTimeout if has_timed_out(error) or gave_up else PeerLost)(
        f"{call} failed on process {here.all_processes.rank}{after}; {why}{f' ({where})' if where else ''}: {error}",
        process=here.all_processes.rank,
        step=step,
        peer=peer,
    )


def _heard(here: World, is_enough: Callable[[dict[int, FailureNote]], object]) -> dict[int, FailureNote]:
    """Return the others' notes; wait for them briefly, until they are enough."""
    end = time.monotonic() + _PATIENCE_S * here.hooks.failure_is_final
    while (
        not is_enough(notes := here.session.board.notes())
        and here.session.board.store is not None
        and time.monotonic() < end
    ):
        time.sleep(0.02)
    return notes


def _named(here: World, lost: Lost) -> RunError:
    call, session, others = lost.call, here.session, set(range(here.size)) - {here.rank}

    def at_other_steps(notes: dict[int, FailureNote]) -> list[tuple[int, int, int]]:
        return [found for note in notes.values() if (found := session.different(note)) is not None]

    def are_all(notes: dict[int, FailureNote]) -> bool:  # but for broken connections: late ranks still may post notes
        broken = {note.peer for note in notes.values() if not note.timed_out}
        return others <= notes.keys() | broken | ({lost.peer} if not has_timed_out(lost.error) else set())

    notes = _heard(here, lambda notes: at_other_steps(notes) or are_all(notes))
    if different := at_other_steps(notes):
        return step_mismatch(here, call, *different[0])
    if isinstance(lost.error, StepMismatch):
        return lost.error
    peer, why = _blamed(here, lost, notes)
    if lost.peer is None:
        whom = f"over {', '.join(_name(call, rank) for rank in call.hears)}"
    else:
        whom = f"with {_name(call, lost.peer)}" + ("" if lost.slot is None else f" in slot {lost.slot}")
    is_late = has_timed_out(lost.error) or any(note.timed_out for note in notes.values())
    return (ExchangeTimeout if is_late else PeerLost)(
        f"step t={call.step} on {_name(call, here.rank)}: {call.what} {call.index} of the step ({call.nbytes:,} bytes) {whom} "
        f"failed; {why}: {brief_reason(lost.error)}",
        worker=here.rank * call.local,
        process=here.rank,
        step=call.step,
        peer=peer,
    )


def _blamed(here: World, lost: Lost, notes: dict[int, FailureNote]) -> tuple[int | None, str]:
    """Return the rank to blame, if known, and a sentence: in a chain of ranks that lost one another, the silent one."""
    for note in notes.values():
        if note.outside:
            who = _name(lost.call, note.rank)
            return note.rank, f"{who} is in the collective {note.outside}"
    call, told = lost.call, notes.get(lost.peer if lost.peer is not None else -1)
    # Ranks whose messages did not arrive and that posted no note.
    silent = {lost.peer, *(note.peer for note in notes.values())} - {None, here.rank} - notes.keys()
    if not silent and lost.peer is None:
        silent = set(call.hears) - {here.rank} - notes.keys()
    blamed = silent.pop() if len(silent) == 1 else lost.peer
    if has_timed_out(lost.error):
        late = "nobody" if blamed is None else _name(call, blamed)
        return blamed, f"nothing came within the timeout of df.init ({here.channels.timeout}); {late} is late or hangs"
    if told is not None and told.peer is not None:
        gave_up = "gave up waiting for" if told.timed_out else "has lost"
        whom = "this one" if told.peer == here.rank else _name(call, told.peer)
        return blamed, f"{_name(call, told.rank)} {gave_up} {whom}"
    is_late = any(note.timed_out for note in notes.values())
    who = "one of them" if blamed is None else _name(call, blamed)
    return blamed, f"{who} {'is late or hangs' if is_late else 'exited'}"


def brief_reason(error: Exception) -> str:
    """Return the first sentence of gloo's error, without the source location."""
    return re.sub(r"^\[\S*\] ", "", str(error)).split(". ")[0]


def _name(call: Call, rank: int) -> str:
    if call.local == 1:
        return f"worker {rank}"
    return f"process {rank} (workers {rank * call.local} to {(rank + 1) * call.local - 1})"
