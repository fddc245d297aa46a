"""Messages of a round of a schedule, and the seconds in which they cross links that they share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from decentfn.timing.cluster import Cluster, Link, Links
from decentfn.topologies import Topology

_MOST_PAIRS = 64
"""Members of a group whose pairs are rows."""


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

    Averages in groups are ring all-reduces, from each worker to the one before, as gloo's; with `to_each` (compressed messages, which are not averaged on their way) each
    member sends to each other one; of more than 64, rows are sums of those to the own node and of those to others.
    """
    this, n = topology.round(t), topology.num_workers
    i, k = (this.heard != torch.arange(n)[:, None]).nonzero().T.numpy()
    j = this.sources.numpy()[i, k]
    one = np.ones(len(i))
    parts = [Messages(j, i, one, node[j] != node[i], 2 * one, -one.astype(int))]
    if this.groups is not None and this.mean_weights is not None:
        for number in this.groups[this.mean_weights != 0].unique().tolist():
            ranks = (this.groups == number).nonzero()[:, 0].numpy()
            r, before = len(ranks), np.roll(ranks, 1)
            shares, rounds, group = np.full(r, 2 * (r - 1) / r), np.full(r, 2.0 * r - 1), np.full(r, number)
            if not to_each:
                parts.append(Messages(ranks, before, shares, node[ranks] != node[before], rounds, group))
                continue
            for after in (np.roll(ranks, -k) for k in range(1, r if r <= _MOST_PAIRS else 1)):
                away = node[ranks] != node[after]
                parts.append(Messages(ranks, after, np.ones(r), away, np.full(r, 2.0), group))
            on_node = np.bincount(node[ranks])[node[ranks]]
            for payloads, is_away in ((on_node - 1.0, False), (r - on_node + 0.0, True)) if r > _MOST_PAIRS else ():
                parts.append(Messages(ranks, ranks, payloads, np.full(r, is_away), np.full(r, 2.0), group))
    return Messages(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class Network:
    """Interfaces of nodes, and of workers inside them, and what they carry in a second."""

    def __init__(self, of: Cluster | Links) -> None:
        if isinstance(of, Links):
            of = Cluster(of.num_workers, Link(1), links=of)
        links = of.links or Links([of.between.gbit_per_s] * of.nodes, of.between.latency_ms, of.between.efficiency)
        n, inside = of.nodes, of.inside or of.between
        self.node, self.shards = np.arange(of.num_workers) // of.workers_per_node, of.processes_per_worker
        rates, is_own = np.asarray(links.gbit_per_s, dtype=float) * (links.efficiency * 1e9 / 8), np.eye(n, dtype=bool)
        out, into, self.pairs = rates, rates, np.broadcast_to(np.inf, (n, n))
        if rates.ndim == 2:
            (out, into), self.pairs = (
                (np.where(is_own, 0, rates).max(k) for k in (1, 0)),
                np.where(is_own, np.inf, rates),
            )
        within = np.full(len(self.node), inside.gbit_per_s * inside.efficiency * 1e9 / 8)
        self.out, self.into = np.concatenate([out, within]), np.concatenate([into, within])
        self.latency = np.broadcast_to(np.asarray(links.latency_ms, dtype=float) / 1e3, (n, n))
        self.inside = inside.latency_ms / 1e3

    def interfaces(self, m: Messages, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the interface by which each message leaves, and of that by which it arrives."""
        ends = (m.senders, m.receivers)
        return tuple(np.where(m.are_away, node[..., end], len(self.pairs) + end) for end in ends)  # pyright: ignore[reportReturnType]

    def latencies(self, m: Messages, node: np.ndarray) -> np.ndarray:
        """Return the seconds of each as an empty message."""
        return np.where(m.are_away, self.latency[node[..., m.senders], node[..., m.receivers]], self.inside)

    def seconds(self, m: Messages, nbytes: float, node: np.ndarray | None = None) -> np.ndarray:
        """Return how long each message travels if all of the round travel at once and share interfaces fairly.

        With `node` `[..., N]`, each worker's, the nodes are in another order.
        """
        node = self.node if node is None else node
        loads = self._loads(m, nbytes)
        shared = [np.bincount(at, loads, len(self.out))[at] for at in self.interfaces(m, self.node)]
        leaves, arrives = self.interfaces(m, node)
        longest = np.maximum(shared[0] / self.out[leaves], shared[1] / self.into[arrives])
        longest = np.maximum(longest, loads / self.pairs[node[..., m.senders], node[..., m.receivers]])
        return np.where(m.payloads > 0, longest + m.rounds * self.latencies(m, node), 0.0)

    def occupies(self, m: Messages, nbytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how long each message occupies the interfaces where it leaves and arrives, and its link; no latency."""
        leaves, arrives = self.interfaces(m, self.node)
        loads, link = self._loads(m, nbytes), self.pairs[self.node[m.senders], self.node[m.receivers]]
        return loads / self.out[leaves], loads / self.into[arrives], loads / link

    def _loads(self, m: Messages, nbytes: float) -> np.ndarray:
        return m.payloads * nbytes / np.where(m.are_away, 1, self.shards)


def group_maximum(m: Messages, values: np.ndarray) -> np.ndarray:
    """Replace the values of a group's messages by their maximum."""
    most = np.full(len(m.senders) and m.group.max() + 2, -np.inf)
    np.maximum.at(most, m.group + 1, values)
    return np.where(m.group < 0, values, most[m.group + 1])
