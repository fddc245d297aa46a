"""Session: the steps of this process with the same others, and what they compare on a board in the store.

The ranks compare `t` in four ways, each for what the others do not see:

* A message's tag: gloo never takes a message of another step for this one's, at no cost.
* The board: sums, and NCCL's messages, have no tag. No rank waits for another, and the rank that differs is named.
* An allgather before what a worker's processes compute together (`Board.other_in_group`): they wait for one another
  anyway, and all of them raise.
* The header of a call outside steps (`outside`), with its name and size.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from decentfn.core import log

TAGS = 2**31 - 1
"""Modulus of tags: a message's tag is its step's place modulo this, so that steps do not mix (NCCL has no tags)."""

RUN = 2**50
"""Distance of two runs: the place of a step, which ranks compare, is t + RUN times its state's `Plan.run`. Tags: 2^19 apart."""

_EVERY = 256  # interval of compared calls, besides calls 1, 2, 4, 8, ...

_KEPT = 64 * _EVERY  # number of calls for which a comparison is kept; no rank is that far behind


class Part(NamedTuple):
    """A message from or to another process."""

    tensor: Tensor  # tensor to send, or to receive into
    own: Tensor | None  # replacement for a lost message; None for an outgoing one
    rank: int | None  # rank of the other end; None for a group
    slot: int | None = None


@dataclass(eq=False)
class Call:
    """One call of an operator: its messages, peers and times. It holds tensors until it has landed."""

    what: str
    number: int  # number of the call since `init`, from 1
    step: int  # step of the call
    place: int  # the step among those of all runs
    index: int  # index within the step, from 1: every step makes the same calls in the same order, bucket by bucket
    local: int  # workers in this process
    hears: Any = ()
    """Sender in each slot, -1 for none, one row per local worker. In a mean: the ranks of the group."""
    nbytes: int = 0
    lost: str | None = None  # reason that it never arrived
    memory: int = 0  # address of what is sent, which the step keeps until `wait`
    inbox: Any = None  # result of `wait`, `[L, ...]` for the L workers here
    parts: Sequence[Part] = ()
    works: list[Any] = field(default_factory=list)  # the backend's works, one per part or one for all


class Lost(NamedTuple):
    """A lost message: the first failure of a call."""

    call: Call
    error: Exception
    peer: int | None = None  # rank at the other end, if there is one
    slot: int | None = None
    until: float = 0.0  # when the messages that remain are given up


class FailureNote(NamedTuple):
    """Note from a rank with a failed call to the others."""

    rank: int
    calls: int
    steps: list[tuple[int, int]]  # for each of its last steps, the number of calls before it, and its place
    peer: int | None  # rank that it waited for
    timed_out: bool
    outside: str | None = None  # call outside steps in which it waited


class Session:
    """Steps of this process with the same others. The number of calls agrees between ranks even if `t` does not."""

    def __init__(self, rank: int, store: Any = None) -> None:
        self.board = Board(rank, store)
        self.calls = 0
        self.in_flight: dict[int, Call] = {}  # calls without a wait so far, by number
        self.is_running = False  # True while a step runs; a loss is raised at its end
        self.is_own_step = False
        """True if the running step, or the last one, took mail: it cannot be repeated, and ranks do not compare its t."""
        self.rounds: dict[tuple[int, int], Any] = {}  # rounds of the running step that were found (`lookup.FoundRound`)
        self.at = 0  # running step, or the last one
        self.place = 0  # its place
        self.before = 0  # number of calls before that step
        self.gradient_of: tuple[int, str] = 0, "of all"
        """What the step's last gradient was taken of: a number that a worker's processes compare, and words."""
        self.lost: Lost | None = None
        self.cut_short: tuple[str, BaseException] | None = None
        """Interrupted step (raised after a post) or call outside steps (lost a rank), with its error."""

    def enter(self, t: int, run: int = 0) -> None:
        """Begin a step; raise RuntimeError if an earlier one was cut short."""
        if self.cut_short is not None:
            where, error = self.cut_short
            others = "the other ranks have its messages and are ahead"
            lost = "the mail that it took is gone" if self.is_own_step else others
            raise RuntimeError(
                f"step(state, batch, t): rank {self.board.rank} cannot go on, because its {where} raised "
                f"{type(error).__name__}: {error}; {lost}. Start the run again, on all ranks."
            ) from error
        self.is_running, self.at, self.place, self.before = True, t, t + RUN * run, self.calls
        self.board.steps.append((self.calls, self.place))
        self.is_own_step = False
        self.board.met.clear()

    def note_gradient(self, mark: int, words: str, group: Any) -> None:
        """Note what the step's gradient was taken of; the ranks of this group compare it with their next sum."""
        self.gradient_of = mark, words
        self.board.met.discard(id(group))

    def leave(self) -> None:
        """End a step."""
        self.is_running = False

    def cut(self, where: str, error: BaseException) -> None:
        """Refuse further steps, since this one, or this call outside steps, has raised."""
        self.cut_short = where, error

    def lose(self, lost: Lost, *, timed_out: bool) -> None:
        """Record the first lost message, and notify the others."""
        self.lost = lost
        self.note_failure(lost.peer, timed_out=timed_out)

    def note_failure(self, peer: int | None, *, timed_out: bool, outside: str | None = None) -> None:
        """Notify the others that a call of this rank has failed, in which it waited for this peer."""
        self.board.write(FailureNote(self.board.rank, self.calls, list(self.board.steps), peer, timed_out, outside))

    def different(self, note: FailureNote) -> tuple[int, int, int] | None:
        """Return this rank's place in the last common call, the other rank, and its place; None if they agree."""
        common = min(self.calls, note.calls)
        mine, theirs = (
            next((place for before, place in reversed(steps) if before < common), None)
            for steps in (self.board.steps, note.steps)
        )
        return None if mine is None or theirs is None or mine == theirs else (mine, note.rank, theirs)

    @property
    def is_whole(self) -> bool:
        """Return True if all steps have ended with all of their messages."""
        return self.lost is None and self.cut_short is None

    def call(self, what: str, t: int, local: int = 1) -> tuple[Call, tuple[int, int] | None]:
        """Record an operator's call; return it and, if another rank was at another step, that rank and step."""
        self.calls = calls = self.calls + 1
        place = self.place if self.is_running else t
        call = Call(what, calls, place % RUN, place, calls - self.before, local)
        is_compared = calls % _EVERY == 0 or calls & (calls - 1) == 0
        return call, self.board.other(calls, place) if is_compared else None


