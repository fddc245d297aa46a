"""Who we are among the processes: rank, size and the process groups, looked up in one place."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# Its functions have the default group of the moment for a default argument: imported later, by the compiler, they would keep
# the group, and a thread of gloo's would need the interpreter after its end.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from decentfn.comm.collectives.forks import wait_for_gloo, wait_for_gloo_before_forks
from decentfn.comm.collectives.steps import TAGS, Steps
from decentfn.core.context import context
from decentfn.torch_private.dynamo import constant_while_traced

_CPU = torch.device("cpu")


class World:
    """The processes that hold the workers: this one's rank and device, their number, and groups of them.

    Worker `i` lives in process `i // L` when each process holds `L` workers (`L = 1` under plain torchrun), or in the
    processes `i S` to `i S + S - 1` when each worker is `S` of them.
    """

    mesh: DeviceMesh | None = None
    """The processes as a mesh of ("worker", "shard"), where a worker is several."""
    intra_worker: dist.ProcessGroup | None = None
    """The processes of this one's worker, where they are several."""
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
        """This process's rank among all, those of other shards too: what it draws random numbers by."""
        self.processes_per_worker = 1
        # Others than this one where a worker is several. No world refers to itself: its groups must end when it is let go.
        self._all_processes: World | None = None
        self._gossip: World | None = None
        self._outside: dict[range, dist.ProcessGroup] = {}
        self.turn = threading.Lock()
        """Held from the beginning to the end of a collective outside steps: those of two threads must not meet."""
        self._made_apart = itertools.count()
        self.timeout = timeout
        self.steps = Steps(rank)
        self.device = device
        """Where this process computes: the GPU that is its own, or the CPU."""
        self.counters: tuple[Any, ...] = ()
        """Who counts what travels; see `communication`."""
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        _worlds.add(self)

    @property
    def all_processes(self) -> World:
        """All processes; of gossip's world, in which a worker has one, those of the other shards too."""
        return self._all_processes or self

    @property
    def gossip(self) -> World:
        """The processes that exchange: one of each worker, those with this one's shard."""
        return self._gossip or self

    @property
    def worker(self) -> int:
        """The worker that this process belongs to; the first of those that it simulates is `workers(local)[0]`."""
        return self.all_processes.rank // self.processes_per_worker

    @property
    def num_workers(self) -> int:
        """How many workers the processes are."""
        return self.all_processes.size // self.processes_per_worker

    @property
    def process(self) -> int:
        """Which of its worker's processes this one is, from 0."""
        return self.all_processes.rank % self.processes_per_worker

    @property
    def store(self) -> Store:
        """Where the processes can leave notes for one another."""
        if self._store is not None:
            return self._store
        assert self.group is not None
        return self.group.get_group_store()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def processes(self) -> range:
        """The processes of this world, by their rank among all."""
        return range(self.size)

    def workers(self, local: int = 1) -> range:
        """The numbers of the workers in this process, where each process has `local` of them (`df.simulate`)."""
        if not isinstance(local, int) or local < 1:
            raise ValueError(f"world.workers(local={local!r}): the number of workers in a process is an integer >= 1.")
        return range(self.worker * local, (self.worker + 1) * local)

    @property
    def own_processes(self) -> range:
        """Those of this one's worker, by rank among all."""
        first = self.worker * self.processes_per_worker
        return range(first, first + self.processes_per_worker)

    def outside(self, processes: range) -> dist.ProcessGroup:
        """The group of these processes for everything that is not a step; the first call of each waits for the others'."""
        if self._all_processes is not None:
            return self._all_processes.outside(processes)
        if processes not in self._outside:
            store = PrefixStore(f"outside {processes.start} {len(processes)} {processes.step}", self.store)
            # Not one of torch.distributed's, whose names count the groups that a process has made: this may be made by one call alone.
            made = dist.ProcessGroupGloo(
                store, processes.index(self.rank), len(processes), self.timeout or default_pg_timeout
            )
            self._outside[processes] = cast(dist.ProcessGroup, made)
        return self._outside[processes]

    def apart(self, timeout: timedelta | None = None) -> World:
        """The same processes with connections of their own, for what another thread does outside steps; collective.

        Without a `timeout` they wait twice as long as here: a process may notice only at its timeout that a step's
        message is lost. `let_go` of it in the end.
        """
        if self.size == 1:
            return self
        world = World(None, self.rank, self.size, timeout or 2 * (self.timeout or default_pg_timeout), self.device)
        world._store = PrefixStore(
            f"apart {next(self._made_apart)}", self.store
        )  # all make the same ones in the same order
        world.steps.board = world._store
        return world

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of `ranks` (ascending), which `make_subgroups` has made."""
        if len(ranks) == self.size and self.group is not None:
            return self.group
        if ranks not in self._subgroups:
            raise RuntimeError(
                f"group_mean over ranks {list(ranks)}: its process group was never made. Call the algorithm's "
                "init(params), or decentfn.comm.collectives.make_groups(groups), on every rank first."
            )
        return self._subgroups[ranks]

    def make_subgroups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the missing process groups; collective, every rank passes the same `groups` in the same order."""
        for ranks in groups:
            if 1 < len(ranks) < self.size and ranks not in self._subgroups:
                self._subgroups[ranks] = self._new_group(ranks)

    def tp_group(self, size: int) -> dist.ProcessGroup:
        """The group of this process's team, so many of its worker's processes next to one another, which `make_tp_groups` has made."""
        if size == self.processes_per_worker:
            return cast(dist.ProcessGroup, self.intra_worker)
        first = self.all_processes.rank - self.all_processes.rank % size
        return self.all_processes.subgroup(tuple(range(first, first + size)))

    def make_tp_groups(self, size: int) -> None:
        """Make the groups of all teams of so many processes, where they are missing; collective over all processes."""
        if size < self.processes_per_worker:
            self.all_processes.make_subgroups(
                [tuple(range(i, i + size)) for i in range(0, self.all_processes.size, size)]
            )

    def hang_up(self) -> None:
        """Close the connections to all others, so that they notice now, and nothing of theirs is written here any more."""
        if self._all_processes is not None:
            self._all_processes.hang_up()
        own = [group for ranks, group in self._subgroups.items() if self.rank in ranks]
        close([group for group in (self.group, *own, self.intra_worker, *self._outside.values()) if group is not None])

    def let_go(self) -> None:
        """Hold no group any more: the threads and connections of a group end with the last reference to it."""
        self.group = self.intra_worker = self.mesh = None
        self._subgroups.clear()
        self._outside.clear()

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=self.timeout))


