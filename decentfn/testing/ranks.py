"""Gloo ranks as threads of this process: real sends and receives over loopback, without starting processes.

They share the process's modules, compiled code and random number generators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from decentfn.comm.collectives import Channels, Identity, World, use
from decentfn.core.arguments import at_least

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=60)
_kept: dict[tuple[int, float], list[World]] = {}


def on_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, timeout: timedelta = _TIMEOUT) -> list[T]:
    """Run `function(rank, *arguments)` on all ranks at once and return the results by rank.

    Threads share torch's generators: a loss that draws (dropout) draws other numbers in each call. In processes it does not.

    Args:
        num_ranks: number of threads, each with its own gloo group.
        function: the rank's program. In it, `df.init()` and all collectives see a world of `num_ranks` processes.
        arguments: arguments for all ranks.
        timeout: how long a message waits for its peer.

    Raises:
        ValueError: `num_ranks` is no number.
        The first exception of any rank; the others then time out.
    """
    return _run(_connect(at_least("on_ranks", "num_ranks", num_ranks, 1), timeout, 0.0), function, *arguments)


def on_kept_ranks(num_ranks: int, function: Callable[..., T], *, delay: float = 0.0) -> list[T]:
    """Run as `on_ranks`, on connections that stay open for the next call; no message may be left in flight.

    Every message is read from memory and sent `delay` seconds late, so overwriting it before the wait changes the
    message.
    """
    worlds = _kept.pop((num_ranks, delay), None) or _connect(num_ranks, _TIMEOUT, delay)
    results = _run(worlds, function)
    _kept[num_ranks, delay] = worlds
    return results


@contextmanager
def alone_as_rank_of(num_ranks: int) -> Iterator[World]:
    """Make this thread rank 0 of a world without other ranks: messages are dropped, and zeros arrive.

    Used to compile a step once before all ranks run its code, and, with one rank, to check within torchrun's processes.
    """
    with use(World(_Nowhere(Identity.of(0, num_ranks), _NoGroup()))) as world:
        yield world


def _run(worlds: list[World], function: Callable[..., T], *arguments: Any) -> list[T]:
    def run(rank: int) -> T:
        with use(worlds[rank]):
            return function(rank, *arguments)

    with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(len(worlds)) as threads:
        ranks = [threads.submit(run, rank) for rank in range(len(worlds))]
        for rank in as_completed(ranks):  # the first error is the cause of the others
            rank.result()
    return [rank.result() for rank in ranks]


def _connect(num_ranks: int, timeout: timedelta, delay: float) -> list[World]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def connect(rank: int) -> World:
        return World(_ThreadChannels(Identity.of(rank, num_ranks), store, timeout, delay))

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(connect, range(num_ranks)))


class _ThreadChannels(Channels):
    def __init__(self, identity: Identity, store: Store, timeout: timedelta, delay: float) -> None:
        super().__init__(identity, None, timeout, store)
        self._delay, self._made = delay, 0
        self.group = self._group("all", tuple(range(identity.size)))

    def new_group(self, ranks: tuple[int, ...]) -> Any:
        self._made += 1  # all ranks make the same groups in the same order
        return self._group(f"group {self._made}", ranks) if self.identity.rank in ranks else None

    def _group(self, name: str, ranks: tuple[int, ...]) -> Any:
        group: Any = self.connected(name, ranks)
        return _Late(group, self._delay) if self._delay else group


class _Late:
    """Group whose messages are sent `delay` seconds after they were posted, in order."""

    def __init__(self, group: Any, delay: float) -> None:
        self._group, self._delay, self._thread = group, delay, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        post = getattr(self._group, name)
        return partial(self._later, post) if name in ("send", "allreduce", "allgather") else post

    def _later(self, post: Callable[..., Any], *arguments: Any) -> Any:
        due = time.monotonic() + self._delay

        def run() -> Any:
            time.sleep(max(0.0, due - time.monotonic()))
            return post(*arguments)

        work = self._thread.submit(run)
        return SimpleNamespace(wait=lambda *timeout: work.result().wait(*timeout))


class _Nowhere(Channels):
    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        return self.group


class _NoGroup:
    """Group in which zeros arrive, since uninitialized memory could not be decoded."""

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
