"""Roll call after a loss, or for newcomers: who continues, and from which step.

A worker that notices a loss in generation g, or has heard that a newcomer waits, writes a note for generation g + 1,
once. Whoever has read enough notes proposes who continues; the store keeps the first proposal (compare and set), and
everyone obeys it. So a generation has one decision, and a worker that is not in it ends. What a worker does is a pure
function of the store's content (`act`): `tests/run/test_roll_call.py` goes through every order of messages, deaths and
wake-ups.

A step ends on a worker only when all workers of its generation have begun it (`df.survive` adds a sum to each step).
So workers are at most one step apart, and a worker that was left behind ends no further step.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from decentfn.elastic.liveness import Liveness

_Told = TypeVar("_Told")

POLL_S = 0.01


class Note(NamedTuple):
    """A worker's answer to the roll call."""

    seat: int
    step: int
    """Step that it has not ended; it has the state before it, and before the last one."""
    reaches: tuple[int, ...]
    """Seats whose processes accept its connections."""
    repeats: bool = False
    """True if it had ended that step in an earlier generation."""


class Decision(NamedTuple):
    """The next generation, the same for all."""

    seats: tuple[int, ...]
    """Workers that continue, ascending; newcomers last."""
    step: int
    """Step with which they continue: the first that one of them has not ended."""
    repeats: bool = False
    """True if another of them had ended it; its calls outside steps after it have failed."""


class Leave(NamedTuple):
    """The others have decided to continue without this worker."""


def from_json(kind: type[_Told], told: Sequence[Any]) -> _Told:
    """Return a note, a decision or members that were in JSON, which has lists for tuples."""
    return kind(*(tuple(x) if isinstance(x, list) else x for x in told))


def hold(
    mine: Note,
    seats: Sequence[int],
    board: Any,
    liveness: Liveness,
    newcomers: Callable[[], Collection[int]],
    patience: timedelta,
) -> Decision | None:
    """Return the decision of all, or None if they continue without this worker. `board`: the generation's store."""
    end, others = time.monotonic() + patience.total_seconds(), [seat for seat in seats if seat != mine.seat]
    while True:
        decided = from_json(Decision, json.loads(board.get("decision"))) if board.check(["decision"]) else None
        lines = board.get("notes").decode().splitlines() if board.check(["notes"]) else []
        notes = [from_json(Note, json.loads(line)) for line in lines]
        liveness.clear()
        gone = set(filter(liveness.is_gone, others))
        match act(mine, seats, notes, decided, gone, newcomers(), is_over=time.monotonic() > end):
            case Note() as note:
                board.append("notes", json.dumps(note) + "\n")
            case Decision() as decision:
                if decided is not None:
                    return decided
                board.compare_set("decision", "", json.dumps(decision))
            case Leave():
                return None
            case None:
                time.sleep(POLL_S)


def act(
    mine: Note,
    seats: Sequence[int],
    notes: Collection[Note],
    decided: Decision | None,
    gone: Collection[int],
    waiting: Collection[int] = (),
    *,
    is_over: bool,
) -> Note | Decision | Leave | None:
    """Return what a worker does next: write its note, propose a decision, obey one, leave, or wait (None).

    Args:
        mine: this worker's note.
        seats: workers of the generation that ends.
        notes: those in the store.
        decided: the decision in the store; if it is returned, the worker continues with it.
        gone: workers whose processes have ended.
        waiting: seats of the newcomers that wait to join.
        is_over: True if this worker waits for no more notes.
    """
    if decided is not None:
        return decided if mine.seat in decided.seats else Leave()
    if mine not in notes:
        return mine
    present = {note.seat: note for note in notes if note.seat not in gone}
    if not is_over and any(seat not in present and seat not in gone for seat in seats):
        return None
    left = _largest_part({seat: set(note.reaches) for seat, note in present.items()})
    step = min(present[seat].step for seat in left)
    repeats = any(present[seat].step > step or present[seat].repeats for seat in left)
    return Decision((*left, *sorted(waiting)), step, repeats)


def places_of(seats: Sequence[int], before: Mapping[int, int]) -> tuple[int, ...]:
    """Return the places of these seats: those that they had before; a newcomer takes the lowest that is free."""
    taken = {before[seat] for seat in seats if seat in before}
    free = (place for place in itertools.count() if place not in taken)
    return tuple(before[seat] if seat in before else next(free) for seat in seats)


def _largest_part(reaches: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Return workers that all reach one another: of parts without a link, the largest, or of equal ones the one with the
    lowest worker. Those with the most missing links are left out until none is missing: first those without a link to the
    lowest, the highest first.
    """
    links = {i: {j for j in reaches if j == i or (j in reaches[i] and i in reaches[j])} for i in reaches}
    part = set(links)
    while any(part - links[i] for i in part):
        part = part - {max(part, key=lambda i: (len(part - links[i]), i not in links[min(part)], i))}
    return tuple(sorted(part))
