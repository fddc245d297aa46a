"""Channels of a process to the others: the only holder of process groups."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

# Its functions bind the current default group as a default argument. If the compiler imported it later, it would keep
# the group alive, and a gloo thread would outlive the interpreter.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from decentfn.comm.collectives.identity import Identity
from decentfn.comm.collectives.session import TAGS

Connect = Callable[[str, Store, int, Sequence[int], timedelta], Any]
"""Function `(name, part of the store with this name, this one's index, ranks, timeout) -> group`."""


class Channels:
    """Connections of this process with the others of a world.

    A group has `send`, `recv`, `allreduce`, `allgather` and `broadcast` (from rank 0), of lists of tensors, `size` and
    `rank` as torch.distributed's groups do; its works `wait(timeout)`, and raise RuntimeError. Another transport is a class
    that returns its own from `new_group` and `connected`: steps, calls outside steps and the mailbox need nothing else.
    """

    def __init__(
        self, identity: Identity, group: Any = None, timeout: timedelta | None = None, store: Store | None = None
    ) -> None:
        self.identity = identity
        self.group: Any = group  # group of all processes of the world; None for one process
        self.intra_worker: Any = None  # group of the processes of this one's worker, if they are several
        self.mesh: DeviceMesh | None = None  # processes as a mesh, if a worker is several
        self.timeout = timeout  # how long a collective waits; None: as long as torch.distributed's
        self.longest_wait = timeout or default_pg_timeout
        self.has_hung_up = False  # True if this process has closed its connections
        self.turn = threading.Lock()  # held during a collective outside steps: two threads' collectives must not mix
        self.groups_outside: dict[range, Any] = {}  # for use outside steps, by their processes
        self._number_apart = itertools.count()
        self._store = store
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._connect: Connect = lambda name, store, i, ranks, wait: dist.ProcessGroupGloo(store, i, len(ranks), wait)

    @property
    def store(self) -> Store:
        """Store through which the processes leave notes for one another."""
        return self._store or self.group.get_group_store()

    def outside(self, processes: range) -> Any:
        """Return these processes' group for use outside steps; the first call on each waits for the others."""
        if processes not in self.groups_outside:
            name = f"outside {processes.start} {len(processes)} {processes.step}"
            self.groups_outside[processes] = self.connected(name, processes)
        return self.groups_outside[processes]

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of `ranks` (ascending), made by `make_subgroups`."""
        if len(ranks) == self.identity.size and self.group is not None:
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
            if 1 < len(ranks) < self.identity.size and ranks not in self._subgroups:
                self._subgroups[ranks] = self.new_group(ranks)

    def apart(self, timeout: timedelta) -> Channels:
        """Return separate channels of the same processes."""
        # All processes make the same ones in the same order.
        store = PrefixStore(f"apart {next(self._number_apart)}", self.store)
        made = copy.copy(self)
        Channels.__init__(made, self.identity, None, timeout, store)
        made.connect_by(self._connect)
        return made

    def partitioned(self, identity: Identity, of_worker: Any, mesh: Any, group: Any = None) -> Self:
        """Return these channels for workers of several processes; `group`: another group of all, gossip's."""
        made = copy.copy(self)
        made.identity, made.intra_worker, made.mesh = identity, of_worker, mesh
        if group is not None:
            made.group, made._store, made._subgroups = group, None, {}
        return made

    def hang_up(self) -> None:
        """Close the connections to all others, so that they notice at once and write nothing more here."""
        self.has_hung_up = True
        close([*self.groups(), *self.groups_outside.values()])

    def let_go(self) -> None:
        """Release all groups: a group's threads and connections end with the last reference to it."""
        self.group = self.intra_worker = self.mesh = None
        self._subgroups.clear()
        self.groups_outside.clear()

    def groups(self) -> list[Any]:
        """Return this process's groups that steps use."""
        own = [group for ranks, group in self._subgroups.items() if self.identity.rank in ranks]
        return [group for group in (self.group, *own, self.intra_worker) if group is not None]

    def connected(self, name: str, ranks: Sequence[int]) -> Any:
        """Connect some processes. Not as a group of torch.distributed, which counts the groups that a process has made."""
        store, index = PrefixStore(name, self.store), ranks.index(self.identity.rank)
        return self._connect(name, store, index, ranks, self.longest_wait)

    def connect_by(self, connect: Connect) -> None:
        """Connect processes by this function from here on."""
        self._connect = connect

    def new_group(self, ranks: tuple[int, ...]) -> Any:
        """Make a process group; collective, in the same order everywhere."""
        own = self.identity.processes
        # All processes make the groups of all worlds of a worker's processes.
        made = [dist.new_group([own[i] - own.start + k for i in ranks], self.timeout) for k in range(own.step)]
        return made[own.start]


def close(groups: Iterable[Any]) -> None:
    """Close these groups' connections over gloo, which a message does that times out."""
    works = []
    for group in groups:
        for rank in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                works.append(group.recv([torch.empty(1)], rank, TAGS))  # no step has this tag
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))
