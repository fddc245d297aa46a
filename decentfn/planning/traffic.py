"""Payloads of a step: what a schedule sends through the busiest interface between nodes, and inside them."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

import numpy as np

from decentfn.timing import Cluster
from decentfn.timing.network import Network, messages_of
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
    network, rounds = Network(cluster), list[tuple[float, float, float]]()
    for t in sampled(topology):
        m = messages_of(topology, t, network.node, to_each=to_each)
        both = [np.bincount(at, m.payloads, len(network.out)) for at in network.interfaces(m, network.node)]
        between, inside = np.split(np.maximum(*both), [cluster.nodes])
        rounds.append((float(m.payloads.sum()) / len(inside), float(between.max()), float(inside.max())))
    return Payloads(*map(fmean, zip(*rounds, strict=True)))
