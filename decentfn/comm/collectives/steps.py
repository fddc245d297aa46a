"""Which calls of the operators this rank has made, and at which steps: compared with the others', and told to them in a failure."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_log = logging.getLogger("decentfn")

TAGS = 2**20
"""A message's tag is its step modulo this, so that messages of different steps never meet (NCCL knows no tags)."""

_EVERY = 256
"""Calls 1, 2, 4, 8, ... and every so many are compared."""

_KEPT = 64 * _EVERY
"""No rank is so many calls behind another: what was compared before is forgotten."""

_RECORDED = 64
"""The last calls of a rank, which are written down in a failure."""


class Part(NamedTuple):
    """A message from or to another process."""

    tensor: Tensor
    """What is sent, or where it is received."""
    own: Tensor | None
    """What replaces a lost message; None where it is sent."""
    rank: int | None
    """The other end; None where that is a group."""
    slot: int | None = None


@dataclass(eq=False)
class Call:
    """One call of an operator: what travels, between whom, and when. It holds tensors until it has landed."""

    what: str
    number: int
    """Of the calls since `init`, from 1."""
    step: int
    """In which it was called."""
    index: int
    """Which of its step's calls this is, from 1: a step makes the same ones in the same order, bucket by bucket."""
    local: int
    """Workers in this process."""
    hears: Any = ()
    """The worker in each slot that is heard, -1 for nobody; of `local` workers a row each. In a mean: the ranks of the group."""
    tells: Any = ()
    nbytes: int = 0
    posted: float = field(default_factory=time.time)
    arrived: float | None = None
    lost: str | None = None
    """Why it never arrived."""
    inbox: Any = None
    """What `wait` returns, `[L, ...]` of the L workers here."""
    parts: Sequence[Part] = ()
    works: list[Any] = field(default_factory=list)
    """The backend's, of each part or of all together."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("number", "step", "index", "what", "hears", "tells", "nbytes", "posted", "arrived", "lost")
        return {name: getattr(self, name) for name in names}


class Loss(NamedTuple):
    """The first failure of a call."""

    call: Call
    error: Exception
    peer: int | None = None
    """The rank at the other end, where there is one."""
    slot: int | None = None


class Note(NamedTuple):
    """What a rank whose call has failed tells the others."""

    rank: int
    calls: int
    changes: list[tuple[int, int]]
    """The calls in which its t changed, and to what."""
    peer: int | None
    """Whose message it waited for."""
    timed_out: bool
    outside: str | None = None
    """The call outside steps in which it waited."""


class Steps:
    """The steps at which this rank called the operators. How many calls there were agrees also where `t` does not.

    The ranks meet on a board: the first that comes with a call to be compared writes its step there, the others read it.
    Nobody waits for anybody.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0
        self.in_flight: dict[int, Call] = {}
        """The calls that nobody has waited for yet, by number."""
        self.record: deque[Call] = deque(maxlen=_RECORDED)
        self.is_running = False
        """Whether a step runs, at whose end a loss is raised."""
        self.at = 0
        """The step that runs, or ran last."""
        self.before = 0
        """Calls before that step."""
        self.tag = 0
        """That of the messages of this step."""
        self.lost: Loss | None = None
        self.cut_short: tuple[str, BaseException] | None = None
        """The step that raised after it had posted, or a call outside steps that lost another rank, and what it raised."""
        self.waits_since: float | None = None
        """When a thread began to wait for another rank, by `time.monotonic`; None: none waits."""
        self.board: Any = None
        """A store of torch.distributed, on which the ranks meet."""
        self._met = set[int]()  # the groups whose ranks are known to be in this step
        self._last = 0
        self._changes: deque[tuple[int, int]] = deque(maxlen=32)

    def begin(self, board: Any) -> None:
        """Count from here; all ranks at once, with a board on which nothing is written yet."""
        self.calls = self.before = 0
        self.board, self.lost, self.cut_short = board, None, None
        self.in_flight.clear()
        self._changes.clear()

    def enter(self, t: int) -> None:
        """A step begins.

        Raises:
            RuntimeError: an earlier one has been cut short; it names that.
        """
        if self.cut_short is not None:
            where, error = self.cut_short
            raise RuntimeError(
                f"step(state, batch, t): rank {self.rank} cannot go on, because its {where} raised "
                f"{type(error).__name__}: {error}; the other ranks have its messages and are ahead. Start the run again, on all ranks."
            ) from error
        self.is_running, self.at, self.before = True, t, self.calls
        self._met.clear()

    @property
    def is_whole(self) -> bool:
        """Whether all steps have ended with all of their messages."""
        return self.lost is None and self.cut_short is None

    def find_other(self, group: Any, ranks: Sequence[int], numbers: list[int], x: Tensor) -> list[int] | None:
        """Wait until all ranks of a group are in a step; return a rank with other numbers than these, and its numbers.

        A sum has no tag, and one that is larger elsewhere aborts the process. So this is done in a group's first call of a step,
        and in each outside steps; not in a group that moves `x` on GPUs alone.
        """
        is_new = not self.is_running or id(group) not in self._met
        self._met.add(id(group))
        if not is_new or not (x.device.type == "cpu" or "gloo" in str(dist.get_backend_config(group))):
            return None
        mine = torch.tensor(numbers)
        heard = mine.new_empty(len(ranks), len(numbers))
        group.allgather([list(heard)], [mine]).wait()
        for rank, theirs in zip(ranks, heard.tolist(), strict=True):
            if theirs != numbers:
                return [rank, *theirs]
        return None

    def call(self, what: str, t: Tensor, local: int = 1) -> tuple[Call, tuple[int, int] | None]:
        """Note that an operator is called; and another rank that made the same call at another step, with that step."""
        self.calls = calls = self.calls + 1
        step = self.at if self.is_running else int(t)
        if step != self._last or not self._changes:
            self._last, self.tag = step, step % TAGS
            self._changes.append((calls, step))
        call = Call(what, calls, step, calls - self.before, local)
        self.record.append(call)
        if self.board is None or (calls % _EVERY and calls & (calls - 1)):
            return call, None
        try:
            first = self.board.compare_set(f"call {calls}", "", f"{self.rank} {step}")
            if calls > _KEPT:
                self.board.delete_key(f"call {calls - _KEPT}")
        except RuntimeError as error:
            # The process that held it is done, or has died: then messages fail.
            _log.info("t is no longer compared between ranks: the store does not answer (%s)", error)
            self.board = None
            return call, None
        rank, other = map(int, first.split())
        return call, None if other == step else (rank, other)

    def tell(self, peer: int | None, *, timed_out: bool, outside: str | None = None) -> None:
        """Let the others know that a call of this rank has failed."""
        note = Note(self.rank, self.calls, list(self._changes), peer, timed_out, outside)
        try:
            if self.board is not None:
                self.board.append("failed", json.dumps(note) + "\n")
        except RuntimeError:
            self.board = None  # the store is gone as well: there is nobody to tell

    def told(self) -> dict[int, Note]:
        """What the others have told, by rank."""
        notes = {}
        try:
            if self.board is not None:
                for line in self.board.get("failed").decode().splitlines():
                    rank, calls, changes, *others = json.loads(line)
                    if rank != self.rank:
                        notes.setdefault(rank, Note(rank, calls, [(a, b) for a, b in changes], *others))
        except RuntimeError:
            self.board = None
        return notes

    def different(self, note: Note) -> tuple[int, int] | None:
        """This rank's step and the other's in the last call that both have made, where they differ."""
        common = min(self.calls, note.calls)
        mine, theirs = _step_of(common, self._changes), _step_of(common, note.changes)
        return None if mine is None or theirs is None or mine == theirs else (mine, theirs)


def _step_of(call: int, changes: Iterable[tuple[int, int]]) -> int | None:
    """T in that call; None if it was too long ago."""
    return max(((first, t) for first, t in changes if first <= call), default=(0, None))[1]
