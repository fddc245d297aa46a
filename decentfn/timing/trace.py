"""Trace of a run of workers on their own clocks: which messages each took in each of its own steps.

Arrivals are data, as peers are. Ranks record a trace, a clock computes one, and the simulator replays either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from decentfn.core.arguments import require
from decentfn.topologies import Topology

Event = tuple[int, int]
"""A worker and one of its own steps."""

_SAMPLED = 64
"""Rounds of a random schedule that a trace's name of it depends on."""


def schedule_name(topology: Topology) -> str:
    """Return a topology's name and a digest of its rounds, by which a trace knows it."""
    rounds = topology.steps(_SAMPLED) if topology.draw else range(len(topology.sources))
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
        assert self.levels

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

    def require_of(self, call: str, topology: Topology) -> None:
        """Raise ValueError unless this is a trace of `topology`; `call` is the user's call."""
        if self.topology != (name := schedule_name(topology)):
            raise ValueError(
                f"{call}: a trace of {self.num_workers} workers on the schedule {self.topology!r}, but the algorithm's is {name!r} of "
                f"{topology.num_workers} (a name and a digest of its rounds); replay it with the algorithm that it was recorded with."
            )

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
        level: dict[Event, int] = {}
        at, is_stuck = list(self.first), False
        while not is_stuck:
            is_stuck = True
            for i, steps in enumerate(self.sent):
                while (k := at[i] - self.first[i]) < len(steps) and all(one in level for one in self.taken[i][k]):
                    before = [level[one] for one in self.taken[i][k]] + ([level[i, at[i] - 1]] if k else [])
                    level[i, at[i]] = max(before, default=-1) + 1
                    at[i], is_stuck = at[i] + 1, False
        stuck = [(i, s) for i, s in enumerate(at) if s - self.first[i] < len(self.sent[i])]
        if stuck:
            raise ValueError(f"Trace: the steps {stuck[:4]} (worker, own step) take messages of later steps.")
        found: list[list[Event]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
        for event in sorted(level):
            found[level[event]].append(event)
        return tuple(map(tuple, found))

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
