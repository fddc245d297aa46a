"""Payloads of a step: what a schedule sends through the busiest interface between nodes, and inside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decentfn.timing import Cluster
from decentfn.timing.network import messages_of
from decentfn.topologies import Topology

_SAMPLED = 64


class Payloads(NamedTuple):
    """Mean over the steps of a schedule, in payloads (one payload: the parameters of a worker)."""

    sent: float
    """Payloads that a worker sends in a step, on average."""
    between: float
    """Payloads through the busiest interface between nodes, in its busier direction."""
    inside: float
    """Payloads between a worker and others of its node, in its busier direction, of the busiest worker."""


def sampled(topology: Topology) -> range:
    """Return the steps of a schedule's first period, or some of a random one."""
    return topology.cycle or range(_SAMPLED)


def of_schedule(topology: Topology, cluster: Cluster, *, to_each: bool = False) -> Payloads:
    """Return the traffic of a topology's steps; averages in groups are ring all-reduces, or messages `to_each` other one."""
    rounds = [_of_round(topology, t, cluster, to_each) for t in sampled(topology)]
    return Payloads(*(sum(column) / len(rounds) for column in zip(*rounds, strict=True)))


def _of_round(topology: Topology, t: int, cluster: Cluster, to_each: bool) -> Payloads:
    node = np.arange(topology.num_workers) // cluster.workers_per_node
    m = messages_of(topology, t, node, to_each=to_each)

    def most(is_away: bool) -> float:
        ends, payloads = (m.senders, m.receivers), m.payloads * (m.are_away == is_away)
        return max(float(np.bincount(node[end] if is_away else end, payloads, len(node)).max()) for end in ends)

    return Payloads(sent=float(m.payloads.sum()) / len(node), between=most(True), inside=most(False))
