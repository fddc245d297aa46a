"""Who we are among the processes: rank, size and the process groups, looked up in one place."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


class World:
    """The processes that hold the workers: this one's rank, their number, and groups of them.

    Worker `i` lives in process `i // L` when each process holds `L` workers (`L = 1` under plain torchrun).
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of `ranks` (ascending), which `make_subgroups` has made."""
        if len(ranks) == self.size and self.group is not None:
            return self.group
        if ranks not in self._subgroups:
            raise RuntimeError(
                f"group_mean over ranks {list(ranks)}: its process group was never made. Call the algorithm's "
                "init(params), or decentfn.collectives.make_groups(groups), on every rank first."
            )
        return self._subgroups[ranks]

    def make_subgroups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the missing process groups; collective, every rank passes the same `groups` in the same order."""
        for ranks in groups:
            if 1 < len(ranks) < self.size and ranks not in self._subgroups:
                self._subgroups[ranks] = dist.new_group(list(ranks))


_ALONE = World(None, 0, 1)
_current = threading.local()
_of_default_group: dict[int, tuple[dist.ProcessGroup, World]] = {}


def world() -> World:
    """The world of this thread: the one given to `use`, else torch.distributed's default group, else one process."""
    given = getattr(_current, "world", None)
    if given is not None:
        return given
    if not dist.is_initialized():
        _of_default_group.clear()
        return _ALONE
    group = dist.group.WORLD
    assert group is not None
    known = _of_default_group.get(id(group))
    if known is None or known[0] is not group:
        _of_default_group.clear()
        known = (group, World(group, dist.get_rank(), dist.get_world_size()))
        _of_default_group[id(group)] = known
    return known[1]


@contextmanager
def use(given: World) -> Iterator[World]:
    """Run this thread's operators in another world than the default process group's."""
    before = getattr(_current, "world", None)
    _current.world = given
    try:
        yield given
    finally:
        _current.world = before
