"""Are all ranks at the same step? Compared in some calls of the operators, and told to the others where one fails."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

_log = logging.getLogger("decentfn")

_TAGS = 2**20
"""A message's tag is its step modulo this, so that messages of different steps never meet (NCCL knows no tags)."""

_EVERY = 256
"""Calls 1, 2, 4, 8, ... and every so many are compared."""

_KEPT = 64 * _EVERY
"""No rank is so many calls behind another: what was compared before is forgotten."""

_PATIENCE = 1.0
"""Seconds that a rank whose message has failed gives the others to fail, too, and to tell their steps."""


class Steps:
    """The steps at which this rank called the operators. How many calls there were agrees also where `t` does not.

    The ranks meet on a board: the first that comes with a call to be compared writes its step there, the others read it.
    Nobody waits for anybody.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls = 0
        self.cut_short: tuple[int, BaseException] | None = None
        """The step that raised after it had posted, and what it raised."""
        self._last = 0
        self._changes: deque[tuple[int, int]] = deque(maxlen=32)  # the calls in which t changed, and to what
        self._board: Any = None  # a store of torch.distributed

    def begin(self, board: Any) -> None:
        """Count from here; all ranks at once, with a board on which nothing is written yet."""
        self.calls, self._board, self.cut_short = 0, board, None
        self._changes.clear()

    def require_whole(self) -> None:
        """No step has been cut short.

        Raises:
            RuntimeError: one has, which names it.
        """
        if self.cut_short is not None:
            t, error = self.cut_short
            raise RuntimeError(
                f"step(state, batch, t): rank {self.rank} cannot go on, because its step t={t} raised "
                f"{type(error).__name__}: {error}; the other ranks have its messages and are ahead. Start the run again, on all ranks."
            ) from error

    def count(self, t: Tensor) -> int:
        """Note that an operator is called; `t` as a number.

        Raises:
            RuntimeError: another rank made the same call at another step.
        """
        self.calls = calls = self.calls + 1
        step = int(t)
        if step != self._last or not self._changes:
            self._last = step
            self._changes.append((calls, step))
        if self._board is not None and (calls % _EVERY == 0 or calls & (calls - 1) == 0):
            self._compare(self._board)
        return step

    @property
    def tag(self) -> int:
        """That of the messages of this call."""
        return self._last % _TAGS

    def failure(self, what: str, error: Exception) -> RuntimeError:
        """What to raise where `what` has failed; tells the others this rank's steps, and asks for theirs."""
        why = "a peer has died, or is later than the timeout of df.init"
        for rank, (calls, changes) in self._failed_elsewhere().items():
            common = min(self.calls, calls)
            mine, theirs = _step_of(common, self._changes), _step_of(common, changes)
            if mine is not None and theirs is not None and mine != theirs:
                why = self._different(mine, rank, theirs)
        return RuntimeError(f"{what} failed; {why}: {error}")

    def _compare(self, board: Any) -> None:
        try:
            first = board.compare_set(f"call {self.calls}", "", f"{self.rank} {self._last}")
            if self.calls > _KEPT:
                board.delete_key(f"call {self.calls - _KEPT}")
        except RuntimeError as error:
            # The process that held it is done, or has died: then messages fail.
            _log.info("t is no longer compared between ranks: the store does not answer (%s)", error)
            self._board = None
            return
        rank, step = map(int, first.split())
        if step != self._last:
            self._tell(board)
            raise RuntimeError(self._different(self._last, rank, step))

    def _tell(self, board: Any) -> None:
        numbers = (self.rank, self.calls, *(number for change in self._changes for number in change))
        board.append("failed", " ".join(map(str, numbers)) + ";")

    def _failed_elsewhere(self) -> dict[int, tuple[int, list[tuple[int, int]]]]:
        """Rank -> its number of calls, and when its t changed: of all ranks that have failed, or soon do."""
        told = {}
        end = time.monotonic() + _PATIENCE
        try:
            if self._board is not None:
                self._tell(self._board)
                while len(told) < self.size - 1 and time.monotonic() < end:
                    time.sleep(0.05)
                    for note in self._board.get("failed").decode().split(";")[:-1]:
                        rank, calls, *changes = map(int, note.split())
                        if rank != self.rank:
                            told[rank] = (calls, list(zip(changes[::2], changes[1::2], strict=True)))
        except RuntimeError:
            pass  # the store is gone as well: there is nobody to ask
        return told

    def _different(self, mine: int, rank: int, theirs: int) -> str:
        here = f"rank {self.rank} is at t={mine}, rank {rank} at t={theirs}"
        return f"{here}; every rank must call the step with the same t"


def _step_of(call: int, changes: Iterable[tuple[int, int]]) -> int | None:
    """T in that call; None if it was too long ago."""
    return max(((first, t) for first, t in changes if first <= call), default=(0, None))[1]


class Call(NamedTuple):
    """One call of an operator, while its messages are on their way."""

    steps: Steps
    what: str
    ranks: Iterable[int]

    def failed(self, error: Exception) -> RuntimeError:
        """What to raise where a message has failed."""
        me = self.steps.rank
        return self.steps.failure(f"{self.what} of rank {me} with ranks {sorted({*self.ranks} - {me})}", error)
