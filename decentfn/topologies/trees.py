"""Star and binary trees."""

from __future__ import annotations

import numpy as np

from decentfn.numbers import require
from decentfn.topologies.construct import MOST_MESSAGES, from_edges
from decentfn.topologies.graphs import metropolis_hastings
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


@register_topology("star")
def star(num_workers: int) -> Topology:
    """Worker 0 averages with everyone, the others with worker 0 alone: Metropolis-Hastings weights 1/N.

    Spectral gap 1/N. Cost per step: N - 1 messages to and from the center, which holds them all at once, so N <= 65.

    Args:
        num_workers: N, 1 to 65.
    """
    n = num_workers
    rule = f"the center would hold {n - 1} messages at once, more than {MOST_MESSAGES}; use 'complete' (an all-reduce) or 'binary-tree'."
    require(n - 1 <= MOST_MESSAGES, "star", rule, num_workers=n)
    leaves = np.arange(1, n)
    return from_edges("star", [(np.zeros_like(leaves), leaves, metropolis_hastings(leaves * 0, leaves, n))], n)


@register_topology("binary-tree")
def binary_tree(num_workers: int) -> Topology:
    """Average with parent and children in every step: root 0 joined to 1, worker w > 1 to w // 2.

    Metropolis-Hastings weights. Cost per step and worker: three messages at most.

    Args:
        num_workers: N >= 1.

    Source: the tree of RelaySGD, Vogels et al., NeurIPS 2021.

    >>> binary_tree(8).degree
    3
    """
    u, v = _tree(num_workers)
    return from_edges("binary-tree", [(u, v, metropolis_hastings(u, v, num_workers))], num_workers)


@register_topology("double-binary-tree")
def double_binary_tree(num_workers: int) -> Topology:
    """The binary tree and its mirror image, in which worker w takes the place of N - 1 - w, in turn.

    Inner workers of one tree are mostly leaves of the other, so that in two steps all have sent alike.
    Cost per step and worker: three messages at most.

    Args:
        num_workers: N >= 1.

    Returns:
        Topology of period 2 (1 for N <= 2).
    """
    n = num_workers
    u, v = _tree(n)
    weights = metropolis_hastings(u, v, n)
    rounds = [(u, v, weights), (n - 1 - u, n - 1 - v, weights)]
    return from_edges("double-binary-tree", rounds[: 1 if n <= 2 else 2], n)


def _tree(n: int) -> tuple[np.ndarray, np.ndarray]:
    children = np.arange(1, n)
    return children // 2, children
