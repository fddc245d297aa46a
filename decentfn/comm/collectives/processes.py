"""World: rank, size, device and connections of this process among all, and the processes that are left after a loss."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# Its functions bind the current default group as a default argument. If the compiler imported it later, it would keep
# the group alive, and a gloo thread would outlive the interpreter.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from decentfn.comm.collectives import connections
from decentfn.comm.collectives.connections import close
from decentfn.comm.collectives.steps import Steps
from decentfn.topologies import Topology
from decentfn.topologies.resized import enlarged, in_place
from decentfn.topologies.rounds import by_handle

_CPU = torch.device("cpu")
_RING_S = 0.2
"""Interval at which this process looks whether the others still exist; a look takes 0.1 ms each."""
_LOOK_S = 0.02
"""Time between two looks into the store while this process polls its GPU."""
_POLL_S = 50e-6


class World:
    """Processes that hold the workers: this one's rank and device, their number, and groups of them.

    Worker `i` is in process `i // L` if each process holds `L` workers (`L = 1` under plain torchrun), or in
    processes `i S` to `i S + S - 1` if each worker is `S` processes.

    Numbers of a process: `rank` and `worker` follow from who is left; `place` keys its random numbers and chooses its
    data, and passes to the one that replaces it; `seat` names it in the store, and no other process ever has it.
    """

    mesh: DeviceMesh | None = None
    """Processes as a mesh of ("worker", "shard"), if a worker is several."""
    intra_worker: dist.ProcessGroup | None = None
    """Group of the processes of this one's worker, if they are several."""
    _store: Store | None = None  # the group's own

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        timeout: timedelta | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.place = rank
        """Rank of this process among all at the start, other shards included. One that joined a run has the place of a
        lost one, if there is one, else the next new number."""
        self.processes_per_worker = 1
        self.processes = range(size)
        """The processes of this world, by their rank among all."""
        # Other worlds, if a worker is several processes. No world refers to itself: its groups end when it is released.
        self._all_processes: World | None = None
        self._gossip: World | None = None
        self._outside: dict[range, dist.ProcessGroup] = {}
        self.generation = 0
        """Number of times that processes were lost or joined; in the name of everything that is in the store."""
        self.seat = rank
        """First rank of this process, or its number among those that came later; no other process ever has it."""
        self.seats = tuple(range(size))
        """Processes of this generation by seat, ascending; `rank` is this one's index among them."""
        self.places = self.seats
        """Their places, by rank."""
        self.num_seats = size
        """Number of processes at the start. Compiled code is made for it, and is right for fewer."""
        self.awaits: Store | None = None
        """Store of the run that this process waits to join (`df.init(join=True)`); it is alone until then."""
        self.agreed = set[str]()
        """Lines that describe the algorithms of this run, which all processes have compared."""
        self._schedules: dict[int, Topology] = {}
        self._handles = set[int]()  # of all topologies that were looked up
        self._adopted = group  # the default group that this world was made for
        self.turn = threading.Lock()
        """Lock held during a collective outside steps: two threads' collectives must not mix."""
        self._made_apart = itertools.count()
        self._apart = weakref.WeakSet[World]()
        self._of = weakref.ref(self)  # the world that this one was made apart from
        self.is_gone: Callable[[int], bool] | None = None
        """Returns True if the process of a seat has ended (`df.survive`)."""
        self._rung = 0.0
        self.has_hung_up = False
        """True if this process has closed the connections of its generation."""
        self.timeout, self.longest_wait = timeout, timeout or default_pg_timeout
        self.steps = Steps(rank)
        self.device = device
        """Device of this process: its own GPU, or the CPU."""
        self.counters: tuple[Any, ...] = ()
        """Active counters of the traffic; see `communication`."""
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        worlds.add(self)

    @property
    def all_processes(self) -> World:
        """World of all processes, other shards included; gossip's world has one process per worker."""
        return self._all_processes or self

    @property
    def gossip(self) -> World:
        """World of the processes that exchange: those with this process's shard, one per worker."""
        return self._gossip or self

    @property
    def worker(self) -> int:
        """Worker of this process; the first of its simulated workers is `workers(local)[0]`."""
        return self.all_processes.rank // self.processes_per_worker

    @property
    def num_workers(self) -> int:
        """Number of workers; before this process has joined a run, those that the run began with."""
        return self.num_seats if self.awaits is not None else self.all_processes.size // self.processes_per_worker

    @property
    def process(self) -> int:
        """Index of this process within its worker, from 0."""
        return self.all_processes.rank % self.processes_per_worker

    @property
    def store(self) -> Store:
        """Store through which the processes leave notes for one another."""
        return self._store or cast(Any, self.group).get_group_store()

    def workers(self, local: int = 1) -> range:
        """Return the numbers of the workers in this process, if each process has `local` of them (`df.simulate`)."""
        if not isinstance(local, int) or local < 1:
            raise ValueError(f"world.workers(local={local!r}): the number of workers in a process is an integer >= 1.")
        return range(self.worker * local, (self.worker + 1) * local)

    @property
    def own_processes(self) -> range:
        """Global ranks of the processes of this worker."""
        first = self.worker * self.processes_per_worker
        return range(first, first + self.processes_per_worker)

    def outside(self, processes: range) -> dist.ProcessGroup:
        """Return these processes' group for use outside steps; the first call on each waits for the others."""
        if self._all_processes is not None:
            return self._all_processes.outside(processes)
        if processes not in self._outside:
            name = f"outside {processes.start} {len(processes)} {processes.step}"
            self._outside[processes] = self._connected(name, processes)
        return self._outside[processes]

    @property
    def polls(self) -> bool:
        """Return True if the host polls its GPU for messages, because NCCL does not tell of a loss (`df.survive`)."""
        return self.steps.survives and self.device.type != "cpu"

    def _connected(self, name: str, ranks: Sequence[int], within: timedelta | None = None) -> dist.ProcessGroup:
        """Connect some processes. Not as a group of torch.distributed, which counts the groups that a process has made."""
        timeout, store, rank = self.longest_wait, PrefixStore(name, self.store), ranks.index(self.rank)
        if self.is_gone is None:
            return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, len(ranks), timeout))
        seats = [self.seats[rank] for rank in ranks]
        connections.meet(store, rank, len(ranks), within or timeout, lambda: self.require_present(seats))
        return connections.connected(store, rank, len(ranks), timeout)

    def require_present(self, seats: Sequence[int] | None = None) -> None:
        """Raise RuntimeError if one of these processes (default: of all) has ended, or another has noticed a loss."""
        of, now = self._of(), time.monotonic()
        if of is not None and of.steps.has_failed():
            raise RuntimeError("another process has lost one")
        if self.is_gone is not None and now - self._rung > _RING_S:
            self._rung = now
            if gone := [seat for seat in seats or self.seats if seat != self.seat and self.is_gone(seat)]:
                raise RuntimeError(f"process {gone[0]} has ended")

    def await_gpu(self, is_done: Callable[[], bool]) -> None:
        """Wait until this is done on the GPU; raise RuntimeError if a process is lost, or at the timeout."""
        now = time.monotonic()
        look, end = now + _LOOK_S, now + self.longest_wait.total_seconds()
        while not (self.has_hung_up or is_done()):
            time.sleep(_POLL_S)
            if (now := time.monotonic()) > look:
                look = now + _LOOK_S
                self.require_present()
            if now > end:
                raise RuntimeError(f"timed out after {self.longest_wait}: the GPU waits for another process")
        if self.has_hung_up:  # also if it is done: an aborted kernel has ended too
            raise RuntimeError("this process has closed its connections")

    def await_messages(self) -> None:
        """Wait until the GPU has all messages of a step; raise RuntimeError if one is lost."""
        works, self.steps.arriving = self.steps.arriving, []
        if works:
            self.await_gpu(lambda: all(work.is_completed() for work in works))
        for work in works:
            work.wait()  # raises NCCL's error

    def apart(self, timeout: timedelta | None = None) -> World:
        """Return a world of the same processes with separate connections, for another thread outside steps; collective.

        Without a `timeout` it waits twice as long as this one: a process may notice a step's lost message only at its
        timeout. Call `let_go` at the end. Its connections end with this world's generation.
        """
        if self.size == 1:
            return self
        world = World(None, self.rank, self.size, timeout or 2 * self.longest_wait, self.device)
        # All processes make the same ones in the same order.
        world._store = PrefixStore(f"apart {next(self._made_apart)}", self.store)
        world.steps.board = world._store
        world._of, world.is_gone, world.seat, world.seats = weakref.ref(self), self.is_gone, self.seat, self.seats
        self._apart.add(world)
        return world

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of `ranks` (ascending), made by `make_subgroups`."""
        if len(ranks) == self.size and self.group is not None:
            return self.group
        if ranks not in self._subgroups and self.generation:  # its members post in the same order
            self._subgroups[ranks] = self._connected(f"group {ranks}", ranks)
        if ranks not in self._subgroups:
            raise RuntimeError(
                f"group_mean over ranks {list(ranks)}: its process group was never made. Call the algorithm's "
                "init(params), or decentfn.comm.collectives.make_groups(groups), on every rank first."
            )
        return self._subgroups[ranks]

    def make_subgroups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the missing process groups; collective, every rank passes the same `groups` in the same order."""
        for ranks in groups:
            if 1 < len(ranks) < self.size and ranks not in self._subgroups and not self.generation:
                self._subgroups[ranks] = self._new_group(ranks)

    def tp_group(self, size: int) -> dist.ProcessGroup:
        """Return this process's tensor-parallel group of `size` consecutive processes, made by `make_tp_groups`."""
        if size == self.processes_per_worker:
            return cast(dist.ProcessGroup, self.intra_worker)
        first = self.all_processes.rank - self.all_processes.rank % size
        return self.all_processes.subgroup(tuple(range(first, first + size)))

    def make_tp_groups(self, size: int) -> None:
        """Make the missing tensor-parallel groups of `size` processes; collective over all processes."""
        if size < self.processes_per_worker:
            self.all_processes.make_subgroups(
                [tuple(range(i, i + size)) for i in range(0, self.all_processes.size, size)]
            )

    def hang_up(self) -> None:
        """Close the connections to all others, so that they notice at once and write nothing more here."""
        if self._all_processes is not None:
            self._all_processes.hang_up()
        self.has_hung_up = True
        own = [group for ranks, group in self._subgroups.items() if self.rank in ranks]
        groups = [group for group in (self.group, *own, self.intra_worker) if group is not None]
        close([*groups, *self._outside.values()])
        if self.polls:
            connections.abort(groups)

    def schedule(self, handle: int) -> Topology:
        """Return the topology of this handle, or the one in its place for the workers of a later generation."""
        made = by_handle[handle]
        self._handles.add(handle)
        if self.size == self.num_seats:
            return made
        if handle not in self._schedules:
            self._schedules[handle] = self._in_place(made, self.size)
        return self._schedules[handle]

    def _in_place(self, made: Topology, size: int) -> Topology:
        each = made.num_workers // self.num_seats
        if size > self.num_seats:
            return enlarged(made, size * each)
        empty = sorted(set(range(self.num_seats)) - set(self.places))[: self.num_seats - size]
        return in_place(made, [i for i in range(made.num_workers) if i // each in empty])

    def has_schedules(self, size: int) -> bool:
        """Return True if the topologies that were looked up have schedules of `size` processes in their place."""
        if size <= self.num_seats:
            return True
        with suppress(ValueError):
            for made in [by_handle[handle] for handle in self._handles if handle in by_handle]:
                self._in_place(made, size)
            return True
        return False

    def go_on(self, generation: int, seats: tuple[int, ...], places: tuple[int, ...], root: Store) -> None:
        """Become the world of these processes, with nothing in flight and no connections until `connect`.

        Plain calls of torch.distributed, whose default group this was, fail from here on; on GPUs it has a new one.

        Args:
            generation: larger than any before.
            seats: the processes that continue, this one among them.
            places: their places.
            root: store of all generations.
        """
        for world in (self, *self._apart):
            world.hang_up()
        adopted = None if self.polls else self._adopted
        self.let_go()
        if self.polls:
            connections.abort_default_group()
        self._adopted, self.awaits, self.has_hung_up = adopted, None, False
        self._store = PrefixStore(f"generation {generation}", root)
        self.generation, self.seats, self.places = generation, seats, places
        self.rank, self.size, self.processes = seats.index(self.seat), len(seats), range(len(seats))
        self.place = places[self.rank]
        self._schedules.clear()
        self._made_apart = itertools.count()
        self.steps.rank, self.steps.generation = self.rank, generation
        self.steps.begin(PrefixStore("steps", self._store))

    def connect(self, within: timedelta) -> None:
        """Connect the processes that are left, which come within this time; collective."""
        if self.size == 1:
            return
        self.group = self._connected("all", range(self.size), within)
        if self.polls:
            self._outside[self.processes] = self.group
            store = PrefixStore("default", self.store)
            self.group = connections.default_group(store, self.rank, self.size, self.longest_wait, self.device)
            self._adopted = self.group

    def let_go(self) -> None:
        """Release all groups: a group's threads and connections end with the last reference to it."""
        self.group = self.intra_worker = self.mesh = self._adopted = None
        self._subgroups.clear()
        self._outside.clear()

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        own, shards = self.processes, range(self.processes.step)  # all processes make the groups of all shards
        made = [dist.new_group([own[i] - own.start + shard for i in ranks], self.timeout) for shard in shards]
        return cast(dist.ProcessGroup, made[own.start])


worlds = weakref.WeakSet[World]()
"""All worlds of this process."""


def end_waits(longer_than: float) -> bool:
    """Close connections on which a thread has waited longer (seconds), so that it raises; return True if any."""
    now = time.monotonic()
    late = [w for w in list(worlds) if w.steps.waits_since is not None and now - w.steps.waits_since > longer_than]
    for world in late:
        world.hang_up()
    return bool(late)
