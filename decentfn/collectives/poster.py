"""A thread beside the one that computes, which does one thing after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Asked:
    """A thing that the thread does, or has done."""

    __slots__ = ("_error", "_running")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def do(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Do it; what it raises, `result` does."""
        try:
            function(*arguments)
        except BaseException as error:
            self._error = error
        self._running.release()

    def result(self) -> None:
        """Wait until it is done."""
        with self._running:
            pass
        if self._error is not None:
            raise self._error


class Poster:
    """The thread. A pool's futures, which more than one may wait for, take 0.5 % of a small network's step."""

    def __init__(self, name: str) -> None:
        self._things: SimpleQueue[tuple[Asked, Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._things,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._things, thread)

    def submit(self, function: Callable[..., None], *arguments: Any) -> Asked:
        """Let the thread call `function(*arguments)` after all that it was given before; once it has ended, call it here."""
        asked = Asked()
        if self._end.alive:
            self._things.put((asked, function, arguments))
        else:
            asked.do(function, arguments)
        return asked


def _work(things: SimpleQueue[Any]) -> None:
    while (thing := things.get()) is not None:
        asked, function, arguments = thing
        asked.do(function, arguments)
        del thing, asked, function, arguments  # which hold what is sent


def _end(things: SimpleQueue[Any], thread: threading.Thread) -> None:
    """Also when the interpreter ends, which may not take the thread away from within gloo."""
    things.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)
