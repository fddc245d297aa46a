"""Steps of workers that wait for nobody: when, which messages arrive by then, and which are not sent."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from decentfn.timing.network import messages_of
from decentfn.timing.replay import LEAST_MASS, shares_of
from decentfn.timing.trace import Event, Trace, schedule_name
from decentfn.topologies import Topology

if TYPE_CHECKING:
    from decentfn.timing.clock import Clock


class _Letter(NamedTuple):
    arrives: float
    event: Event
    mass: float


def own_steps(
    clock: Clock, topology: Topology, nbytes: float, steps: int, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Trace]:
    """Return start, end and wait `[steps, N]`, and the trace until the first worker has taken all of its steps.

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
        has_mass, held, flags = mass[i] * (1 - sum(shares)) >= LEAST_MASS, mass[i], list[bool]()
        for share, to in zip(shares, topology.peers(t).destinations[i], strict=True):
            box = boxes.setdefault((i, to), [])
            travels = len(box) > 1 or (bool(box) and box[0].arrives > now)
            flags.append(to >= 0 and share > 0 and has_mass and not travels)
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
    return rows[0], rows[1], rows[2], Trace(schedule_name(topology), n, taken, sent, ended, (first,) * n, late)  # pyright: ignore[reportArgumentType]
