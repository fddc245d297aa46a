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
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.collectives import World, use

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=60)
_kept: dict[tuple[int, float], list[World]] = {}


def on_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, timeout: timedelta = _TIMEOUT) -> list[T]:
    """`function(rank, *arguments)` on every rank at once; what each returned, by rank.

    Args:
        num_ranks: threads, each with a gloo group of its own.
        function: what a rank does. Inside, `df.init()` and everything collective see a world of `num_ranks` processes.
        arguments: passed on to all ranks.
        timeout: how long a message waits for its peer.

    Raises:
        The first exception that a rank raised; the others then time out.
    """
    return _run(_connect(num_ranks, timeout, 0.0), function, *arguments)


def on_kept_ranks(num_ranks: int, function: Callable[..., T], *, delay: float = 0.0) -> list[T]:
    """As `on_ranks`, on connections that stay open for the next call, and must be left without a message in flight.

    Every message leaves `delay` seconds late, read from memory only then: what is written over before its message was
    waited for arrives changed.
    """
    key = (num_ranks, delay)
    if key not in _kept:
        _kept[key] = _connect(num_ranks, _TIMEOUT, delay)
    try:
        return _run(_kept[key], function)
    except BaseException:
        del _kept[key]
        raise


@contextmanager
def alone_as_rank_of(num_ranks: int) -> Iterator[World]:
    """This thread as rank 0 of a world that nobody else is in: messages go nowhere, and zeros arrive.

    For compiling a step once, before all ranks run its code.
    """
    with use(_Nowhere(_NoGroup(), 0, num_ranks)) as world:  # pyright: ignore[reportArgumentType]
        yield world


def _run(worlds: list[World], function: Callable[..., T], *arguments: Any) -> list[T]:
    results: list[Any] = [None] * len(worlds)
    errors: list[BaseException] = []

    def run(rank: int, world: World) -> None:
        try:
            with use(world):
                results[rank] = function(rank, *arguments)
        except BaseException as error:
            errors.append(error)

    _join([threading.Thread(target=run, args=pair) for pair in enumerate(worlds)])
    if errors:
        raise errors[0]
    return results


def _connect(num_ranks: int, timeout: timedelta, delay: float) -> list[World]:
    store, worlds = dist.HashStore(), {}  # pyright: ignore[reportPrivateImportUsage]

    def connect(rank: int) -> None:
        worlds[rank] = ThreadWorld(store, rank, num_ranks, timeout, delay)

    _join([threading.Thread(target=connect, args=(rank,)) for rank in range(num_ranks)])
    return [worlds[rank] for rank in range(num_ranks)]


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ThreadWorld(World):
    """A rank that is a thread: its own gloo groups over a store in memory."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, delay: float = 0.0) -> None:
        self._store, self._delay = store, delay
        self.rank, self.timeout, self._made = rank, timeout, 0
        super().__init__(self._group("all", tuple(range(size))), rank, size, timeout)

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        self._made += 1  # all make the same groups in the same order
        return self._group(f"group {self._made}", ranks) if self.rank in ranks else None

    def _group(self, name: str, ranks: tuple[int, ...]) -> Any:
        store = PrefixStore(name, self.store)
        group = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self.timeout)
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

    def allgather(self, heard: Any, told: Any) -> _LateWork:
        return self._later(lambda: self._group.allgather(heard, told))

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

    def wait(self, *timeout: timedelta) -> Any:
        work = self._work.get()
        if isinstance(work, Exception):
            raise work
        return work.wait(*timeout)


class _Nowhere(World):
    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        return self.group


class _NoGroup:
    """Zeros arrive: what lies in memory is no message that could be decoded."""

    def recv(self, tensors: Sequence[Tensor], *where: int) -> _NoGroup:
        for tensor in tensors:
            tensor.zero_()
        return self

    def allgather(self, heard: Any, told: Any) -> _NoGroup:
        for x in heard[0]:
            x.copy_(told[0])
        return self

    def _nothing(self, *arguments: Any) -> _NoGroup:
        return self

    send = allreduce = wait = _nothing
