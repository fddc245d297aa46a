"""Traffic of a step: what a schedule sends through the busiest interface between nodes, and inside them."""

from __future__ import annotations

from typing import NamedTuple

import torch

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
    """Return the traffic of a topology's steps."""
    steps = range(topology.period or _SAMPLED)
    rounds = [_of_round(topology, t, cluster) for t in steps]
    return Traffic(*(sum(column) / len(rounds) for column in zip(*rounds, strict=True)))


def of_all_reduce(members: int, cluster: Cluster) -> Traffic:
    """Return the traffic of a ring all-reduce over all workers; a ring crosses each node's interface once."""
    share = 2 * (members - 1) / members
    crosses = share if cluster.nodes > 1 else 0.0
    return Traffic(share, crosses, share if cluster.workers_per_node > 1 else 0.0, 2 * (members - 1))


def _of_round(topology: Topology, t: int, cluster: Cluster) -> Traffic:
    this, n = topology.round(torch.tensor(t)), topology.num_workers
    node = torch.arange(n) // cluster.workers_per_node
    sent = 0.0
    out, into = torch.zeros(cluster.nodes), torch.zeros(cluster.nodes)
    near_out, near_in = torch.zeros(n), torch.zeros(n)
    for i, sources in enumerate(this.sources.tolist()):
        for j in sources:
            if j < 0 or j == i:
                continue
            sent += 1
            if node[i] == node[j]:
                near_out[j] += 1
                near_in[i] += 1
            else:
                out[node[j]] += 1
                into[node[i]] += 1
    rounds = 1.0 if sent else 0.0
    if this.groups is not None and this.mean_weights is not None:
        for number in this.groups[this.mean_weights != 0].unique():
            ranks = (this.groups == number).nonzero()[:, 0]
            share = 2 * (len(ranks) - 1) / len(ranks)
            sent += share * len(ranks)
            rounds = max(rounds, 2.0 * (len(ranks) - 1))
            for here, there in zip(ranks.tolist(), ranks.roll(-1).tolist(), strict=True):  # the ring
                if node[here] == node[there]:
                    near_out[here] += share
                    near_in[there] += share
                else:
                    out[node[here]] += share
                    into[node[there]] += share
    between, inside = torch.maximum(out, into), torch.maximum(near_out, near_in)
    return Traffic(sent / n, float(between.max()), float(inside.max()), rounds)
