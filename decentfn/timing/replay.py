"""Replay of a trace: for every level, which messages each worker takes, and what becomes of those that it offers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core.arguments import require
from decentfn.timing.trace import Event, Trace
from decentfn.topologies import Topology

LEAST_MASS = 2.0**-20
"""A worker that hears nothing keeps this much of its mass, so that it can always divide by it."""


class Offered(NamedTuple):
    """Messages of a level, of all N workers; those without a step in it offer nothing."""

    given: Tensor  # [N, K] float64, the share of its mass in each slot, 0 if nothing goes out
    to: Tensor  # [N, K] int64, the receiver in each slot; -1: nothing goes out
    place: Tensor  # [N] int64, place in the sender's ring; -1: nobody takes it
    steps: Tensor  # [N] int64, the own step of each worker in this level; -1: none


class Replay:
    """Levels of a trace as tables, on the algorithm's schedule; `call` is the user's. Step `t` of the simulator is level t."""

    def __init__(self, call: str, trace: Trace, topology: Topology) -> None:
        trace.require_of(call, topology)
        self.trace, self.topology = trace, topology

    def require_begun(self, level: int, to: Tensor) -> None:
        """Raise ValueError unless the receivers in a state's rings, `to` `[N, R, K]`, are those before this level."""
        expected = torch.full_like(to, -1, device="cpu")
        for told in map(self.offered, range(level)):
            [senders] = torch.nonzero(told.place >= 0, as_tuple=True)
            expected[senders, told.place[senders]] = told.to[senders]
        rule = f"the messages in flight in the state are not those of level {level} of the trace; begin with t=0 and "
        way_out = "df.stack(init(params), N, arrivals=trace), and go on from what each step returns."
        require(torch.equal(expected, to.cpu()), f"step(state, batch, t={level})", rule + way_out)

    def arriving(self, level: int, late: bool, room: int) -> Tensor:
        """Return the messages that each worker takes first, or late, `[N, M]` int64, in their order; -1 fills up.

        A message is its number among those of all rings, of R = `room` places: `(sender R + place) K + slot`.
        """
        taken: list[list[int]] = [[] for _ in range(self.trace.num_workers)]
        for i, s in self._events(level):
            its = self.trace.taken[i][k := s - self.trace.first[i]]
            first = len(its) - self.trace.late[i][k]
            taken[i] = [self._number(message, i, room) for message in (its[first:] if late else its[:first])]
        return filled_up(taken)

    def offered(self, level: int) -> Offered:
        """Return what the workers offer in a level."""
        n, slots = self.trace.num_workers, self.topology.slots
        given, to = torch.zeros(n, slots, dtype=torch.float64), torch.full((n, slots), -1)
        place, steps = torch.full((n,), -1), torch.full((n,), -1)
        for i, s in self._events(level):
            steps[i], place[i] = s, self.trace.places.get((i, s), -1)
            sent = torch.tensor(self.trace.sent[i][s - self.trace.first[i]], dtype=torch.bool)
            destinations = self.topology.round(s).destinations[i]
            to[i] = destinations.where(sent, -1)
            given[i] = shares_of(self.topology, s)[i] * (to[i] >= 0)
        return Offered(given, to, place, steps)

    def _events(self, level: int) -> tuple[Event, ...]:
        if level >= len(levels := self.trace.levels):
            raise ValueError(f"step(state, batch, t={level}): the trace that is replayed has {len(levels)} levels.")
        return levels[level]

    def _number(self, message: Event, receiver: int, room: int) -> int:
        sender, s = message
        slot = self.topology.peers(s).destinations[sender].index(receiver)
        return (sender * room + self.trace.places[message]) * self.topology.slots + slot


def shares_of(topology: Topology, s: int) -> Tensor:
    """Return the share of its mass that each worker offers in each slot of own step `s`, `[N, K]` float64."""
    rows = topology.rows(s, torch.device("cpu"))
    return rows[:, rows.shape[1] - topology.slots :]


def filled_up(rows: list[list[int]]) -> Tensor:
    """Return lists of different lengths as `[N, M]` int64, filled up with -1."""
    most = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int64).view(len(rows), most)
