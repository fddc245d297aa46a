"""Everyone with everyone."""

from __future__ import annotations

from decentfn.topologies.construct import from_groups
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Edge, Topology


@register_topology("complete")
def complete(num_workers: int) -> Topology:
    """Average with everyone, weight 1/N: `W = J`.

    Cost per step and worker: an all-reduce, 2(N-1)/N payloads; no messages.

    >>> complete(8).period
    1
    """
    return from_groups("complete", [[Edge(range(num_workers))]], num_workers)
