"""Clock of a run: when each worker begins and ends each step, from its seconds of compute and the links."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from decentfn.core import array, at_least, checks_numbers, draws, require
from decentfn.timing.cluster import Cluster, Links
from decentfn.timing.network import Messages, Network, group_maximum, messages_of
from decentfn.timing.trace import LEAST_MASS, Event, Trace, schedule_name, shares_of
from decentfn.topologies import Topology

Outage = tuple[int, float, float]
"""A worker, and the seconds from and until which it does nothing."""


@dataclass(frozen=True)
class Exchange:
    """Messages of an algorithm's steps.

    Args:
        topology: its schedule: `complete` for an all-reduce, `later(H - 1, every(H, complete))` of `df.topologies` for DiLoCo.
        nbytes: bytes of a worker's payload, >= 0.
        begins: share of a step's computation after which the messages leave, in [0, 1]: 0 if parameters travel during the
            computation, 1 if the update is sent.
        delay: messages are awaited at the end of the step that many steps later.
        to_each: in a group, each worker sends to each other one, as compressed messages do; else groups are ring all-reduces.
        is_awaited: False if workers wait for nobody, as in `asynchronous_gradient_push`; `begins` is then 1.
        parts: in so many equal parts the payload leaves from `begins` on, >= 1, the last one after the computation; DDP's buckets
            of 25 MB, of which the first leaves after the share 1/3 + 2/3 / parts. 1: all of it leaves at once.
    """

    topology: Topology
    nbytes: float
    begins: float = 0.0
    delay: int = 0
    to_each: bool = False
    is_awaited: bool = True
    parts: float = 1.0

    def __post_init__(self) -> None:
        require(isinstance(self.topology, Topology), "Exchange", "a Topology.", topology=self.topology)
        require(0 <= self.nbytes < math.inf, "Exchange", "bytes >= 0.", nbytes=self.nbytes)
        require(0 <= self.begins <= 1, "Exchange", "a share of the computation, in [0, 1].", begins=self.begins)
        require(1 <= self.parts < math.inf, "Exchange", "a number of parts >= 1.", parts=self.parts)
        at_least("Exchange", "delay", self.delay, 0)
        rule = "workers that wait for nobody send messages; averages in groups are awaited."
        require(self.is_awaited or not self.topology.has_groups, "Exchange", rule, topology=self.topology.name)


class Timeline(NamedTuple):
    """Seconds since the start of a run; row k is each worker's own step k, NaN if a slow worker has not taken it."""

    start: np.ndarray
    """`[steps, N]`, when the step begins."""
    end: np.ndarray
    """`[steps, N]`, when it ends."""
    waited: np.ndarray
    """`[steps, N]`, how long the worker waited for messages in it."""
    trace: Trace | None = None
    """Arrivals, for workers that wait for nobody; until the first of them has taken all of its steps."""
    messages: np.ndarray | None = None
    """`[M, 4]`, sender, receiver, when it leaves and arrives: messages of the first 1,000 steps, if they are awaited."""

    def save(self, path: str | Path) -> None:
        """Write what `decentfn report` draws: the times as JSON, or the trace."""
        if self.trace is not None:
            return self.trace.save(path)
        times = zip(self._fields, self, strict=True)
        Path(path).write_text(json.dumps({name: x.tolist() for name, x in times if isinstance(x, np.ndarray)}))


