"""Trace of a run of workers on their own clocks: which messages each took in each of its own steps.

Arrivals are data, as peers are. Ranks record a trace, a clock computes one, and the simulator replays either, level by level.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from decentfn.core.arguments import require
from decentfn.topologies import Topology

Event = tuple[int, int]
"""A worker and one of its own steps."""

LEAST_MASS = 2.0**-20
"""A worker that hears nothing keeps this much of its mass, so that it can always divide by it."""


def schedule_name(topology: Topology) -> str:
    """Return a topology's name and a digest of its rounds, of a random one 64, by which a trace knows it."""
    rounds = topology.steps(64) if topology.draw else range(len(topology.sources))
    digest = hashlib.sha256()
    for t in rounds:
        this = topology.round(t)
        digest.update(this.sources.numpy().tobytes() + this.weights.numpy().tobytes())
    return f"{topology.name} {digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class Trace:
    """Arrivals of a run: a record of ranks, or the prediction of a clock.

    Worker i's own steps are numbered from `first[i]`; entry k of its lists belongs to own step `first[i] + k`.

    Args:
        topology: `schedule_name` of the schedule, whose round worker i uses by its own step.
        num_workers: N.
        taken: `taken[i][k]`, the messages that the worker takes in the step, as (sender, sender's own step), in the order
            in which they are added. One entry more than there are steps: what `df.settle` took at the end.
        sent: `sent[i][k]`, for each of the round's slots (`round.destinations[i]`): True if the message went out, False if
            there is none, or the worker kept its mass.
        ended: `ended[i][k]`, when the step ended, in seconds since the start.
        first: the number of each worker's first step; empty: 0.
        late: `late[i][k]`, how many of the step's messages, the last ones, are taken after its gradient and just before it
            sends, and not at its start; empty: none, as in traces of versions that took mail only there.

    Raises:
        ValueError: lists whose lengths differ, more late messages than messages, or a message that was never sent, is taken
            twice, or is taken before it could exist.
    """

    topology: str
    num_workers: int
    taken: tuple[tuple[tuple[Event, ...], ...], ...] = field(repr=False)
    sent: tuple[tuple[tuple[bool, ...], ...], ...] = field(repr=False)
    ended: tuple[tuple[float, ...], ...] = field(repr=False)
    first: tuple[int, ...] = ()
    late: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        plain = {
            "taken": tuple(tuple(tuple((int(j), int(s)) for j, s in its) for its in steps) for steps in self.taken),
            "sent": tuple(tuple(tuple(map(bool, slots)) for slots in steps) for steps in self.sent),
            "ended": tuple(tuple(map(float, times)) for times in self.ended),
            "first": tuple(self.first) or (0,) * self.num_workers,
            "late": tuple(map(tuple, self.late)) or tuple((0,) * len(steps) for steps in self.sent),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
            rule = f"{name} has an entry for each of the {self.num_workers} workers."
            require(len(value) == self.num_workers, "Trace", rule, **{name: len(value)})
        for i, (taken, sent, ended) in enumerate(zip(self.taken, self.sent, self.ended, strict=True)):
            if len(ended) != len(sent) or len(taken) - len(sent) not in (0, 1):
                raise ValueError(
                    f"Trace: worker {i} has {len(sent)} steps in sent, {len(ended)} in ended and {len(taken)} in taken; each step "
                    "has one entry in each, and taken may have one more, what df.settle took."
                )
            late = self.late[i]
            if len(late) != len(sent) or not all(0 <= n <= len(its) for n, its in zip(late, taken, strict=False)):
                raise ValueError(
                    f"Trace: worker {i} has {len(sent)} steps, with {[*map(len, taken)][: len(sent)]} messages, of which late={[*late]}; "
                    "late has one number for each step, from 0 to its messages."
                )
        self._require_sent()
        _ = self.levels  # refuses steps that wait for one another

    def _require_sent(self) -> None:
        for i, taken in enumerate(self.taken):
            seen = set[Event]()
            for k, (j, s) in ((k, message) for k, its in enumerate(taken) for message in its):
                exists = 0 <= j < self.num_workers and 0 <= s - self.first[j] < len(self.sent[j])
                if not exists or not any(self.sent[j][s - self.first[j]]) or (j, s) in seen:
                    what = "twice" if (j, s) in seen else "but the trace has no such message"
                    raise ValueError(
                        f"Trace: worker {i} takes the message of worker {j}'s own step {s} in its own step {self.first[i] + k}, {what}."
                    )
                seen.add((j, s))

    @property
    def num_steps(self) -> tuple[int, ...]:
        """Number of own steps of each worker."""
        return tuple(map(len, self.sent))

    @cached_property
    def levels(self) -> tuple[tuple[Event, ...], ...]:
        """Own steps that can run at once: each needs its worker's last one, and those whose messages it takes.

        Raises:
            ValueError: steps wait for one another.
        """
        steps, found = TopologicalSorter[Event](), list[tuple[Event, ...]]()
        for i, (first, sent) in enumerate(zip(self.first, self.sent, strict=True)):
            for k in range(len(sent)):
                steps.add((i, first + k), *([(i, first + k - 1)] if k else []), *self.taken[i][k])
        try:
            steps.prepare()
        except CycleError as error:
            raise ValueError(
                f"Trace: the steps {error.args[1][:4]} (worker, own step) take messages of later steps."
            ) from None
        while ready := steps.get_ready():
            found.append(tuple(sorted(ready)))
            steps.done(*ready)
        return tuple(found)

    @cached_property
    def places(self) -> dict[Event, int]:
        """Place of each message that is taken, in a ring of its sender: free again once all of its takers have it."""
        ends: dict[Event, int] = {}
        for number, events in enumerate((*self.levels, self._rest())):
            for i, s in events:
                for message in self.taken[i][s - self.first[i]]:
                    ends[message] = number
        places: dict[Event, int] = {}
        until: list[list[int]] = [[] for _ in range(self.num_workers)]  # of each place, the last level that needs it
        for number, events in enumerate(self.levels):
            for i, s in events:
                if (i, s) in ends:
                    place = next((r for r, end in enumerate(until[i]) if end <= number), len(until[i]))
                    until[i][place : place + 1] = [ends[i, s]]
                    places[i, s] = place
        return places

    @property
    def room(self) -> int:
        """R, the messages that the simulator must keep for each sender, at least 1."""
        return max(self.places.values(), default=0) + 1

    def _rest(self) -> tuple[Event, ...]:
        """Steps that would follow the last ones of the workers that have settled."""
        both = zip(self.first, self.taken, self.sent, strict=True)
        return tuple((i, first + len(sent)) for i, (first, taken, sent) in enumerate(both) if len(taken) > len(sent))

    @property
    def settled(self) -> Iterator[tuple[int, tuple[Event, ...]]]:
        """Each settled worker, and what `df.settle` took."""
        return ((i, self.taken[i][s - self.first[i]]) for i, s in self._rest())

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` has written; raises ValueError for another file."""
        try:
            read = json.loads(Path(path).read_text())
            return cls(**read)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"Trace.load({str(path)!r}): not a trace that Trace.save wrote ({error}).") from error


class Offered(NamedTuple):
    """Messages of a level, of all N workers; those without a step in it offer nothing."""

    given: Tensor  # [N, K] float64, the share of its mass in each slot, 0 if nothing goes out
    to: Tensor  # [N, K] int64, the receiver in each slot; -1: nothing goes out
    place: Tensor  # [N] int64, place in the sender's ring; -1: nobody takes it


class Replay:
    """Levels of a trace as tables, on the algorithm's schedule; `call` is the user's. Step `t` of the simulator is level t."""

    def __init__(self, call: str, trace: Trace, topology: Topology) -> None:
        if trace.topology != (name := schedule_name(topology)):
            raise ValueError(
                f"{call}: a trace of {trace.num_workers} workers on the schedule {trace.topology!r}, but the algorithm's is {name!r} of "
                f"{topology.num_workers} (a name and a digest of its rounds); replay it with the algorithm that it was recorded with; "
                "a clock's trace is of Exchange(algorithm.topology, ...)."
            )
        self.trace, self.topology = trace, topology
        self.owners = WeakSet[Any]()
        """Parameters that have taken the mail of its last level."""

    def require_begun(self, level: int, to: Tensor) -> None:
        """Raise ValueError unless the receivers in a state's rings, `to` `[N, R, K]`, are those before this level."""
        expected = torch.full_like(to, -1, device="cpu")
        for told in map(self.offered, range(level)):
            [senders] = torch.nonzero(told.place >= 0, as_tuple=True)
            expected[senders, told.place[senders]] = told.to[senders]
        rule = f"the messages in flight in the state are not those of level {level} of the trace; begin with t=0 and "
        way_out = "df.stack(init(params), N, arrivals=trace), and go on from what each step returns."
        require(torch.equal(expected, to.cpu()), f"step(state, batch, t={level})", rule + way_out)

    def arriving(self, level: int, late: bool, to: Tensor) -> Tensor:
        """Return the messages that each worker takes first, or late, from rings with these receivers, as `rows_of`."""
        taken = list[tuple[int, Iterable[Event]]]()
        for i, s in self._events(level):
            its = self.trace.taken[i][k := s - self.trace.first[i]]
            first = len(its) - self.trace.late[i][k]
            taken.append((i, its[first:] if late else its[:first]))
        return rows_of(f"step(state, batch, t={level})", self.trace, taken, to)

    def offered(self, level: int) -> Offered:
        """Return what the workers offer in a level."""
        n, slots = self.trace.num_workers, self.topology.slots
        given, to = torch.zeros(n, slots, dtype=torch.float64), torch.full((n, slots), -1)
        place = torch.full((n,), -1)
        for i, s in self._events(level):
            place[i] = self.trace.places.get((i, s), -1)
            sent = torch.tensor(self.trace.sent[i][s - self.trace.first[i]], dtype=torch.bool)
            destinations = self.topology.round(s).destinations[i]
            to[i] = destinations.where(sent, -1)
            given[i] = shares_of(self.topology, s)[i] * (to[i] >= 0)
        return Offered(given, to, place)

    def steps(self, level: int) -> Tensor:
        """Return the own step of each worker in a level, `[N]` int64; -1: none."""
        own = dict(self._events(level))
        return torch.tensor([own.get(i, -1) for i in range(self.trace.num_workers)])

    def _events(self, level: int) -> tuple[Event, ...]:
        if level >= len(levels := self.trace.levels):
            raise ValueError(f"step(state, batch, t={level}): the trace that is replayed has {len(levels)} levels.")
        return levels[level]


def shares_of(topology: Topology, s: int) -> Tensor:
    """Return the share of its mass that each worker offers in each slot of own step `s`, `[N, K]` float64."""
    rows = topology.rows(s, torch.device("cpu"))
    return rows[:, rows.shape[1] - topology.slots :]


def rows_of(call: str, trace: Trace, taken: Iterable[tuple[int, Iterable[Event]]], to: Tensor) -> Tensor:
    """Return the messages of a trace that workers take, `[N, M]` int64, each in its order; -1 fills up.

    A message is its number among those of all rings, whose receivers are `to` `[N, R, K]`: `(sender R + place) K + slot`.
    """
    receivers, found = to.tolist(), [list[int]() for _ in to]
    for i, (j, s) in ((i, message) for i, messages in taken for message in messages):
        place = trace.places[j, s]
        its = sum(receivers[j][place : place + 1], [])
        rule = "the messages in flight in the state are not those of the trace: it has settled, or is of another trace."
        require(i in its, call, rule)
        found[i].append((j * to.shape[1] + place) * to.shape[2] + its.index(i))
    return filled_up(found)


def filled_up(rows: list[list[int]]) -> Tensor:
    """Return lists of different lengths as `[N, M]` int64, filled up with -1."""
    most = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int64).view(len(rows), most)
