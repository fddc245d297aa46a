"""Random traces, runs of a trace in the simulator, and recorded runs of asynchronous local SGD."""

import heapq
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import decentfn as df
from decentfn.timing import Trace, schedule_name

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "asynchronous_local_sgd.json").read_text())
"""Clocks printed in the notebook of google-deepmind/asyncdiloco, and outer parameters computed by its classes."""


def random_trace(topology, events, seed, rates=None, late=0.5, kept=0.2):
    """Workers step at random by their rates; a message is as late as the draws say, and some mass stays at its sender."""
    draw, n = random.Random(seed), topology.num_workers
    mail = [[] for _ in range(n)]
    taken, sent, ended, after = ([[] for _ in range(n)] for _ in range(4))
    for now in range(events):
        [i] = draw.choices(range(n), rates)
        here = [message for message in mail[i] if draw.random() >= late]
        mail[i] = [message for message in mail[i] if message not in here]
        k = len(sent[i])
        went = [j >= 0 and draw.random() >= kept for j in topology.peers(k).destinations[i]]
        for goes, j in zip(went, topology.peers(k).destinations[i], strict=True):
            if goes:
                mail[j].append((i, k))
        taken[i].append(here)
        sent[i].append(went)
        ended[i].append(float(now))
        after[i].append(draw.randrange(len(here) + 1))  # so many of them after the gradient
    taken = [its + [rest] for its, rest in zip(taken, mail, strict=True)]
    return Trace(schedule_name(topology), n, taken, sent, ended, late=after)


def replayed(algorithm, trace, starts, batches, *, compiled=None):
    """The stacked state after a trace, before it settles; `batches(i, k)` is worker i's batch of own step k."""
    init, step = algorithm
    n = trace.num_workers
    state = df.stack(init(starts[0]), n, arrivals=trace)
    state = df.with_params(state, {name: torch.stack([start[name] for start in starts]) for name in starts[0]})
    step = df.simulate(step, n, arrivals=trace)
    if compiled is not None:
        step = df.compile(step, backend=compiled)
    own = list(trace.first)
    for level, events in enumerate(trace.levels):
        for i, k in events:
            own[i] = k
        state, _ = step(state, torch.stack([batches(i, k) for i, k in enumerate(own)]), level)
    return state


def merges(clock, inner_steps, count, wait=0.0):
    """The first merges of asynchronous local SGD (Liu et al., 2024; arXiv:2401.09135): seconds, worker and staleness of each.

    A worker takes its inner steps from the parameters that it saw. Who ends within `wait` seconds of a window's first merge
    is merged in it, in the order of the ends; all of them start again at the window's last merge.
    """
    n, rows = clock.links.num_workers, []
    each = np.broadcast_to(inner_steps, (n,))
    own, seen = np.zeros(n, dtype=int), np.zeros(n, dtype=int)

    def end(i, now):
        lasts = math.fsum(clock.seconds(int(k))[i] for k in range(own[i], own[i] + each[i]))
        own[i] += each[i]
        return float(clock.after(np.full(n, now), np.full(n, lasts))[i]), i

    running = [end(i, 0.0) for i in range(n)]
    heapq.heapify(running)
    while len(rows) < count:
        window, opened = [], running[0][0]
        while running and running[0][0] <= opened + wait:
            now, i = heapq.heappop(running)
            rows.append((now, i, len(rows) - seen[i]))
            window.append(i)
        for i in window:
            seen[i] = len(rows)
            heapq.heappush(running, end(i, rows[-1][0]))
    return Merges(*map(np.array, zip(*rows[:count], strict=True)))


class Merges(NamedTuple):
    seconds: np.ndarray
    worker: np.ndarray
    staleness: np.ndarray
