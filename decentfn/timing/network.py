"""Messages of a round of a schedule, and the seconds in which they cross links that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from decentfn.core.arguments import array, require
from decentfn.timing.cluster import Cluster, measured
from decentfn.topologies import Topology


class Messages(NamedTuple):
    """Messages of a round, each a row. Those of a group begin and end together."""

    senders: np.ndarray
    receivers: np.ndarray
    payloads: np.ndarray
    """How many times a worker's payload the message is, or the messages of an average together."""
    are_away: np.ndarray
    """True for messages to another node."""
    rounds: np.ndarray
    """Latencies: 2 of a message, whose receiver says before that it is ready; 2r-1 of a ring all-reduce of r workers."""
    group: np.ndarray
    """Number of the group, or -1."""


def messages_of(topology: Topology, t: int, node: np.ndarray, *, to_each: bool = False) -> Messages:
    """Return the messages of step `t`.

    Averages in groups are ring all-reduces; with `to_each` (compressed messages, which are not averaged on their way) each
    member sends to each other one, and rows are sums of those to the own node and of those to others.
    """
    this, n = topology.round(t), topology.num_workers
    i, k = (this.heard != torch.arange(n)[:, None]).nonzero().T.numpy()
    j = this.sources.numpy()[i, k]
    one = np.ones(len(i))
    parts = [Messages(j, i, one, node[j] != node[i], 2 * one, -one.astype(int))]
    if this.groups is not None and this.mean_weights is not None:
        for number in this.groups[this.mean_weights != 0].unique().tolist():
            ranks = (this.groups == number).nonzero()[:, 0].numpy()
            r, after = len(ranks), np.roll(ranks, -1)
            shares, rounds, group = np.full(r, 2 * (r - 1) / r), np.full(r, 2.0 * r - 1), np.full(r, number)
            if not to_each:
                parts.append(Messages(ranks, after, shares, node[ranks] != node[after], rounds, group))
                continue
            on_node = np.bincount(node[ranks])[node[ranks]]
            for payloads, is_away in ((on_node - 1.0, False), (r - on_node + 0.0, True)):
                parts.append(Messages(ranks, ranks, payloads, np.full(r, is_away), np.full(r, 2.0), group))
    return Messages(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Links:
    """Links of workers that are a node each, where they are unequal.

    Args:
        gbit_per_s: nominal rates > 0, 10^9 bits per second: `[N]`, of each worker's interface in each direction, or `[N, N]`,
            from the worker of the row to that of the column; an interface is then as fast as its fastest link.
        latency_ms: time of an empty message, >= 0: a number, or `[N, N]` likewise.
        efficiency: share of the rate that payloads get, in (0, 1].

    >>> Links([1, 1, 0.1]).num_workers  # worker 2 has a slow link
    3
    """

    gbit_per_s: object
    latency_ms: object = 0.1
    efficiency: float = 0.93

    def __post_init__(self) -> None:
        rates, latency = array("Links", "rates", self.gbit_per_s), array("Links", "latencies", self.latency_ms)
        n = len(rates) if rates.ndim else 0
        rule = "rates are [N] or [N, N] numbers > 0; the diagonal does not count."
        is_shaped = n > 0 and rates.shape in ((n,), (n, n))
        others = rates[~np.eye(n, dtype=bool)] if rates.ndim == 2 and is_shaped else rates
        require(is_shaped and bool(((others > 0) & (others < np.inf)).all()), "Links", rule, gbit_per_s=self.gbit_per_s)
        rule = "a latency is a number >= 0, or [N, N] of them."
        require(
            latency.shape in ((), (n, n)) and bool(((latency >= 0) & (latency < np.inf)).all()),
            "Links",
            rule,
            latency_ms=self.latency_ms,
        )
        require(0 < self.efficiency <= 1, "Links", "a share of the rate, in (0, 1].", efficiency=self.efficiency)

    @classmethod
    def measured(cls, path: str | Path) -> Links:
        """Return the links of a file of `decentfn links`, of nodes of one process each; those not measured are as the slowest.

        Raises:
            ValueError: it is no such file, or a node has several processes.
        """
        nodes, pairs = measured("Links", path)
        rule = "a node is one process; the clock takes a Cluster.measured, too."
        require(all(len(its) == 1 for its in nodes), "Links.measured", rule, processes_of_nodes=[*map(len, nodes)])
        shape = len(nodes), len(nodes)
        gbit = np.full(shape, min(pair.gbit for pair in pairs))
        latency = np.full(shape, max(pair.latency_ms for pair in pairs))
        for pair in pairs:
            gbit[pair.ends], latency[pair.ends] = pair.gbit, pair.latency_ms
        return cls(gbit, latency)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(np.asarray(self.gbit_per_s))


class Network:
    """Interfaces of nodes, and of workers inside them, and what they carry in a second."""

    def __init__(self, links: Cluster | Links) -> None:
        n, self.shards = links.num_workers, 1
        self.pairs: np.ndarray | None = None
        if isinstance(links, Links):
            self.node, rates = np.arange(n), np.asarray(links.gbit_per_s, dtype=float) * (links.efficiency * 1e9 / 8)
            out = into = rates
            if rates.ndim == 2:
                rates = np.where(np.eye(n, dtype=bool), 0, rates)
                out, into, self.pairs = rates.max(1), rates.max(0), np.where(np.eye(n, dtype=bool), np.inf, rates)
            self.out, self.into = (np.concatenate([x, np.full(n, np.inf)]) for x in (out, into))
            latency = np.asarray(links.latency_ms, dtype=float) / 1e3
            self.latency = np.broadcast_to(latency, (n, n)) if latency.ndim else latency
        else:
            self.node, self.shards = np.arange(n) // links.workers_per_node, links.processes_per_worker
            both = (links.between, links.inside or links.between)
            rates = [link.gbit_per_s * link.efficiency * 1e9 / 8 for link in both]
            self.out = self.into = np.repeat(rates, (links.nodes, n))
            self.latency = np.array([link.latency_ms / 1e3 for link in both])

    def interfaces(self, m: Messages) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the interface by which each message leaves, and of that by which it arrives."""
        nodes = self.node[-1] + 1
        ends = (m.senders, m.receivers)
        return tuple(np.where(m.are_away, self.node[end], nodes + end) for end in ends)  # pyright: ignore[reportReturnType]

    def latencies(self, m: Messages) -> np.ndarray:
        """Return the seconds of each as an empty message."""
        if self.latency.ndim == 2:
            return self.latency[m.senders, m.receivers]
        return self.latency[np.where(m.are_away, 0, 1)] if self.latency.ndim else self.latency.repeat(len(m.senders))

    def seconds(self, m: Messages, nbytes: float) -> np.ndarray:
        """Return how long each message travels if all of the round travel at once and share interfaces fairly."""
        loads = m.payloads * nbytes / np.where(m.are_away, 1, self.shards)
        leaves, arrives = self.interfaces(m)
        longest = np.maximum(
            (np.bincount(leaves, loads, len(self.out)) / self.out)[leaves],
            (np.bincount(arrives, loads, len(self.into)) / self.into)[arrives],
        )
        if self.pairs is not None:
            longest = np.maximum(longest, loads / self.pairs[m.senders, m.receivers])
        return group_maximum(m, np.where(m.payloads > 0, longest + m.rounds * self.latencies(m), 0.0))

    def occupies(self, m: Messages, nbytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how long each message occupies the interfaces where it leaves and arrives, and its link; no latency."""
        leaves, arrives = self.interfaces(m)
        link = np.inf if self.pairs is None else self.pairs[m.senders, m.receivers]
        loads = m.payloads * nbytes / np.where(m.are_away, 1, self.shards)
        return loads / self.out[leaves], loads / self.into[arrives], loads / link


def group_maximum(m: Messages, values: np.ndarray) -> np.ndarray:
    """Replace the values of a group's messages by their maximum."""
    most = np.full(len(m.senders) and m.group.max() + 2, -np.inf)
    np.maximum.at(most, m.group + 1, values)
    return np.where(m.group < 0, values, most[m.group + 1])
