"""Rank, size and process groups of this process, looked up in one place."""

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

# Its functions bind the current default group as a default argument. If the compiler imported it later, it would keep
# the group alive, and a gloo thread would outlive the interpreter.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from decentfn.comm.collectives.forks import wait_for_gloo, wait_for_gloo_before_forks
from decentfn.comm.collectives.steps import TAGS, Steps
from decentfn.core.context import context
from decentfn.torch_private.dynamo import constant_while_traced

_CPU = torch.device("cpu")


class World:
    """Processes that hold the workers: this one's rank and device, their number, and groups of them.

    Worker `i` is in process `i // L` if each process holds `L` workers (`L = 1` under plain torchrun), or in
    processes `i S` to `i S + S - 1` if each worker is `S` processes.
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
        """Rank of this process among all, other shards included; the key of its random numbers."""
        self.processes_per_worker = 1
        # Other worlds, if a worker is several processes. No world refers to itself: its groups end when it is released.
        self._all_processes: World | None = None
        self._gossip: World | None = None
        self._outside: dict[range, dist.ProcessGroup] = {}
        self.turn = threading.Lock()
        """Lock held during a collective outside steps: two threads' collectives must not mix."""
        self._made_apart = itertools.count()
        self.timeout = timeout
        self.steps = Steps(rank)
        self.device = device
        """Device of this process: its own GPU, or the CPU."""
        self.counters: tuple[Any, ...] = ()
        """Active counters of the traffic; see `communication`."""
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        _worlds.add(self)

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
        """Number of workers."""
        return self.all_processes.size // self.processes_per_worker

    @property
    def process(self) -> int:
        """Index of this process within its worker, from 0."""
        return self.all_processes.rank % self.processes_per_worker

    @property
    def store(self) -> Store:
        """Store through which the processes leave notes for one another."""
        if self._store is not None:
            return self._store
        assert self.group is not None
        return self.group.get_group_store()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def processes(self) -> range:
        """Global ranks of this world's processes."""
        return range(self.size)

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
            store = PrefixStore(f"outside {processes.start} {len(processes)} {processes.step}", self.store)
            # Not dist.new_group, which every process must call (its names count groups): some processes may make this
            # one alone.
            made = dist.ProcessGroupGloo(
                store, processes.index(self.rank), len(processes), self.timeout or default_pg_timeout
            )
            self._outside[processes] = cast(dist.ProcessGroup, made)
        return self._outside[processes]

    def apart(self, timeout: timedelta | None = None) -> World:
        """Return a world of the same processes with separate connections, for another thread outside steps; collective.

        Without a `timeout` it waits twice as long as this one: a process may notice a step's lost message only at its
        timeout. Call `let_go` at the end.
        """
        if self.size == 1:
            return self
        world = World(None, self.rank, self.size, timeout or 2 * (self.timeout or default_pg_timeout), self.device)
        world._store = PrefixStore(
            f"apart {next(self._made_apart)}", self.store
        )  # all processes make the same ones in the same order
        world.steps.board = world._store
        return world

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of `ranks` (ascending), made by `make_subgroups`."""
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
        own = [group for ranks, group in self._subgroups.items() if self.rank in ranks]
        close([group for group in (self.group, *own, self.intra_worker, *self._outside.values()) if group is not None])

    def let_go(self) -> None:
        """Release all groups: a group's threads and connections end with the last reference to it."""
        self.group = self.intra_worker = self.mesh = None
        self._subgroups.clear()
        self._outside.clear()

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=self.timeout))


def close(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close these groups' connections: gloo closes them if a message times out."""
    works = []
    for group in groups:
        for rank in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                works.append(cast(Any, group).recv([torch.empty(1)], rank, TAGS))  # no step has this tag
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))


class SameShard(World):
    """World in which workers exchange: the processes that hold the same shard, one per worker."""

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        size = self.processes_per_worker
        made = [self.all_processes._new_group(tuple(i * size + shard for i in ranks)) for shard in range(size)]
        return made[self.process]

    @property
    def processes(self) -> range:
        """Global ranks of this world's processes."""
        return range(self.process, self.all_processes.size, self.processes_per_worker)


