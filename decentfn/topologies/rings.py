"""Rings: of pairs by turns, static; and the chain."""

from __future__ import annotations

import numpy as np

from decentfn.numbers import require
from decentfn.topologies.construct import from_edges, from_groups
from decentfn.topologies.graphs import metropolis_hastings
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Edge, Topology


@register_topology("ring")
def ring(num_workers: int) -> Topology:
    """Average with the right neighbor, then with the left: (0 1)(2 3)..., then (0 N-1)(1 2)...; weight 1/2.

    Cost per step and worker: one message. Period 2 (1 for N = 2).

    Args:
        num_workers: N, even (or 1).

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    n = num_workers
    if n == 1:
        return from_groups("ring", [[Edge([0])]], 1)
    rule = "its rounds are pairs of neighbors, so N must be even; use 'static-ring' or 'base'."
    require(n % 2 == 0, "ring", rule, num_workers=n)
    right = [Edge([i, i + 1]) for i in range(0, n, 2)]
    left = [Edge(sorted([i, (i - 1) % n])) for i in range(0, n, 2)]
    return from_groups("ring", [right] if n == 2 else [right, left], n)


@register_topology("static-ring")
def static_ring(num_workers: int) -> Topology:
    """Average with both neighbors in every step, weights 1/3 (two workers: 1/2).

    Spectral gap 1 - (1 + 2 cos(2π/N)) / 3 for N >= 4; exact for N <= 3.
    Cost per step and worker: two messages (one for N = 2).

    Args:
        num_workers: N >= 1.

    Returns:
        Topology of period 1, symmetric. Odd rings take three slots, since partners pair up in each.

    >>> static_ring(6).degree
    2
    """
    n = num_workers
    u = np.arange(n if n > 2 else n - 1)
    return from_edges("static-ring", [(u, (u + 1) % n, metropolis_hastings(u, (u + 1) % n, n))], n)


@register_topology("chain")
def chain(num_workers: int) -> Topology:
    """Workers in a line, Metropolis-Hastings weights: 1/3 for each neighbor (two workers: 1/2).

    Spectral gap that of a ring of 2N: 1 - (1 + 2 cos(π/N)) / 3 for N >= 3.
    Cost per step and worker: two messages at most.

    Args:
        num_workers: N >= 1.
    """
    u = np.arange(num_workers - 1)
    return from_edges("chain", [(u, u + 1, metropolis_hastings(u, u + 1, num_workers))], num_workers)
