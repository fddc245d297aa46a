"""Clusters: workers on nodes, and the links between and inside the nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from decentfn.core.arguments import real, require, whole_number


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


class Pair(NamedTuple):
    """Measured link between two processes."""

    ends: tuple[int, int]
    is_between: bool
    gbit: float
    latency_ms: float


def measured(name: str, path: str | Path) -> tuple[list[list[int]], list[Pair]]:
    """Return the ranks of each node, and the pairs, of a file of `decentfn links`."""
    try:
        found = json.loads(Path(path).read_text())
        pairs = [Pair((p["from"], p["to"]), p["between"], p["mbit"] / 1e3, p["latency_ms"]) for p in found["pairs"]]
        nodes = [node["ranks"] for node in found["nodes"]]
        ranks = {rank for its in nodes for rank in its}
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{name}.measured({str(path)!r}): expected a file that `decentfn links` wrote ({error!r})."
        ) from error
    are_known = all(ranks.issuperset(pair.ends) for pair in pairs)
    are_enough = any(pair.is_between for pair in pairs) or (len(nodes) == 1 and pairs)
    rule = "pairs are of the nodes' ranks, and those between nodes are among them; measure again with `decentfn links`."
    require(bool(are_known and are_enough), f"{name}.measured", rule, path=str(path))
    for pair in pairs:
        Link(pair.gbit, pair.latency_ms)  # which raises if there can be none such
    return nodes, pairs


def _slowest(nodes: list[list[int]], pairs: list[Pair]) -> Link | None:
    """Return the slowest of the nodes' links, each the median of its pairs."""
    its = [found for ranks in nodes if (found := [p for p in pairs if not set(ranks).isdisjoint(p.ends)])]
    if not its:
        return None
    return Link(min(median(p.gbit for p in of) for of in its), max(median(p.latency_ms for p in of) for of in its))


@dataclass(frozen=True)
class Cluster:
    """Workers of a run and where they are.

    Args:
        num_workers: N >= 1.
        between: the network interface of a node.
        inside: the link of a process to the others of its node; None if a node is one process.
        workers_per_node: L, which divides N; worker i is on node i // L. 1 if a worker is a node or several.
        processes_per_worker: S >= 1, which share a worker's parameters and are on one node.
    """

    num_workers: int
    between: Link
    inside: Link | None = None
    workers_per_node: int = 1
    processes_per_worker: int = 1

    def __post_init__(self) -> None:
        for name in ("num_workers", "workers_per_node", "processes_per_worker"):
            value = whole_number("Cluster", name, getattr(self, name))
            require(value >= 1, "Cluster", f"{name} is at least 1.", **{name: value})
        rule = "the workers of a node divide the workers."
        sizes = {"num_workers": self.num_workers, "workers_per_node": self.workers_per_node}
        require(self.num_workers % self.workers_per_node == 0, "Cluster", rule, **sizes)
        is_one = self.workers_per_node == self.processes_per_worker == 1
        require(is_one or self.inside is not None, "Cluster", "several processes of a node need `inside`, a Link.")

    @classmethod
    def measured(cls, path: str | Path, processes_per_worker: int = 1) -> Cluster:
        """Return the cluster of a file of `decentfn links`. Of unequal links it has the slowest, since schedules use all nodes.

        Raises:
            ValueError: it is no such file; nodes have unequal numbers of processes, which these workers do not divide.
        """
        nodes, pairs = measured("Cluster", path)
        of_node = [len(ranks) for ranks in nodes]
        links = [_slowest(nodes, [pair for pair in pairs if pair.is_between == between]) for between in (True, False)]
        rule = "nodes have equally many processes, of whole workers."
        is_right = len(set(of_node)) == 1 and of_node[0] % processes_per_worker == 0
        require(
            is_right, "Cluster.measured", rule, processes_of_nodes=of_node, processes_per_worker=processes_per_worker
        )
        local = of_node[0] // processes_per_worker
        return cls(local * len(of_node), links[0] or Link(1e3), links[1], local, processes_per_worker)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.num_workers // self.workers_per_node
