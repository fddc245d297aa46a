"""Identity of a process among all: its numbers, and how many there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Identity:
    """Numbers of a process. When other processes leave or come, another identity replaces this one."""

    rank: int  # rank in this world, which has one process per worker if it is gossip's
    size: int  # number of processes in this world
    place: int  # keys this process's random numbers and chooses its data: its first rank among all processes
    processes: range  # processes of this world, by their rank among all
    num_workers: int
    size_at_start: int
    """Number of processes at the start. Compiled code is made for it, and also works with another."""
    processes_per_worker: int = 1
    device: torch.device = CPU  # its own GPU, or the CPU

    @classmethod
    def of(cls, rank: int, size: int, device: torch.device = CPU) -> Identity:
        """Return the identity of a process that is one of `size` workers."""
        return cls(rank, size, rank, range(size), size, size, device=device)

    @property
    def worker(self) -> int:
        """Worker of this process."""
        return self.processes[self.rank] // self.processes_per_worker

    @property
    def process(self) -> int:
        """Index of this process within its worker, from 0."""
        return self.processes[self.rank] % self.processes_per_worker

    def is_inside(self, rank: int) -> bool:
        """Return True if a rank of this world is on this process's node: torchrun's LOCAL_WORLD_SIZE, else all are."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 2**31))
        return self.processes[rank] // local == self.processes[self.rank] // local
