"""Topologies: functions that return a checked `Topology`, one family per file."""

from decentfn.topologies.certificates import Certificate, certificate, consensus_steps, spectral_gap
from decentfn.topologies.combine import alternate, every, later, lazy, nth_round, paused, pga, relabel, shuffled, until
from decentfn.topologies.construct import from_edges, from_groups, from_matrices, from_permutations, from_shifts, idle
from decentfn.topologies.drawn import from_draw, from_rounds
from decentfn.topologies.equitopo import equitopo_d_static, equitopo_od_dyn, equitopo_ou_dyn, equitopo_u_static
from decentfn.topologies.exponential import ceca, one_peer_exp, one_peer_exp_directed, p_peer_exp, static_exp
from decentfn.topologies.graphs import (
    binary_tree,
    complete,
    double_binary_tree,
    graph,
    grid,
    ring,
    star,
    static_ring,
    torus,
)
from decentfn.topologies.graphs import chain as chain
from decentfn.topologies.hierarchies import alternating_exp_ring, hierarchical
from decentfn.topologies.hypercubes import base, hyper_hypercube, hypercube, simple_base
from decentfn.topologies.lossy import cut, lossy
from decentfn.topologies.matching import random_matching, sampled, shift_one
from decentfn.topologies.registry import register_topology, topology, topology_names
from decentfn.topologies.resized import Resized
from decentfn.topologies.rounds import Edge, Round, Topology, mixed, mixing_matrix

# `chain` stays out: in the package's namespace that name composes optimizers. topology("chain", N) makes it.
__all__ = [
    "Certificate",
    "Edge",
    "Resized",
    "Round",
    "Topology",
    "alternate",
    "alternating_exp_ring",
    "base",
    "binary_tree",
    "ceca",
    "certificate",
    "complete",
    "consensus_steps",
    "cut",
    "double_binary_tree",
    "equitopo_d_static",
    "equitopo_od_dyn",
    "equitopo_ou_dyn",
    "equitopo_u_static",
    "every",
    "from_draw",
    "from_edges",
    "from_groups",
    "from_matrices",
    "from_permutations",
    "from_rounds",
    "from_shifts",
    "graph",
    "grid",
    "hierarchical",
    "hyper_hypercube",
    "hypercube",
    "idle",
    "later",
    "lazy",
    "lossy",
    "mixed",
    "mixing_matrix",
    "nth_round",
    "one_peer_exp",
    "one_peer_exp_directed",
    "p_peer_exp",
    "paused",
    "pga",
    "random_matching",
    "register_topology",
    "relabel",
    "ring",
    "sampled",
    "shift_one",
    "shuffled",
    "simple_base",
    "spectral_gap",
    "star",
    "static_exp",
    "static_ring",
    "topology",
    "topology_names",
    "torus",
    "until",
]
