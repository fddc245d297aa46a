"""World: who this process is, its channels to the others, and the steps that they take together; and hooks of other rooms."""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from decentfn.comm.collectives.channels import Channels
from decentfn.comm.collectives.session import Session
from decentfn.topologies import Topology


class Hooks:
    """Calls by which another room takes part in a world's steps; `World.become` sets them."""

    changes = 0  # number of times that the processes have changed
    failure_is_final = True  # True if no step can follow one that has lost a message

    def before_step(self, t: int) -> None:
        """Take part before step `t`, when earlier steps are whole."""

    def after_step(self, t: int) -> None:
        """Take part after step `t`, when all of its messages have arrived; may raise a RunError."""

    def before_call(self, call: str) -> None:
        """Take part before a collective outside steps; may raise a RunError, so that it does not wait for others."""

    def schedule(self, made: Topology) -> Topology:
        """Return the schedule that holds now, of the form of the one that a step was made for."""
        return made

    def on_failure(self, groups: list[Any]) -> None:
        """End what still uses these groups, whose connections this process has closed."""

    def await_work(self, work: Any, *timeout: timedelta) -> None:
        """Wait for a work over gloo; may raise RuntimeError before its timeout, when a process is lost."""
        work.wait(*timeout)

    def wait_on_gpu(self, works: list[Any] | None) -> None:
        """Wait for works of a step that only the GPU waits for; None: for a collective outside steps."""


NO_HOOKS = Hooks()
"""Hooks of a fixed group of processes, which do nothing."""


class World:
    """Processes that hold the workers, as one of them sees them.

    Worker `i` is in process `i // L` if each process holds `L` workers (`L = 1` under plain torchrun), or in
    processes `i S` to `i S + S - 1` if each worker is `S` processes.

    When the processes change, `become` replaces the parts.
    """

    def __init__(self, channels: Channels) -> None:
        self.channels, self.identity = channels, channels.identity
        self.session = Session(channels.identity.rank)
        self.hooks = NO_HOOKS  # another room's; without them the processes do not change
        self.agreed = set[str]()  # lines that describe the algorithms of this run, which all processes have compared
        self.mailbox: Any = None
        """Mail of steps that wait for nobody (`mailbox.Mailbox`), once the `init` of such an algorithm has opened it."""
        self.runs = 0  # number of runs that the ranks have started together
        self.budgets = 0  # number of budgets that the ranks have counted together (`df.data.until`)
        self.counters: list[Any] = []  # active counters of the traffic; see `communication`
        self.adopted = self.channels.group  # default group that this world was made for
        # Other worlds, if a worker is several processes. No world refers to itself: its groups end when it is released.
        self._all_processes: World | None = None
        self._gossip: World | None = None
        self._apart = weakref.WeakSet[World]()
        worlds.add(self)

    def __repr__(self) -> str:
        group = self.channels.group
        backend = None if group is None else type(group).__name__.removeprefix("ProcessGroup").lower()
        with suppress(Exception):  # not one of torch.distributed's groups, or one that has ended
            backend = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))[self.device.type]
        return f"World(rank={self.rank}, size={self.size}, backend={backend!r}, device={str(self.device)!r})"

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.identity.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.identity.size

    @property
    def worker(self) -> int:
        """Worker of this process; the first of its simulated workers is `workers(local)[0]`."""
        return self.identity.worker

    @property
    def num_workers(self) -> int:
        """Number of workers; before this process has entered a run, those that the run began with."""
        return self.identity.num_workers

    @property
    def process(self) -> int:
        """Index of this process within its worker, from 0."""
        return self.identity.process

    @property
    def processes_per_worker(self) -> int:
        """Number of processes of each worker."""
        return self.identity.processes_per_worker

    @property
    def place(self) -> int:
        """Number that keys this process's random numbers and chooses its data: its rank at the start.

        One that entered a run has the place of a lost one, if there is one, else the next new number.
        """
        return self.identity.place

    @property
    def device(self) -> torch.device:
        """Device of this process: its own GPU, or the CPU."""
        return self.identity.device

    @property
    def mesh(self) -> DeviceMesh | None:
        """Processes as a mesh, if a worker is several."""
        return self.channels.mesh

    def workers(self, local: int = 1) -> range:
        """Return the numbers of the workers in this process, if each process has `local` of them (`df.simulate`)."""
        if not isinstance(local, int) or local < 1:
            raise ValueError(f"world.workers(local={local!r}): the number of workers in a process is an integer >= 1.")
        return range(self.worker * local, (self.worker + 1) * local)

    @property
    def all_processes(self) -> World:
        """World of all processes; gossip's world has one process per worker."""
        return self._all_processes or self

    @property
    def gossip(self) -> World:
        """World of the processes that exchange: those with this one's index in their worker."""
        return self._gossip or self

    def split(self, gossip: World | None) -> None:
        """Set, or unset, gossip's world, where a worker is several processes."""
        self._gossip = gossip
        if gossip is not None:
            gossip._all_processes = self

    def apart(self) -> World:
        """Return a world of the same processes with separate connections, for another thread outside steps; collective.

        It waits twice as long: a process may notice a lost message only at its timeout. Call `let_go` at the end.
        """
        here = self.identity
        if here.size == 1:
            return World(Channels(here))
        channels = self.channels.apart(2 * self.channels.longest_wait)
        world = World(channels)
        world.become(session=Session(here.rank, channels.store))
        self._apart.add(world)
        return world

    def become(
        self, *, channels: Channels | None = None, session: Session | None = None, hooks: Hooks | None = None
    ) -> None:
        """Replace parts: the session, or the channels with their identity."""
        self.channels = channels or self.channels
        self.identity = self.channels.identity
        self.session = session or self.session
        self.hooks = hooks or self.hooks

    def adopt(self, group: Any) -> None:
        """Take this default group, or None, as the one that this world is made for."""
        self.adopted = group

    def hang_up(self, *, also_apart: bool = False) -> None:
        """Close the connections to all others, so that they notice at once and write nothing more here."""
        for world in (self._all_processes, self, *(self._apart if also_apart else ())):
            if world is not None:
                world.channels.hang_up()
                world.hooks.on_failure(world.channels.groups())

    def let_go(self) -> None:
        """Release all groups: a group's threads and connections end with the last reference to it."""
        if self.mailbox is not None:
            self.mailbox.close()
        self.channels.let_go()
        self.adopt(None)


worlds = weakref.WeakSet[World]()
"""All worlds of this process."""
