"""Generation: the processes that hold the workers until some are lost or join; the hooks of their steps."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.comm.collectives import Channels, Hooks, Session, World
from decentfn.elastic import connections
from decentfn.errors import PeerLost
from decentfn.topologies import Topology
from decentfn.topologies.resized import enlarged, in_place

_PROBE_S = 0.2
"""Interval at which this process looks whether the others still exist; a look takes 0.1 ms each."""
_LOOK_S = 0.02
"""Time between two looks into the store while this process polls its GPU."""
_POLL_S = 50e-6


class Members(NamedTuple):
    """Processes of a generation, the same on all of them."""

    changes: int
    """Number of the generation; in the name of everything that is in the store."""
    seats: tuple[int, ...]
    """The processes, ascending. A seat is a process's first rank, or its number among those that came later; no other
    process ever has it."""
    places: tuple[int, ...]
    """Their places, by rank."""


class Generation(Hooks):
    """Hooks of the steps of a generation.

    A step ends on a process only when all have begun it: a sum over all of them begins before the step and ends after
    it (`take_part`). On a GPU it also ends only when its messages are there.
    """

    failure_is_final = False

    def __init__(
        self,
        here: World,
        members: Members,
        seat: int,
        run: Store,
        is_gone: Callable[[int], bool] | None = None,
        known: WeakSet[Topology] | None = None,
    ) -> None:
        self.members, self.seat = members, seat
        self.changes = members.changes
        self.run = run
        """Store of the run, in all of its generations."""
        self.missed: int | None = None
        """Step that some processes had ended before a loss and the others had not; calls that the former made outside steps
        after it failed, and are not repeated."""
        self.somebody_waits = False
        """True if a process has seen newcomers in the last step."""
        self._of = weakref.ref(here)  # the world refers to its hooks
        self._is_gone, self._probed = is_gone, 0.0
        self._known: WeakSet[Topology] = WeakSet() if known is None else known  # all that steps were made for
        self._schedules: WeakKeyDictionary[Topology, Topology] = WeakKeyDictionary()
        self._sum: tuple[torch.Tensor, Any] | None = None  # how many see newcomers, and its work
        self._arriving: list[Any] = []
        self._works: SimpleQueue[Any] | None = None  # those that another thread awaits

    @property
    def world(self) -> World:
        """The world whose steps these are."""
        here = self._of()
        assert here is not None
        return here

    @property
    def polls(self) -> bool:
        """Return True if the host polls its GPU for messages, because NCCL does not tell of a loss."""
        return self.world.device.type != "cpu"

    def next(
        self, members: Members, seat: int | None = None, is_gone: Callable[[int], bool] | None = None
    ) -> Generation:
        """Return the generation of these members, this process among them, with another seat if it is given one."""
        seat = self.seat if seat is None else seat
        return Generation(self.world, members, seat, self.run, is_gone or self._is_gone, self._known)

    def take_part(self, *, sees_newcomers: bool) -> None:
        """Begin the next step of the world with all others, and tell them whether this process sees newcomers."""
        self._sum = torch.full((1,), float(sees_newcomers)), None

    def miss(self, step: int | None) -> None:
        """Note the step that only some had ended."""
        self.missed = step

    def before_step(self, t: int) -> None:
        """Begin the sum over all. Refuse another step after a change: nobody has reset what its state knows of other workers."""
        if self._sum is None and self.changes:
            raise ValueError(
                f"step(state, batch, t={t}): the workers have changed, and of this run only the step of df.survive goes on; end the "
                "program, and restart both from a checkpoint (docs/restarts.md)."
            )
        group = self.world.channels.group
        if self._sum is not None and group is not None:
            with self._taking(t):
                self._sum = self._sum[0], group.allreduce([self._sum[0]])

    def after_step(self, t: int) -> None:
        """Wait until all have begun the step, and the GPU has its messages; raise PeerLost if not."""
        if self._sum is None:
            return
        waiting, begun = self._sum
        with self._taking(t):
            if begun is not None:
                self.await_work(begun)
            works, self._arriving = self._arriving, []
            if works:
                self._await_gpu(lambda: all(work.is_completed() for work in works))
            for work in works:
                work.wait()  # raises NCCL's error
        self._sum = None
        self.somebody_waits = bool(waiting > 0)

    def before_call(self, call: str) -> None:
        """Raise PeerLost, without a wait, if others do not make this call, because of a loss."""
        session, why = self.world.session, None
        if self.missed == session.at and not session.is_running:
            why = "that step was repeated after a loss: other ranks already made this call"
        if session.cut_short is not None:
            why = f"{session.cut_short[0]} has lost a process"
        if why is not None:
            raise PeerLost(
                f"{call} after step t={session.at}: {why}; the next step repairs the run.",
                process=self.world.rank,
                step=session.at,
            )

    def schedule(self, made: Topology) -> Topology:
        """Return the topology, or the one in its place for the workers of a later generation."""
        self._known.add(made)
        size = self.world.identity.size
        if size == self.world.identity.size_at_start:
            return made
        if made not in self._schedules:
            self._schedules[made] = self._in_place(made, size)
        return self._schedules[made]

    def on_failure(self, groups: list[Any]) -> None:
        """End the kernels of the GPU that wait for others. Keep the group of a sum, which whoever frees it would await."""
        if self.polls:
            connections.abort(groups)
        if self._sum is not None and self._sum[1] is not None:
            self._hand_over(self._sum[1])

    def await_work(self, work: Any, *timeout: timedelta) -> None:
        """Wait for a work over gloo; raise RuntimeError if a process is lost.

        gloo forgets a message that is half way when its connection ends, and then only the timeout ends the wait.
        """
        ended = self._hand_over(work, *timeout)
        while True:
            try:
                return ended.result(_PROBE_S)
            except TimeoutError:
                self.require_present()

    def wait_on_gpu(self, works: list[Any] | None) -> None:
        """Keep a step's works for its end; wait for a collective outside steps."""
        if not self.polls:
            return
        if works is None:
            self._await_gpu(torch.cuda.current_stream().record_event().query)
        else:
            self._arriving += works

    def has_schedules(self, size: int) -> bool:
        """Return True if the topologies of the steps have schedules of `size` processes in their place."""
        if size <= self.world.identity.size_at_start:
            return True
        with suppress(ValueError):
            for made in list(self._known):
                self._in_place(made, size)
            return True
        return False

    def _in_place(self, made: Topology, size: int) -> Topology:
        at_start = self.world.identity.size_at_start
        each = made.num_workers // at_start
        if size > at_start:
            return enlarged(made, size * each)
        empty = sorted(set(range(at_start)) - set(self.members.places))[: at_start - size]
        return in_place(made, [i for i in range(made.num_workers) if i // each in empty])

    def require_present(self, seats: Sequence[int] | None = None) -> None:
        """Raise RuntimeError if one of these processes (default: of all) has ended, or another has noticed a loss."""
        here, now = self._of(), time.monotonic()
        if here is None or self is not here.hooks or here.session.board.has_failed():
            raise RuntimeError("another process has lost one")
        if self._is_gone is not None and now - self._probed > _PROBE_S:
            self._probed = now
            if gone := [seat for seat in seats or self.members.seats if seat != self.seat and self._is_gone(seat)]:
                raise RuntimeError(f"process {gone[0]} has ended")

    def connect(
        self, _: str, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, within: timedelta | None = None
    ) -> Any:
        """Connect processes that come within this time; raise RuntimeError if one is lost."""
        seats = [self.members.seats[rank] for rank in ranks]
        require_present = partial(self.require_present, seats)
        return connections.connected(store, rank, len(ranks), timeout, within or timeout, require_present)

    @property
    def roll(self) -> Store:
        """Store of the roll call that ends this generation."""
        return PrefixStore(f"survive {self.changes + 1}", self.run)

    def _taking(self, t: int) -> AbstractContextManager[None]:
        rank = self.world.rank
        what = f"step t={t} on worker {rank}: not all workers have taken it"
        return connections.reported_as(PeerLost, what, process=rank, step=t)

    def _hand_over(self, work: Any, *timeout: timedelta) -> Future[None]:
        """Let a thread wait for this work, which stays behind with it and its group if a process is lost."""
        if self._works is None:
            self._works = SimpleQueue()
            threading.Thread(target=_wait_for, args=(self._works,), daemon=True).start()
            weakref.finalize(self, self._works.put, None)
        channels, ended = self.world.channels, Future[None]()
        self._works.put((ended, work, timeout, [*channels.groups(), *channels.groups_outside.values()]))
        return ended

    def _await_gpu(self, is_done: Callable[[], bool]) -> None:
        """Wait until this is done on the GPU; raise RuntimeError if a process is lost, or at the timeout."""
        channels, now = self.world.channels, time.monotonic()
        look, end = now + _LOOK_S, now + channels.longest_wait.total_seconds()
        while not (channels.has_hung_up or is_done()):
            time.sleep(_POLL_S)
            if (now := time.monotonic()) > look:
                look = now + _LOOK_S
                self.require_present()
            if now > end:
                raise RuntimeError(f"timed out after {channels.longest_wait}: the GPU waits for another process")
        if channels.has_hung_up:  # also if it is done: an aborted kernel has ended too
            raise RuntimeError("this process has closed its connections")


def generation_of(here: World) -> Generation:
    """Return the generation of a world whose step survives."""
    assert isinstance(here.hooks, Generation)
    return here.hooks


def awaited_run(here: World) -> Store | None:
    """Return the store of the run that this process waits to join (`df.init(join=True)`)."""
    return here.hooks.run if isinstance(here.hooks, Generation) and not here.hooks.members.seats else None


class _Reconnected(Channels):
    """Channels of a later generation, whose groups have nothing to do with torch.distributed's."""

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of `ranks`, connected when a step first uses it: its members post in the same order."""
        if len(ranks) < self.identity.size and ranks not in self._subgroups:
            self._subgroups[ranks] = self.connected(f"group {ranks}", ranks)
        return super().subgroup(ranks)

    def make_subgroups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make none ahead."""

    def connect_all(self, generation: Generation, within: timedelta) -> None:
        """Connect all processes, which come within this time; collective."""
        rank, size = self.identity.rank, self.identity.size
        if size == 1:
            return
        store = PrefixStore("all", self.store)
        self.group = generation.connect("all", store, rank, range(size), self.longest_wait, within)
        if generation.polls:
            self.groups_outside[self.identity.processes] = self.group
            store, device = PrefixStore("default", self.store), self.identity.device
            self.group = connections.default_group(store, rank, size, self.longest_wait, device)
            generation.world.adopt(self.group)


def begin(here: World, generation: Generation) -> None:
    """Let the steps of a world be those of a generation."""
    here.become(hooks=generation)
    here.channels.connect_by(generation.connect)


def go_on(here: World, members: Members, patience: timedelta) -> Generation:
    """Become the world of these processes, this one among them, with nothing in flight; connect those that come within `patience`.

    Collective. Plain calls of torch.distributed, whose default group this was, fail from here on; on GPUs it has a new one.
    """
    before = generation_of(here)
    here.hang_up(also_apart=True)
    if before.polls:
        here.let_go()
        connections.abort_default_group()
    else:
        here.channels.let_go()
    made = before.next(members)
    rank, size = members.seats.index(made.seat), len(members.seats)
    identity = replace(
        here.identity, rank=rank, size=size, place=members.places[rank], processes=range(size), num_workers=size
    )
    store = PrefixStore(f"generation {members.changes}", made.run)
    channels = _Reconnected(identity, None, here.channels.timeout, store)
    channels.connect_by(made.connect)
    here.become(channels=channels, session=Session(rank, PrefixStore("steps", store)), hooks=made)
    channels.connect_all(made, patience)
    return made


def _wait_for(works: SimpleQueue[Any]) -> None:
    while (its := works.get()) is not None:
        ended, work, timeout, groups = its
        try:
            work.wait(*timeout)
            ended.set_result(None)
        except Exception as error:
            ended.set_exception(error)
        del its, ended, work, groups
