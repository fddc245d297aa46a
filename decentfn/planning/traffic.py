"""Traffic of a step: what a schedule sends through the busiest interface between nodes, and inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.planning.cluster import Cluster
from decentfn.topologies import Topology

_SAMPLED = 64


class Traffic(NamedTuple):
    """Mean over the steps of a schedule, in payloads (one payload: the parameters of a worker)."""

    sent: float
    """Payloads that a worker sends in a step, on average."""
    between: float
    """Payloads through the busiest interface between nodes, in its busier direction."""
    inside: float
    """Payloads between a worker and others of its node, in its busier direction, of the busiest worker."""
    rounds: float
    """Messages one after another: 1, and 2(r-1) for a ring all-reduce of r workers."""


def of_schedule(topology: Topology, cluster: Cluster) -> Traffic:
    """Return the traffic of a topology's steps; averages in groups are ring all-reduces."""
    return _mean(topology, cluster, _ring)


def of_messages(topology: Topology, cluster: Cluster) -> Traffic:
    """Return the traffic of compressed steps: in a group of r each worker sends r - 1 messages; none is averaged on its way."""
    return _mean(topology, cluster, _to_each)


def of_all_reduce(members: int, cluster: Cluster) -> Traffic:
    """Return the traffic of a ring all-reduce over all workers; a ring crosses each node's interface once."""
    share = 2 * (members - 1) / members
    crosses = share if cluster.nodes > 1 else 0.0
    return Traffic(share, crosses, share if cluster.workers_per_node > 1 else 0.0, 2 * (members - 1))


class _Sums:
    """Payloads of one step, added up as it goes: of all workers, per node, and per worker inside its node."""

    def __init__(self, cluster: Cluster) -> None:
        self.node = torch.arange(cluster.num_workers) // cluster.workers_per_node
        self.sent = self.rounds = 0.0
        self.out, self.into = torch.zeros(cluster.nodes), torch.zeros(cluster.nodes)
        self.near_out, self.near_in = torch.zeros(cluster.num_workers), torch.zeros(cluster.num_workers)

    def send(self, here: int, there: int, payloads: float = 1.0) -> None:
        """Count a message from one worker to another."""
        self.sent += payloads
        if self.node[here] == self.node[there]:
            self.near_out[here] += payloads
            self.near_in[there] += payloads
        else:
            self.out[self.node[here]] += payloads
            self.into[self.node[there]] += payloads


def _ring(sums: _Sums, ranks: Tensor) -> None:
    """Count a ring all-reduce of these workers."""
    share = 2 * (len(ranks) - 1) / len(ranks)
    for here, there in zip(ranks.tolist(), ranks.roll(-1).tolist(), strict=True):
        sums.send(here, there, share)
    sums.rounds = max(sums.rounds, 2.0 * (len(ranks) - 1))


def _to_each(sums: _Sums, ranks: Tensor) -> None:
    """Count a message from each of these workers to each other one."""
    its_node = sums.node[ranks]
    on_node = torch.bincount(its_node, minlength=len(sums.out))
    for away in (sums.out, sums.into):
        away += on_node * (len(ranks) - on_node)
    for near in (sums.near_out, sums.near_in):
        near[ranks] += on_node[its_node] - 1
    sums.sent += len(ranks) * (len(ranks) - 1)
    sums.rounds = max(sums.rounds, 1.0)


def _mean(topology: Topology, cluster: Cluster, average: Callable[[_Sums, Tensor], None]) -> Traffic:
    steps = range(topology.period or _SAMPLED)
    rounds = [_of_round(topology, t, cluster, average) for t in steps]
    return Traffic(*(sum(column) / len(rounds) for column in zip(*rounds, strict=True)))


def _of_round(topology: Topology, t: int, cluster: Cluster, average: Callable[[_Sums, Tensor], None]) -> Traffic:
    this, sums = topology.round(torch.tensor(t)), _Sums(cluster)
    for i, sources in enumerate(this.sources.tolist()):
        for j in sources:
            if j >= 0 and j != i:
                sums.send(j, i)
                sums.rounds = 1.0
    if this.groups is not None and this.mean_weights is not None:
        for number in this.groups[this.mean_weights != 0].unique():
            average(sums, (this.groups == number).nonzero()[:, 0])
    between, inside = torch.maximum(sums.out, sums.into), torch.maximum(sums.near_out, sums.near_in)
    return Traffic(sums.sent / topology.num_workers, float(between.max()), float(inside.max()), sums.rounds)
