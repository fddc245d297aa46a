"""Gloo ranks that are threads of this process: real sends and receives, for the price of a function call.

They share the process's modules, its compiled code and its random number generators. What they exchange goes through
gloo, over the loopback interface.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from decentfn.collectives import World, use

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=60)
_gangs: dict[tuple[int, float], list[World]] = {}
"""The connected worlds of so many ranks, kept for the next call."""


def on_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, delay: float = 0.0) -> list[T]:
    """`function(rank, *arguments)` on every rank at once; what each returned, by rank.

    Args:
        num_ranks: threads, each with a gloo group of its own; connections are kept for the next call.
        function: what a rank does. Inside, `df.init()` and everything collective see a world of `num_ranks` processes.
        arguments: passed on to all ranks.
        delay: seconds by which every message leaves late, read from memory only then: what is written over before its
            message was waited for arrives changed.

    Raises:
        The first exception that a rank raised; the others then time out after a minute at most.
    """
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int, world: World) -> None:
        try:
            with use(world):
                results[rank] = function(rank, *arguments)
        except BaseException as error:
            errors.append(error)

    _join([threading.Thread(target=run, args=pair) for pair in enumerate(_connected(num_ranks, delay))])
    if errors:
        _gangs.pop((num_ranks, delay), None)  # messages may be left in it
        raise errors[0]
    return results


@contextmanager
def alone_as_rank_of(num_ranks: int) -> Iterator[World]:
    """This thread as rank 0 of a world that nobody else is in: messages go nowhere and nothing arrives.

    For compiling a step once, before all ranks run its code.
    """
    with use(_Nowhere(_NoGroup(), 0, num_ranks)) as world:  # pyright: ignore[reportArgumentType]
        yield world


def _connected(num_ranks: int, delay: float) -> list[World]:
    key = (num_ranks, delay)
    if key not in _gangs:
        store, worlds = dist.HashStore(), [None] * num_ranks

        def connect(rank: int) -> None:
            worlds[rank] = ThreadWorld(store, rank, num_ranks, delay)  # type: ignore[call-overload]

        _join([threading.Thread(target=connect, args=(rank,)) for rank in range(num_ranks)])
        _gangs[key] = worlds  # type: ignore[assignment]
    return _gangs[key]


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ThreadWorld(World):
    """A rank that is a thread: its own gloo groups over a store in memory."""

    def __init__(self, store: Any, rank: int, size: int, delay: float = 0.0, timeout: timedelta = _TIMEOUT) -> None:
        self._store, self._delay, self._limit = store, delay, timeout
        super().__init__(self._connect("all", tuple(range(size)), rank), rank, size, timeout)

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        return self._connect(f"group {ranks}", ranks, self.rank) if self.rank in ranks else None

    def _connect(self, name: str, ranks: tuple[int, ...], rank: int) -> Any:
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), ranks.index(rank), len(ranks), self._limit)
        return _Late(group, self._delay) if self._delay else group


class _Late:
    """A group whose messages leave `delay` seconds after they were posted, in their order."""

    def __init__(self, group: Any, delay: float) -> None:
        self._group, self._delay = group, delay
        self._posted: queue.SimpleQueue[tuple[float, Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: Sequence[Any], rank: int, tag: int) -> _LateWork:
        return self._later(lambda: self._group.send(tensors, rank, tag))

    def allreduce(self, tensors: Sequence[Any]) -> _LateWork:
        return self._later(lambda: self._group.allreduce(tensors))

    def _later(self, post: Callable[[], Any]) -> _LateWork:
        work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._posted.put((time.monotonic() + self._delay, post, work))
        return _LateWork(work)

    def _send(self) -> None:
        while True:
            due, post, work = self._posted.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                work.put(post())
            except RuntimeError as error:
                work.put(error)


class _LateWork:
    def __init__(self, work: queue.SimpleQueue[Any]) -> None:
        self._work = work

    def wait(self) -> Any:
        work = self._work.get()
        if isinstance(work, Exception):
            raise work
        return work.wait()


class _Nowhere(World):
    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        return self.group


class _NoGroup:
    def _nothing(self, *arguments: Any) -> _NoGroup:
        return self

    recv = send = allreduce = wait = _nothing
