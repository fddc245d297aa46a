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


class _Sent(NamedTuple):
    """Messages of a step or of a part of it."""

    senders: Tensor
    receivers: Tensor
    payloads: Tensor
    are_away: Tensor
    """True for messages to another node."""
    rounds: float


def _ring(ranks: Tensor, node: Tensor) -> _Sent:
    """Return a ring all-reduce of these workers."""
    after, rounds = ranks.roll(-1), 2.0 * (len(ranks) - 1)
    return _Sent(ranks, after, torch.full((len(ranks),), rounds / len(ranks)), node[ranks] != node[after], rounds)


def _to_each(ranks: Tensor, node: Tensor) -> _Sent:
    """Return a message from each of these workers to each other one, summed up: each sends as many as it receives."""
    on_node, twice = node[ranks].bincount()[node[ranks]], ranks.repeat(2)
    payloads = torch.cat([on_node - 1, len(ranks) - on_node]).float()
    return _Sent(twice, twice, payloads, torch.arange(len(twice)) >= len(ranks), 1.0)


def _mean(topology: Topology, cluster: Cluster, average: Callable[[Tensor, Tensor], _Sent]) -> Traffic:
    steps = topology.cycle or range(_SAMPLED)
    rounds = [_of_round(topology, t, cluster, average) for t in steps]
    return Traffic(*(sum(column) / len(rounds) for column in zip(*rounds, strict=True)))


def _of_round(topology: Topology, t: int, cluster: Cluster, average: Callable[[Tensor, Tensor], _Sent]) -> Traffic:
    this, n = topology.round(torch.tensor(t)), topology.num_workers
    node = torch.arange(n) // cluster.workers_per_node
    i, k = (this.heard != torch.arange(n)[:, None]).nonzero().T
    j = this.sources[i, k]
    sent = [_Sent(j, i, torch.ones(len(i)), node[j] != node[i], float(len(i) > 0))]
    if this.groups is not None and this.mean_weights is not None:
        for number in this.groups[this.mean_weights != 0].unique():
            sent.append(average((this.groups == number).nonzero()[:, 0], node))
    senders, receivers, payloads, are_away = (torch.cat(column) for column in list(zip(*sent, strict=True))[:4])

    def most(ends: Tensor, which: Tensor) -> float:
        return float(torch.zeros(n).index_add_(0, ends[which], payloads[which]).max())

    return Traffic(
        sent=float(payloads.sum()) / n,
        between=max(most(node[senders], are_away), most(node[receivers], are_away)),
        inside=max(most(senders, ~are_away), most(receivers, ~are_away)),
        rounds=max(part.rounds for part in sent),
    )