_worlds = weakref.WeakSet[World]()


def end_waits(longer_than: float) -> bool:
    """Close connections on which a thread has waited longer (seconds), so that it raises; return True if any."""
    now = time.monotonic()
    late = [w for w in list(_worlds) if w.steps.waits_since is not None and now - w.steps.waits_since > longer_than]
    for world in late:
        world.hang_up()
    return bool(late)


def _let_go_of_all() -> None:
    """Release all worlds at exit, also those a script keeps: a gloo thread that outlives Python aborts the process."""
    for world in list(_worlds):
        world.let_go()
    wait_for_gloo()  # a script, or the traceback of its error, may keep a group itself


atexit.register(_let_go_of_all)

_default: list[World] = []  # the world of the current default group, or of one process, once requested
_split: dict[int, World] = {}  # by processes per worker; reused, because a group's threads never sleep


def world() -> World:
    """Return the world of this thread's operators: set by `use`, else of the default group, else a single process.

    If a worker is several processes, it is gossip's world.
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
    """Return the device of the processes, if a script made the default group itself, as for DDP."""
    if "nccl" not in str(dist.get_backend_config()):
        return _CPU
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def require_messages_from(call: str, device: torch.device) -> None:
    """Raise ValueError if the default group cannot send from this device, as NCCL from the CPU."""
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
    """Return the world of all processes of all workers."""
    return world().all_processes


@constant_while_traced
def processes_per_worker() -> int:
    """Return the number of processes per worker; also works while a step is traced."""
    return world().processes_per_worker


def require_workers_of(processes: int) -> None:
    """Raise ValueError if a state was made for another number of processes per worker; 1 suits any number."""
    now = processes_per_worker()
    if processes not in (1, now):
        raise ValueError(
            f"a state of workers of {processes} processes, but df.init(processes_per_worker={now}) was called since; make it anew with "
            f"init(params), restore it from a checkpoint, or call df.init(processes_per_worker={processes}) again."
        )


def split_workers(processes_per_worker: int) -> World:
    """Make every `processes_per_worker` consecutive ranks one worker and return the world of all; collective.

    The number of processes must be divisible by it.
    """
    before, size = everyone(), processes_per_worker
    if context.world is not None:
        raise ValueError(
            f"init(processes_per_worker={size}): ranks that are threads (df.testing.on_ranks) are a worker each; start processes, "
            "with torchrun."
        )
    if size in _split:
        _default[:] = [_split[size]]
        return _split[size]
    here = World(before.group, before.rank, before.size, before.timeout, before.device)
    here.processes_per_worker = size
    # Shared: one per store.
    here._outside, here.turn, here._made_apart = before._outside, before.turn, before._made_apart
    if size > 1:
        ranks = torch.arange(here.size).view(-1, size)
        rows = [here._new_group(tuple(row)) for row in ranks.tolist()]
        columns = [here._new_group(tuple(column)) for column in ranks.T.tolist()]
        group, here.intra_worker = columns[here.process], rows[here.worker]
        here.mesh = DeviceMesh.from_group(
            [group, here.intra_worker], here.device.type, mesh=ranks, mesh_dim_names=("worker", "shard")
        )
        gossip = SameShard(group, here.worker, here.num_workers, here.timeout, here.device)
        gossip.processes_per_worker, gossip.intra_worker, gossip.mesh = size, here.intra_worker, here.mesh
        gossip.place = here.rank
        gossip._all_processes, here._gossip = here, gossip
    _default[:], _split[size] = [here], here
    return here


def adopt_default_group(timeout: timedelta | None = None, device: torch.device = _CPU) -> World:
    """Take the default group as the world, each process a worker; without a default group, this process alone.

    Groups made later use this `timeout`.
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
        world._gossip = None  # it refers back to the world
    _default.clear()
    _split.clear()


@contextmanager
def use(given: World) -> Iterator[World]:
    """Context in which this thread's operators use `given` instead of the default process group's world."""
    before = context.world
    context.world = given
    try:
        yield given
    finally:
        context.world = before
