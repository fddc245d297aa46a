"""Clusters: workers on nodes, and the links between and inside the nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from decentfn.core import array, at_least, brief_error, real, require


@dataclass(frozen=True)
class Link:
    """Full-duplex network interface.

    Args:
        gbit_per_s: nominal rate in each direction, > 0, in 10^9 bits per second.
        latency_ms: time of an empty message, >= 0.
        efficiency: share of the rate that payloads get, in (0, 1]; about 0.93 for TCP with frames of 1,500 bytes.
    """

    gbit_per_s: float
    latency_ms: float = 0.1
    efficiency: float = 0.93

    def __post_init__(self) -> None:
        for name in ("gbit_per_s", "latency_ms", "efficiency"):
            real("Link", name, getattr(self, name))
        require(self.gbit_per_s > 0, "Link", "the rate is positive.", gbit_per_s=self.gbit_per_s)
        require(self.latency_ms >= 0, "Link", "the latency is not negative.", latency_ms=self.latency_ms)
        require(0 < self.efficiency <= 1, "Link", "a share of the rate, in (0, 1].", efficiency=self.efficiency)


@dataclass(frozen=True)
class Links:
    """Links of nodes, where they are unequal. A worker is a node, except in a Cluster.

    Args:
        gbit_per_s: nominal rates > 0, 10^9 bits per second: `[N]`, of each node's interface in each direction, or `[N, N]`,
            from the node of the row to that of the column; an interface is then as fast as its fastest link.
        latency_ms: time of an empty message, >= 0: a number, or `[N, N]` likewise.
        efficiency: share of the rate that payloads get, in (0, 1].
        names: of the nodes, for what a plan says; empty: their numbers.

    >>> Links([1, 1, 0.1]).num_workers  # worker 2 has a slow link
    3
    """

    gbit_per_s: object
    latency_ms: object = 0.1
    efficiency: float = 0.93
    names: Sequence[str] = field(default=(), repr=False)

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

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(np.asarray(self.gbit_per_s))

    def link(self, i: int, j: int) -> Link:
        """Return the link from node i to node j."""
        rates, latency = np.asarray(self.gbit_per_s, dtype=float), np.asarray(self.latency_ms, dtype=float)
        rate, late = rates[i, j] if rates.ndim == 2 else rates[[i, j]].min(), latency[i, j] if latency.ndim else latency
        return Link(float(rate), float(late), self.efficiency)


Pairs = list[tuple[tuple[int, int], Link]]
"""Measured links between nodes (sender, receiver); i, i: inside node i."""


def _read(path: str | Path) -> tuple[list[str], list[int], Pairs, Pairs]:
    """Return the nodes' names and numbers of processes, and links between and inside nodes, of a file of `decentfn links`."""
    try:
        found = json.loads(Path(path).read_text())
        node = {rank: i for i, its in enumerate(found["nodes"]) for rank in its["ranks"]}
        names, sizes = [str(its["name"]) for its in found["nodes"]], [len(its["ranks"]) for its in found["nodes"]]
        between, inside = Pairs(), Pairs()
        for pair in found["pairs"]:
            ends = node.get(pair["from"], -1), node.get(pair["to"], -1)
            (between if pair["between"] else inside).append((ends, Link(pair["mbit"] / 1e3, pair["latency_ms"])))
        is_enough = between or (len(names) == 1 and inside)
        rule = "pairs are of the nodes' ranks, and those between nodes are among them."
        require(bool(is_enough) and not any(-1 in ends for ends, _ in between + inside), "links", rule)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = (
            f"expected a file that `decentfn links` wrote ({brief_error(error)}); measure again with `decentfn links`."
        )
        raise ValueError(f"measured({str(path)!r}): {why}") from error
    names = [f"{name} (node {i})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    return names, sizes, between, inside


def _of_nodes(pairs: Pairs) -> dict[int, Link]:
    """Return each node's link, the median of its pairs."""
    its = {i: [link for ends, link in pairs if i in ends] for i in {i for ends, _ in pairs for i in ends}}
    return {i: Link(median(x.gbit_per_s for x in of), median(x.latency_ms for x in of)) for i, of in its.items()}


def _slowest(links: dict[int, Link]) -> Link | None:
    its = links.values()
    return Link(min(x.gbit_per_s for x in its), max(x.latency_ms for x in its)) if its else None


@dataclass(frozen=True)
class Cluster:
    """Workers of a run and where they are.

    Args:
        num_workers: N >= 1.
        between: the network interface of a node.
        inside: the link of a process to the others of its node; None if a node is one process.
        workers_per_node: L, which divides N; worker i is on node i // L. 1 if a worker is a node or several.
        processes_per_worker: S >= 1, which share a worker's parameters and are on one node.
        links: of the nodes in place of `between`, where they are unequal.
    """

    num_workers: int
    between: Link
    inside: Link | None = None
    workers_per_node: int = 1
    processes_per_worker: int = 1
    links: Links | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_workers", "workers_per_node", "processes_per_worker"):
            at_least("Cluster", name, getattr(self, name), 1)
        are_links = isinstance(self.between, Link) and isinstance(self.inside, Link | None)
        rule = "its links are df.planning.Link(gbit_per_s)."
        require(are_links, "Cluster", rule, between=self.between, inside=self.inside)
        rule = "the workers of a node divide the workers."
        sizes = {"num_workers": self.num_workers, "workers_per_node": self.workers_per_node}
        require(self.num_workers % self.workers_per_node == 0, "Cluster", rule, **sizes)
        is_one = self.workers_per_node == self.processes_per_worker == 1
        require(is_one or self.inside is not None, "Cluster", "several processes of a node need `inside`, a Link.")
        rule = f"links of the cluster's {self.nodes} nodes."
        require(self.links is None or self.links.num_workers == self.nodes, "Cluster", rule, links=self.links)

    @classmethod
    def measured(cls, path: str | Path, processes_per_worker: int = 1) -> Cluster:
        """Return the cluster of a file of `decentfn links`; `between` is the slowest node's link, `links` has all.

        A link that was not measured is as slow as the slower of its nodes' others.

        Raises:
            ValueError: it is no such file; nodes have unequal numbers of processes, which these workers do not divide.
        """
        names, sizes, between, inside = _read(path)
        rule = "nodes have equally many processes, of whole workers."
        is_right = len(set(sizes)) == 1 and sizes[0] % processes_per_worker == 0
        require(is_right, "Cluster.measured", rule, processes_of_nodes=sizes, processes_per_worker=processes_per_worker)
        local, usual, links = sizes[0] // processes_per_worker, _of_nodes(between), None
        if slowest := _slowest(usual):
            each = [usual.get(i, slowest) for i in range(len(names))]
            gbit, latency = ([getattr(link, name) for link in each] for name in ("gbit_per_s", "latency_ms"))
            gbit, latency = np.minimum.outer(gbit, gbit), np.maximum.outer(latency, latency)
            for ends, link in between:
                gbit[ends], latency[ends] = link.gbit_per_s, link.latency_ms
            links = Links(gbit, latency, names=names)
        slowest_inside = _slowest(_of_nodes(inside))
        return cls(local * len(names), slowest or Link(1e3), slowest_inside, local, processes_per_worker, links)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.num_workers // self.workers_per_node