def places_named(*places: int) -> list[str]:
    """Return the names of two places in an error; states are counted by `init`."""
    are_several = len({place // RUN for place in places}) > 1
    return [f"t={place % RUN}" + f" of the state of init {place // RUN}" * are_several for place in places]


class Board:
    """Part of the store where the ranks of a session compare their steps, and leave notes about failures."""

    def __init__(self, rank: int, store: Any = None) -> None:
        self.rank = rank
        self.store = store  # store of torch.distributed; None: there is none, or it no longer answers
        self.steps: deque[tuple[int, int]] = deque(maxlen=32)
        """The last steps, which the session notes, as `FailureNote.steps`."""
        self.met = set[int]()
        """Groups whose ranks are known to be in this step; the session forgets them when the next one begins."""
        self._means = dict[str, str]()  # of each group, what its last compared call left on the board

    def other(self, calls: int, place: int) -> tuple[int, int] | None:
        """Return a rank that made this call at another place, and that place."""
        if self.store is None:
            return None
        try:
            first = self.store.compare_set(f"call {calls}", "", f"{self.rank} {place}")
            if calls > _KEPT:
                self.store.delete_key(f"call {calls - _KEPT}")
        except RuntimeError as error:
            return self._lose(error)
        rank, other = map(int, first.split())
        return None if other == place else (rank, other)

    def other_in_group(self, group: Any, ranks: Sequence[int], numbers: list[int], x: Tensor) -> list[int] | None:
        """Wait for all ranks of a group; return one whose numbers differ, and its numbers (`_is_compared`)."""
        if not self._is_compared(group, x, in_step=True):
            return None
        mine = torch.tensor(numbers)
        heard = mine.new_empty(len(ranks), len(numbers))
        group.allgather([list(heard)], [mine]).wait()
        for rank, theirs in zip(ranks, heard.tolist(), strict=True):
            if theirs != numbers:
                return [rank, *theirs]
        return None

    def other_on_board(
        self, group: Any, ranks: Sequence[int], numbers: list[int], x: Tensor, in_step: bool
    ) -> list[int] | None:
        """Return a rank of a group whose numbers on the board differ, and its numbers; nobody waits."""
        if self.store is None or not self._is_compared(group, x, in_step):
            return None
        name = f"mean over {list(ranks)}"
        last = self._means.get(name, "")
        own = " ".join(map(str, [int((last or "0").split()[0]) + 1, self.rank, *numbers]))
        try:
            self._means[name] = self.store.compare_set(name, last, own).decode()
        except RuntimeError as error:
            return self._lose(error)
        _, rank, *theirs = map(int, self._means[name].split())
        return None if theirs == numbers else [rank, *theirs]

    def _is_compared(self, group: Any, x: Tensor, in_step: bool) -> bool:
        """Return True in a group's first call of a step, and in all outside: a larger sum aborts others."""
        is_new = not in_step or id(group) not in self.met
        self.met.add(id(group))
        if not is_new or x.device.type == "cpu":
            return is_new
        return isinstance(group, dist.ProcessGroupGloo) or "gloo" in str(dist.get_backend_config(group))

    def _lose(self, error: RuntimeError) -> None:
        """Go on without a board: the store's process has finished or died; messages will fail."""
        log.info("t is no longer compared between ranks: the store does not answer (%s)", error)
        self.store = None

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the store's answer; None without a store that answers."""
        try:
            return None if self.store is None else question(self.store)
        except RuntimeError as error:
            return self._lose(error)

    def write(self, note: FailureNote) -> None:
        """Leave a note about a failed call."""
        self._ask(lambda store: store.append("failed", json.dumps(note) + "\n"))

    def has_failed(self) -> bool:
        """Return True if a call of any rank has failed."""
        return bool(self._ask(lambda store: store.check(["failed"])))

    def notes(self) -> dict[int, FailureNote]:
        """Return the others' first notes, by rank."""
        lines = (self._ask(lambda store: store.get("failed")) or b"").decode().splitlines()
        notes = [FailureNote(*json.loads(line)) for line in reversed(lines)]
        return {note.rank: note for note in notes if note.rank != self.rank}
