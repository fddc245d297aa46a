"""Order of workers: which of them is which of a schedule's, where the links between nodes are unequal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np

from decentfn.planning.methods import sampled
from decentfn.timing import Cluster, Links
from decentfn.timing.network import Network, messages_of
from decentfn.topologies import Topology, complete, relabel

_ALL_OF = 7
"""Nodes of which all orders are tried; of more, swaps of two."""
_MESSAGES, _SWEEPS, _PREDICTED = 2**20, 64, 3
"""Messages of the swaps that one sweep looks at, sweeps, and schedules that are predicted in their orders."""


def slowest_link(cluster: Cluster, topology: Topology, nbytes: float, *, to_each: bool) -> str:
    """Name the link between unequal nodes on which a message of a schedule takes longest."""
    node, links = np.arange(cluster.num_workers) // cluster.workers_per_node, cluster.links
    assert links is not None
    rounds = [messages_of(topology, t, node, to_each=to_each) for t in sampled(topology)]
    used = {(i, j) for m in rounds for i, j in zip(node[m.senders].tolist(), node[m.receivers].tolist(), strict=True)}
    found = {ends: links.link(*ends) for ends in sorted(used) if ends[0] != ends[1]}
    its = max(found, key=lambda ends: nbytes * 8e-9 / found[ends].gbit_per_s + found[ends].latency_ms / 1e3)
    name = [links.names[i] if links.names else f"node {i}" for i in its]
    rate, late = found[its].gbit_per_s * 1e3, found[its].latency_ms
    return f"The slowest link that it uses leads from {name[0]} to {name[1]}: {rate:.4g} Mbit/s, {late:.3g} ms."


def reordered(cluster: Cluster, schedules: Sequence[Topology], nbytes: float, *, to_each: bool) -> dict[Topology, str]:
    """Return the schedules that are fastest with their workers in the best order, relabeled so, and the calls; none of random rounds."""
    found = [(*_best_order(cluster, made, nbytes, to_each), made) for made in schedules if made.draw is None]
    found.sort(key=lambda its: its[0])
    return {relabel(made, workers): _call(made, workers) for _, workers, made in found[:_PREDICTED]}


def renumbered(cluster: Cluster, nbytes: float) -> tuple[Cluster, str]:
    """Return the cluster with its nodes in the order in which an all-reduce, a ring, is fastest, and that order."""
    assert cluster.links is not None
    _, workers = _best_order(cluster, complete(cluster.num_workers), nbytes, False)
    order, links = np.array(workers[:: cluster.workers_per_node]) // cluster.workers_per_node, cluster.links
    rates, late = (np.asarray(its, dtype=float) for its in (links.gbit_per_s, links.latency_ms))
    rates, late = (its[np.ix_(*[order] * its.ndim)] if its.ndim else its for its in (rates, late))
    named = [str(links.names[i]) if links.names else str(i) for i in order.tolist()]
    return replace(cluster, links=Links(rates, late, links.efficiency)), ", ".join(named)


def _call(made: Topology, workers: list[int]) -> str:
    options = "".join(f", {name}={value!r}" for name, value in getattr(made.family, "keywords", {}).items())
    call = f"df.topology({made.name!r}, {made.num_workers}{options})" if made.family else made.name
    return f"df.topologies.relabel({call}, {workers})"


def _best_order(cluster: Cluster, topology: Topology, nbytes: float, to_each: bool) -> tuple[float, list[int]]:
    """Return the seconds of a step's messages, and the workers that take the places of 0, 1, ... in it."""
    network, n, local = Network(cluster), cluster.nodes, np.arange(cluster.workers_per_node)
    rounds = [messages_of(topology, t, network.node, to_each=to_each) for t in sampled(topology)]

    def seconds(orders: np.ndarray) -> np.ndarray:  # sums lead away from orders whose slowest messages are equal
        lasts = [network.seconds(m, nbytes, orders[:, network.node]) for m in rounds]
        return sum((its.max(1, initial=0) + 1e-6 * its.sum(1) for its in lasts), np.zeros(len(orders))) / len(rounds)

    best, pairs, draws = np.arange(n), np.array([*combinations(range(n), 2)]), np.random.default_rng(0)
    for _ in range(_SWEEPS):
        if n <= _ALL_OF:
            orders = np.array([*permutations(range(n))])
        else:
            i, j = draws.permutation(pairs)[: max(1, _MESSAGES // sum(len(m.senders) for m in rounds))].T
            orders, rows = np.tile(best, (1 + len(i), 1)), np.arange(1, 1 + len(i))
            orders[rows, i], orders[rows, j] = best[j], best[i]
        before, best = best, orders[seconds(orders).argmin()]
        if (best == before).all():
            break
    return float(seconds(best[None])[0]), (best[:, None] * len(local) + local).ravel().tolist()
