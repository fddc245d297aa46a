"""Preemption: a signal to one process, and all of them stop after the same step."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from uuid import uuid4

from torch import Tensor

from decentfn import collectives
from decentfn.errors import ExchangeTimeout, PeerLost
from decentfn.run.paths import as_path, private_directory
from decentfn.words import brief

_log = logging.getLogger("decentfn")

_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if name in signal.Signals.__members__]

_SAME_S = 1.0
"""A signal that comes twice within so many seconds counts once: SLURM sends it to all processes, and torchrun passes it on."""

_GRACE_S = 20.0
"""So long a process that has a signal waits for the others to come to where it is; torchrun kills it after 30 s."""

_SHIELDED = {*_SIGNALS, signal.SIGINT}

_POLL_S = 0.01
_FLAG = 2**32
"""What a process that has a signal adds to the count of those that have come."""


class Stop:
    """Whether all processes stop now: `stop(t)`, after every step. Made by `preemption`."""

    def __init__(self, marker: Path, every: int) -> None:
        self._marker, self._every = marker, every
        self._here = collectives.everyone()
        self._board = collectives.fresh_board(self._here) if self._here.size > 1 else None
        self._process = os.getpid()
        self._received: dict[int, float] = {}  # signal -> when it first came
        self._calls = self._next_step = 0
        self._leaving: SystemExit | None = None

    def __call__(self, t: int | Tensor) -> bool:
        """Whether to stop after step `t`; the same on all processes. Collective: every process asks after every step.

        Where processes are several, they look every `every` calls. There each leaves a note in the store, and reads what
        all of them noted the time before, so nobody waits unless another is `every` steps behind.

        Raises:
            df.errors.PeerLost: another process has left the `with` by an error.
            df.errors.ExchangeTimeout: another did not come in time.
        """
        self._next_step = int(t) + 1
        self._calls += 1
        if self._board is None:
            stops = bool(self._received)
        elif self._calls % self._every:
            return False
        else:
            stops = self._calls > self._every and self._noted(f"call {self._calls - self._every}") > 0
            self._note(f"call {self._calls}")
            if self._here.rank == 0:  # everyone has read what was noted two times before
                self._board.delete_key(f"call {self._calls - 2 * self._every}")
        if stops:
            names = (
                ", ".join(signal.Signals(number).name for number in self._received) or "another process has a signal"
            )
            _log.info("all processes stop after step %d: %s", int(t), names)
        return stops

    def leave(self) -> NoReturn:
        """Raise `SystemExit(0)`. At the end of the `with`, when every process has come there, the marker is written."""
        self._leaving = SystemExit(0)
        raise self._leaving

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process or now - self._received.setdefault(number, now) > _SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _end(self, error: BaseException) -> None:
        """The `with` is left by `error`: to leave, or else the others must not wait for this process."""
        if error is not self._leaving:
            if self._board is not None:
                with suppress(RuntimeError):  # the store is gone as well: nobody waits
                    self._board.set("failed", str(self._here.rank))
            return
        if self._board is not None:
            self._note("left")
            self._noted("left", is_hasty=False)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # Several nodes may write it, in one directory that all of them see.
            new = self._marker.with_name(f"{self._marker.name}.{uuid4().hex[:8]}")
            new.write_text(json.dumps({"step": self._next_step}) + "\n")
            new.replace(self._marker)

    def _note(self, key: str) -> None:
        assert self._board is not None
        self._board.add(key, 1 + (_FLAG if self._received else 0))

    def _noted(self, key: str, is_hasty: bool = True) -> int:
        """How many had a signal when they noted `key`; waits until all have."""
        assert self._board is not None
        rank, size, begin = self._here.rank, self._here.size, time.monotonic()
        patience = 600.0 if self._here.timeout is None else self._here.timeout.total_seconds()
        while True:
            flags, count = divmod(self._board.add(key, 0), _FLAG)
            if count == size:
                return flags
            where = f"process {rank} after step {self._next_step - 1}"
            if self._board.check(["failed"]):
                peer = int(self._board.get("failed"))
                raise PeerLost(
                    f"stop(t): {where}: process {peer} has failed.", process=rank, step=self._next_step - 1, peer=peer
                )
            hurry = is_hasty and self._received
            end = max(begin, *self._received.values()) + _GRACE_S if hurry else begin + patience
            if time.monotonic() > end:
                raise ExchangeTimeout(
                    f"stop(t): {where} waited {time.monotonic() - begin:.0f} s for {size - count} of {size} processes, which have "
                    "died, or are slower; every process asks stop(t) after every step.",
                    process=rank,
                    step=self._next_step - 1,
                )
            time.sleep(_POLL_S)


def _shield_a_fork() -> None:
    """Within the `with`, a fork (a data loader's worker) hears signals from its parent alone.

    torchrun signals the whole group of a process, and a loader whose worker is gone ends the run before it can save.
    """
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is Stop._receive:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # Python's handlers would wait for the main thread
        threading.Thread(target=_hear_the_parent, daemon=True).start()


def _hear_the_parent() -> None:
    while (heard := signal.sigwaitinfo(_SHIELDED)).si_pid != os.getppid():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
    os.kill(os.getpid(), heard.si_signo)


if hasattr(signal, "sigwaitinfo"):  # not on macOS
    os.register_at_fork(after_in_child=_shield_a_fork)


@contextmanager
def preemption(marker: str | Path, *, every: int = 10) -> Iterator[Stop]:
    """Let SIGTERM and SIGUSR1, sent to any process, stop all of them after the same step. A context manager; collective.

    In a training loop::

        with df.preemption("runs/a/preempted.json") as stop, df.checkpoint.Saver("runs/a") as saver:
            for t, batch in enumerate(batches):
                state, metrics = decent_step(state, batch, t)
                if stop(t):
                    saver.save(state, t + 1)
                    stop.leave()

    Processes leave with exit code 0, since torchrun takes any other for a failure and starts them again. What tells such a run
    from a finished one is the marker, `{"step": 41}`: it is written when all have left what stands inside the `with`, such as the
    saver, and removed when the next run begins. The same signal again, after a second, ends a process at once. When the `with`
    ends, the handlers from before are back. Worker processes that a DataLoader forks within the `with` go on until it ends, though
    torchrun signals them too (Linux).

    Args:
        marker: the file to write, by one process of each node; its directory is made, for its owner only.
        every: so many steps apart processes look, >= 1: they stop at most `2 * every` steps after the signal. To look costs
            three short messages to the store; one process alone looks at every step.

    Yields:
        `stop`: `stop(t)` says whether to stop, `stop.leave()` leaves.

    Raises:
        ValueError: `every` is no positive integer; or this is not the main thread, which alone receives signals.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"preemption(every={brief(every)}): an integer >= 1, the number of steps between two looks.")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("preemption(marker): Python hands signals to the main thread; enter the `with` there.")
    marker = as_path("preemption(marker)", marker)
    if marker.is_dir():
        raise ValueError(f"preemption(marker={str(marker)!r}): that is a directory; the marker is a file in it.")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        private_directory(marker.parent)
        marker.unlink(missing_ok=True)
    stop = Stop(marker, every)
    before: dict[int, Any] = {number: signal.signal(number, stop._receive) for number in _SIGNALS}
    try:
        yield stop
    except BaseException as error:
        stop._end(error)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
