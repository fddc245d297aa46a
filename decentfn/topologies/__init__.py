"""Topologies: one family a file, each a function that returns a checked `Topology`."""

from decentfn.topologies.decent_dp import alternating_exp_ring, complete, one_peer_exp, ring
from decentfn.topologies.registry import register_topology, topology, topology_names
from decentfn.topologies.topology import (
    Edge,
    Round,
    Topology,
    from_draw,
    from_groups,
    from_matrices,
    from_permutations,
    mixing_matrix,
)

__all__ = [
    "Edge",
    "Round",
    "Topology",
    "alternating_exp_ring",
    "complete",
    "from_draw",
    "from_groups",
    "from_matrices",
    "from_permutations",
    "mixing_matrix",
    "one_peer_exp",
    "register_topology",
    "ring",
    "topology",
    "topology_names",
]
