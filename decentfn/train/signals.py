"""End of a process: preemption, after which all stop after the same step; the error that torchrun reports; a lost agent."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.utils.data import get_worker_info

from decentfn.comm import collectives
from decentfn.core import at_least, log
from decentfn.errors import ExchangeTimeout, PeerLost, RunError
from decentfn.train.checkpoint import files
from decentfn.train.collective_calls import as_path, make_directory

_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if name in signal.Signals.__members__]

_SAME_S = 1.0
"""Seconds within which a repeated signal counts once: SLURM signals all processes, and torchrun forwards it."""

_SHIELDED = {*_SIGNALS, signal.SIGINT}
_PAUSE_S = 1.0
_PR_SET_PDEATHSIG = 1


class Stop(AbstractContextManager["Stop", None]):
    """Common decision of all processes to stop: call `stop(t)` after every step. Made by `preemption`."""

    def __init__(self, marker: Path, every: int) -> None:
        self._marker = marker
        self._most = every
        self._thread = ThreadPoolExecutor(1, "decentfn preemption")
        self._process = os.getpid()
        self._received: dict[int, float] = {}  # signal -> when it first came
        self._next_step = 0
        self._leaving: SystemExit | None = None
        self._before: dict[int, Any] = {}  # handlers of the signals

    def __enter__(self) -> Stop:
        self._connect()
        self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def _connect(self) -> None:
        """Connect the thread with the other processes'; collective."""
        here = collectives.all_processes()
        self._changes, self._world = here.hooks.changes, here.apart()
        self._every = self._most if here.size > 1 else 1
        self._asked: Future[list[bool]] | None = None
        with collectives.calling("df.preemption(marker)"):  # connects it, so that `hang_up` ends what waits
            collectives.gather_objects(None, self._world)

    def __call__(self, t: int | Tensor) -> bool:
        """Return True to stop after step `t`, the same on all processes. Collective, in every step.

        Every `every` steps, processes start to gather who has a signal and read the previous result. So no process
        waits unless another is `every` steps behind. With `df.survive` it follows the workers that are left.

        Raises:
            df.errors.PeerLost: without `df.survive`, another process died, or left the `with` by an error.
            df.errors.ExchangeTimeout: without `df.survive`, another did not arrive in time.
        """
        self._next_step = int(t) + 1
        try:
            stops = self._hears()
        except RunError as error:
            if collectives.all_processes().hooks.failure_is_final:
                raise
            log.warning("stop(t=%d): %s; not answered until the workers have agreed on who is left", int(t), error)
            stops = False
        if stops:
            names = ", ".join(signal.Signals(number).name for number in self._received)
            log.info("all processes stop after step %d: %s", int(t), names or "another process has a signal")
        return stops

    def _hears(self) -> bool:
        """Return True if a process has a signal; in a step with a check, which all have in common."""
        here = collectives.all_processes()
        if self._changes != here.hooks.changes:
            here.hooks.before_call("stop(t)")
            self._world.let_go()
            self._connect()
        if self._next_step % self._every:
            return False
        if self._world.size == 1:
            return bool(self._received)
        stops = self._asked is not None and any(self._asked.result())
        self._asked = self._ask(bool(self._received))
        return stops

    def leave(self) -> NoReturn:
        """Raise `SystemExit(0)`. The marker is written when all processes have reached the end of the `with`."""
        self._leaving = SystemExit(0)
        raise self._leaving

    def _ask(self, has_signal: bool) -> Future[list[bool]]:
        call = f"stop(t={self._next_step - 1})"

        def gather() -> list[bool]:
            with collectives.calling(call):
                return collectives.gather_objects(has_signal, self._world)

        return self._thread.submit(gather)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process or now - self._received.setdefault(number, now) > _SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """End in order, or by an error, after which the others must not wait for this process."""
        try:
            if error is not None and error is self._leaving:
                self._ask(True).result()
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    self._mark()
            elif error is not None:
                # Before a wait that `hang_up` ends is told as a timeout.
                self._world.session.note_failure(None, timed_out=False)
                self._world.hang_up()
                if self._received and isinstance(error, RunError):  # preempted all the same
                    self._mark()
        finally:
            self._thread.shutdown()
            self._world.let_go()
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _mark(self) -> None:
        """Write the marker. Several nodes may, in one directory that all of them see."""
        files.replace(self._marker, [json.dumps({"step": self._next_step}).encode() + b"\n"])