def close(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close these groups' connections: gloo does that where a message is late."""
    works = []
    for group in groups:
        for rank in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                works.append(cast(Any, group).recv([torch.empty(1)], rank, TAGS))  # no step has this tag
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


class SameShard(World):
    """One process of each worker, those that hold the same shard: the world in which workers exchange."""

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        size = self.processes_per_worker
        made = [self.all_processes._new_group(tuple(i * size + shard for i in ranks)) for shard in range(size)]
        return made[self.process]

    @property
    def processes(self) -> range:
        """The processes of this world, by their rank among all."""
        return range(self.process, self.all_processes.size, self.processes_per_worker)


_worlds = weakref.WeakSet[World]()


def end_waits(longer_than: float) -> bool:
    """Close the connections over which a thread has waited for more seconds, and return True if there are such: it raises."""
    now = time.monotonic()
    late = [w for w in list(_worlds) if w.steps.waits_since is not None and now - w.steps.waits_since > longer_than]
    for world in late:
        world.hang_up()
    return bool(late)


def _let_go_of_all() -> None:
    """At the end of a process, also of the worlds that a script keeps: a thread of gloo's that outlives Python aborts the process."""
    for world in list(_worlds):
        world.let_go()
    wait_for_gloo()  # where a script keeps a group itself, or the traceback of what ended it does


atexit.register(_let_go_of_all)

_default: list[World] = []  # the world of the current default group, or of one process, once it was asked for
_split: dict[int, World] = {}  # the same, as workers of so many processes: each group has threads that never sleep


def world() -> World:
    """Whom this thread's operators talk to: the world given to `use`, else torch.distributed's default group, else nobody.

    Where a worker is several processes it is gossip's.
    """
    given = context.world
    if given is not None:
        return given._gossip or given
    group = dist.group.WORLD  # None without one
    if not _default or _default[0].group is not group:
        return adopt_default_group(device=_CPU if group is None else _device_of(group))
    found = _default[0]
    return found._gossip or found


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where the processes of a default group compute that a script has made itself, as for DDP."""
    if "nccl" not in str(dist.get_backend_config()):
        return _CPU
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def require_messages_from(call: str, device: torch.device) -> None:
    """Raise ValueError if the default group carries no messages from this kind of device, as one of NCCL alone from the CPU."""
    here = everyone()
    if here.size == 1 or context.world is not None:
        return
    backends = str(dist.get_backend_config())
    if f"{device.type}:" not in backends:
        kinds = [part.partition(":")[0] for part in backends.split(",")]
        raise ValueError(
            f"{call}: the parameters are on {device}, and the process group ({backends}) carries messages from {', '.join(kinds)} "
            f"only; move the model there first, model.to({kinds[0]!r}), or leave the group to df.init()."
        )


def everyone() -> World:
    """All processes, of all workers."""
    return world().all_processes


@constant_while_traced
def processes_per_worker() -> int:
    """How many processes a worker is, also while a step is traced."""
    return world().processes_per_worker


def require_workers_of(processes: int) -> None:
    """Raise ValueError where a state of workers of so many processes meets workers of another number; one is as good as any."""
    now = processes_per_worker()
    if processes not in (1, now):
        raise ValueError(
            f"a state of workers of {processes} processes, but df.init(processes_per_worker={now}) was said since; make it anew with "
            f"init(params), restore it from a checkpoint, or say df.init(processes_per_worker={processes}) again."
        )


def split_workers(processes_per_worker: int) -> World:
    """All processes again, of which each so many, by rank, are one worker from now on; collective.

    Their number is divisible by it.
    """
    all_processes, size = everyone(), processes_per_worker
    if context.world is not None:
        raise ValueError(
            f"init(processes_per_worker={size}): ranks that are threads (df.testing.on_ranks) are a worker each; start processes, "
            "with torchrun."
        )
    if size in _split:
        _default[:] = [_split[size]]
        return _split[size]
    outside, turn, made_apart = all_processes._outside, all_processes.turn, all_processes._made_apart
    all_processes = World(
        all_processes.group, all_processes.rank, all_processes.size, all_processes.timeout, all_processes.device
    )
    all_processes.processes_per_worker = size
    all_processes._outside, all_processes.turn, all_processes._made_apart = (
        outside,
        turn,
        made_apart,
    )  # one of each for a store
    if size > 1:
        ranks = torch.arange(all_processes.size).view(-1, size)
        rows = [all_processes._new_group(tuple(row)) for row in ranks.tolist()]
        columns = [all_processes._new_group(tuple(column)) for column in ranks.T.tolist()]
        group, all_processes.intra_worker = columns[all_processes.process], rows[all_processes.worker]
        all_processes.mesh = DeviceMesh.from_group(
            [group, all_processes.intra_worker],
            all_processes.device.type,
            mesh=ranks,
            mesh_dim_names=("worker", "shard"),
        )
        gossip = SameShard(
            group, all_processes.worker, all_processes.num_workers, all_processes.timeout, all_processes.device
        )
        gossip.processes_per_worker, gossip.intra_worker, gossip.mesh = (
            size,
            all_processes.intra_worker,
            all_processes.mesh,
        )
        gossip.place = all_processes.rank
        gossip._all_processes, all_processes._gossip = all_processes, gossip
    _default[:], _split[size] = [all_processes], all_processes
    return all_processes


def adopt_default_group(timeout: timedelta | None = None, device: torch.device = _CPU) -> World:
    """Take torch.distributed's default group as the world, each process a worker, or this process alone where there is none.

    Groups made later wait as long as `timeout`.
    """
    if dist.is_initialized():
        wait_for_gloo_before_forks()
        world = World(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), timeout, device)
    else:
        world = World(None, 0, 1, timeout, device)
    _forget()
    _default[:] = [world]
    return world


def leave_default_group() -> None:
    """Destroy the default group and all groups made within it; no messages may be in flight."""
    for world in (*_default, *_split.values()):
        for one in (world, world.gossip):
            one.let_go()
    _forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget() -> None:
    for world in (*_default, *_split.values()):
        world._gossip = None  # which refers to it
    _default.clear()
    _split.clear()


@contextmanager
def use(given: World) -> Iterator[World]:
    """Run this thread's operators in another world than the default process group's."""
    before = context.world
    context.world = given
    try:
        yield given
    finally:
        context.world = before