@dataclass(frozen=True)
class Clock:
    """Clock of a run; make one with `df.clock`."""

    compute: Any
    links: Cluster | Links
    outages: Sequence[Outage] = ()
    seed: int = 0
    network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = self.links.num_workers
        if not callable(self.compute):
            seconds = array("clock", "seconds of compute", self.compute)
            rule = f"a number >= 0, [{n}] of them, [steps, {n}], or a function."
            is_right = seconds.shape in ((), (n,)) or (seconds.ndim == 2 and seconds.shape[1] == n)
            is_right = is_right and bool(np.isfinite(seconds).all() and (seconds >= 0).all())
            require(is_right, "clock", rule, compute=self.compute)
        for worker, since, until in self.outages:
            rule = f"outages are (worker < {n}, from, until), 0 <= from <= until."
            require(0 <= worker < n and 0 <= since <= until < math.inf, "clock", rule, outages=self.outages)
        object.__setattr__(self, "outages", tuple(sorted(self.outages, key=lambda its: its[1])))
        object.__setattr__(self, "network", Network(self.links))

    def seconds(self, step: int) -> np.ndarray:
        """Return the seconds of compute of each worker's own step, `[N]`."""
        n = self.links.num_workers
        if callable(self.compute):
            drawn = self.compute(draws.uniform(self.seed, step, 0, (n,)).numpy())
            found = np.broadcast_to(array("clock", "seconds of compute", drawn), (n,))
            require(bool((found >= 0).all()), "clock", "seconds of compute are >= 0.", compute=drawn)
            return found
        given = np.asarray(self.compute, dtype=float)
        if given.ndim < 2:
            return np.broadcast_to(given, (n,))
        require(step < len(given), "clock", f"compute has {len(given)} rows, which step {step} exceeds.")
        return given[step]

    def after(self, now: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Return when `[N]` work that begins `now` and takes `seconds` is done; outages interrupt it."""
        done, counted = now + seconds, now.copy()
        for i, since, until in self.outages:  # in the order of their starts; they may overlap
            if counted[i] < until and done[i] > since:
                done[i] += until - max(since, counted[i])
                counted[i] = until
        return done

    @checks_numbers
    def timeline(self, exchange: Exchange, steps: int, *, first: int = 0) -> Timeline:
        """Return when each worker begins and ends its steps `first`, `first` + 1, ...

        A message travels once its sender and its receiver have begun their exchanges of that step and have ended earlier
        ones; messages of a step share interfaces fairly. A step ends when its computation is done and its messages have
        left and arrived (or those of the step `delay` steps before).

        Raises:
            ValueError: a topology of another size, or fewer rows of recorded seconds than steps.

        >>> import decentfn as df
        >>> four = df.clock([0.1, 0.1, 0.1, 0.3], df.planning.Cluster(4, df.planning.Link(10)))  # one slow worker
        >>> ring = df.timing.Exchange(df.topology("ring", 4), nbytes=1e6)
        >>> round(float(100 / four.timeline(ring, 100).end[-1].max()), 2)  # steps per second, of 10
        3.33
        """
        at_least("timeline", "steps", steps, 1)
        made, n = exchange.topology, self.links.num_workers
        rule = f"the clock has {n} workers."
        require(made.num_workers == n, "timeline", rule, topology=made.name, num_workers=made.num_workers)
        if not exchange.is_awaited:
            return _own_steps(self, made, exchange.nbytes, steps, first)
        rows, known, travels = np.zeros((3, steps, n)), dict[int, tuple[Messages, np.ndarray]](), list[np.ndarray]()
        now, free, arrived = np.zeros(n), np.zeros(n), [np.zeros(n)] * exchange.delay
        for k in range(steps):
            compute, t = self.seconds(first + k), first + k
            if (place := t if made.draw else t % len(made.sources)) not in known:
                known = {} if made.draw else known
                known[place] = self.travels(exchange, t)
            (m, lasts), done = known[place], self.after(now, compute)
            ready = np.maximum(self.after(now, exchange.begins * compute), free)
            leave = group_maximum(m, np.maximum(ready[m.senders], ready[m.receivers]))
            ends = leave + lasts
            if exchange.parts > 1:
                last = group_maximum(m, np.maximum(done[m.senders], done[m.receivers])) + lasts / exchange.parts
                ends = np.maximum(ends, last)
            if k < 1000:
                travels.append(np.stack([m.senders, m.receivers, leave, ends], 1))
            there = np.zeros(n)
            np.maximum.at(there, np.concatenate([m.senders, m.receivers]), np.concatenate([ends, ends]))
            arrived, free = [*arrived, there], np.maximum(free, there)
            rows[0, k], now = now, np.maximum(done, arrived.pop(0))
            rows[1, k], rows[2, k] = now, now - done
        start, end, waited = rows
        return Timeline(start, end, waited, None, np.concatenate(travels))

    def travels(self, exchange: Exchange, t: int) -> tuple[Messages, np.ndarray]:
        """Return the messages of step `t`, and the seconds that each travels."""
        m = messages_of(exchange.topology, t, self.network.node, to_each=exchange.to_each)
        return m, group_maximum(m, self.network.seconds(m, exchange.nbytes))

    def exchange(self, exchange: Exchange, steps: Sequence[int]) -> tuple[float, float]:
        """Return the mean seconds of these steps' messages alone: of those between nodes, and of those inside."""
        found = [self.travels(exchange, t) for t in steps]
        both = [[lasts[m.are_away == are].max(initial=0.0) for m, lasts in found] for are in (True, False)]
        return float(np.mean(both[0])), float(np.mean(both[1]))


@checks_numbers
def clock(
    compute: float | Sequence[float] | np.ndarray | Tensor | Callable[[np.ndarray], Any],
    links: Cluster | Links,
    *,
    outages: Sequence[Outage] = (),
    seed: int = 0,
) -> Clock:
    """Return the clock of a run: seconds of its steps, on given workers and links.

    Args:
        compute: seconds per step without messages, >= 0: a number, one per worker `[N]`, recorded ones `[steps, N]`, or a
            function of `[N]` numbers uniform in [0, 1), drawn by (seed, step, worker): `lambda u: 0.1 + 0.2 * (u < 0.1)`.
        links: `df.planning.Cluster`, or `df.timing.Links` if they are unequal.
        outages: (worker, from, until) in seconds; the worker does nothing then.
        seed: of the draws.

    Raises:
        ValueError: a number out of its range, or of another number of workers.
    """
    rule = "a df.planning.Cluster or df.timing.Links."
    require(isinstance(links, (Cluster, Links)), "clock", rule, links=links)
    return Clock(compute, links, outages, seed)


class _Letter(NamedTuple):
    arrives: float
    event: Event
    mass: float


def _own_steps(clock: Clock, topology: Topology, nbytes: float, steps: int, first: int) -> Timeline:
    """Return the timeline of workers that wait for nobody: when they step, which messages arrive by then and are not sent.

    A receiver holds one message of each sender until it takes it, and one more may travel: then the sender keeps its mass.
    """
    n = topology.num_workers
    rows, mass, boxes = np.zeros((3, steps, n)), np.ones(n), dict[Event, list[_Letter]]()
    taken: list[list[list[Event]]] = [[] for _ in range(n)]
    sent: list[list[list[bool]]] = [[] for _ in range(n)]
    late: list[list[int]] = [[] for _ in range(n)]
    leaves, enters = np.zeros(len(clock.network.out)), np.zeros(len(clock.network.out))
    events = [(0.0, 1, i) for i in range(n)]  # a time, 0: a step ends, 1: the next one begins, a worker
    until = np.inf

    def take(i: int, now: float, before: float) -> list[Event]:
        found = list[Event]()
        for j in range(n):
            box = boxes.get((j, i), [])
            if box and box[0].arrives < before:
                letter = box.pop(0)
                mass[i] += letter.mass
                found.append(letter.event)
                if box:  # the next one is received from now on
                    box[0] = box[0]._replace(arrives=max(box[0].arrives, math.nextafter(now, math.inf)))
        return found

    while events:
        now, begins, i = heapq.heappop(events)
        if now > until:
            break
        k = len(sent[i])
        if begins:
            if k == steps:
                until = now
                continue
            taken[i].append(take(i, now, math.nextafter(now, math.inf)))
            at = np.full(n, now)
            rows[0, k, i] = now
            rows[1, k, i] = end = clock.after(at, clock.seconds(first + k))[i]
            heapq.heappush(events, (float(end), 0, i))
            continue
        meanwhile, t = take(i, now, now), first + k  # who ends at this time has not sent yet
        taken[i][k] += meanwhile
        late[i].append(len(meanwhile))
        shares, m = shares_of(topology, t)[i].tolist(), messages_of(topology, t, clock.network.node)
        out, into = clock.network.interfaces(m, clock.network.node)
        leaving, entering, link = clock.network.occupies(m, nbytes)
        latency = clock.network.latencies(m, clock.network.node)
        held, flags = mass[i], list[bool]()
        for share, to in zip(shares, topology.peers(t).destinations[i], strict=True):
            box = boxes.setdefault((i, to), [])
            travels = len(box) > 1 or (bool(box) and box[0].arrives > now)
            flags.append(to >= 0 and share > 0 and bool(mass[i] - share * held >= LEAST_MASS) and not travels)
            if not flags[-1]:
                continue
            [row] = np.flatnonzero((m.senders == i) & (m.receivers == to))[:1]
            # Each interface is busy for these bytes at its own rate: a slow one at the other end does not hold it.
            leaves[out[row]] = max(now, leaves[out[row]]) + leaving[row]
            enters[into[row]] = max(now, enters[into[row]]) + entering[row]
            done = max(leaves[out[row]], enters[into[row]], now + link[row])
            box.append(_Letter(float(done + latency[row]), (i, t), share * held))
            mass[i] -= share * held
        sent[i].append(flags)
        heapq.heappush(events, (now, 1, i))
    ended = [rows[1, : len(flags), i].tolist() for i, flags in enumerate(sent)]
    for i, (its, flags) in enumerate(zip(taken, sent, strict=True)):
        left = [letter.event for j in range(n) for letter in boxes.get((j, i), [])]  # for df.settle
        its[len(flags) :] = [sum(its[len(flags) :], left)]
        rows[:, len(flags) :, i] = np.nan
    trace = Trace(schedule_name(topology), n, taken, sent, ended, (first,) * n, late)  # pyright: ignore[reportArgumentType]
    return Timeline(rows[0], rows[1], rows[2], trace)