def _shield_a_fork() -> None:
    """Let a process forked within the `with` (a data loader's worker) receive signals only from its parent.

    torchrun signals a whole process group; a loader that loses its worker would end the run before it can save.
    """
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is Stop._receive:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # Python's handlers would wait for the main thread
        threading.Thread(target=_hear_the_parent, daemon=True).start()


def _hear_the_parent() -> None:
    while (heard := signal.sigwaitinfo(_SHIELDED)).si_pid != os.getppid():
        pass
    if heard.si_signo == signal.SIGTERM and get_worker_info() is not None:
        os._exit(0)  # as PyTorch's handler does: one that a signal ended has failed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
    os.kill(os.getpid(), heard.si_signo)


if hasattr(signal, "sigwaitinfo"):  # not on macOS
    os.register_at_fork(after_in_child=_shield_a_fork)


def preemption(marker: str | Path, *, every: int = 10) -> Stop:
    """Stop all processes after the same step if one gets SIGTERM or SIGUSR1. A context manager; collective.

    In a training loop::

        with df.preemption("runs/a/preempted.json") as stop, df.checkpoint.Saver("runs/a") as saver:
            for t, batch in enumerate(batches):
                state, metrics = decent_step(state, batch, t)
                if stop(t):
                    saver.save(state, t + 1)
                    stop.leave()

    Processes leave with exit code 0, since torchrun treats any other as a failure and restarts them. The marker,
    `{"step": 41}`, distinguishes such a run from a finished one. It is written when all processes have left the inner
    context managers, such as the saver, and removed when the next run begins. Repeating the signal after a second ends
    a process at once. Worker processes that a DataLoader forks within the `with` run until it ends, though torchrun
    signals them (Linux).

    Args:
        marker: file that one process of each node writes; its directory is created for its owner only.
        every: steps between checks, >= 1; all stop within `2 * every` steps of the signal. A single process checks
            every step.

    Returns:
        `stop`: `stop(t)` returns True to stop; `stop.leave()` leaves.
    """
    every = at_least("preemption", "every", every, 1)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("preemption(marker): Python hands signals to the main thread; enter the `with` there.")
    marker = as_path("preemption(marker)", marker)
    if marker.is_dir():
        raise ValueError(f"preemption(marker={str(marker)!r}): that is a directory; the marker is a file in it.")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        make_directory(marker.parent, 0o700)
        with suppress(FileNotFoundError):  # another node may have removed it
            if not re.fullmatch(rb'(\{"step": \d+\}\n?)?', marker.read_bytes()):
                raise ValueError(f"preemption(marker={str(marker)!r}): this file is not a marker; choose another name.")
            marker.unlink()
    return Stop(marker, every)


def report_root_cause() -> None:
    """From here on, torchrun's "root cause" is the error with which the failure began, and other processes print one line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, (PeerLost, ExchangeTimeout)):
            print(f"rank {os.environ.get('RANK')}: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)  # torchrun takes the process that ends first for the cause
            return
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        if not file.exists():  # else `record` has written it
            try:
                raise error  # for its traceback
            except BaseException as raised:
                get_error_handler().record_exception(raised)
        before(kind, error, traceback)

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        sys.excepthook = hook


def end_with_agent() -> None:
    """From here on, if torchrun, the parent process, ends, the kernel sends SIGTERM to this one (Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
