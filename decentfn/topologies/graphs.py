"""Any undirected graph, with Metropolis-Hastings weights or its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from decentfn.numbers import array, require
from decentfn.topologies import matrices
from decentfn.topologies.construct import from_edges
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


def metropolis_hastings(u: np.ndarray, v: np.ndarray, num_workers: int) -> np.ndarray:
    """`[E]` weights 1 / (1 + max(d_u, d_v)) of the edges u - v, d the degrees: doubly stochastic on any graph."""
    degrees = np.bincount(np.concatenate([u, v]), minlength=num_workers)
    return 1.0 / (1 + np.maximum(degrees[u], degrees[v]))


@register_topology("graph")
def graph(num_workers: int, *, graph: Any, has_weights: bool = False) -> Topology:
    """Average with all neighbors on a graph in every step, Metropolis-Hastings weights 1/(1 + max(d_i, d_j)).

    Cost per step and worker: as many messages as it has neighbors.

    Args:
        num_workers: N, the number of the graph's nodes.
        graph: an undirected, connected networkx graph, or an adjacency matrix `[N, N]`, of at most 64 neighbors each. Nodes
            that are the numbers 0..N-1 are the workers of that number, others in the order of the graph. Loops do not count.
        has_weights: take the edges' own weights, networkx's attribute "weight" or the matrix's entries, as the weights
            of W; a worker keeps what its edges leave of 1.

    >>> graph(4, graph=[[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).degree
    3
    """
    call = f"graph(num_workers={num_workers})"
    u, v, weights, size = _from_networkx(call, graph) if hasattr(graph, "nodes") else _from_matrix(call, graph)
    require(size == num_workers, call, f"the graph has {size} nodes; they are the workers, so N must be {size}.")
    is_connected = matrices.is_connected(np.concatenate([u, v]), np.concatenate([v, u]), size)
    require(is_connected, call, "the graph is not connected, so its parts would never agree; add edges.")
    if not has_weights:
        weights = metropolis_hastings(u, v, size)
    require(bool((weights > 0).all()), call, "has_weights=True, but an edge has no positive weight.")
    return from_edges("graph", [(u, v, weights)], size)


def _from_networkx(call: str, graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rule = "the graph is directed; use from_matrices with a doubly stochastic matrix."
    require(not graph.is_directed(), call, rule)
    nodes = list(graph.nodes)
    if set(nodes) == set(range(len(nodes))):
        nodes = list(range(len(nodes)))
    number = {node: index for index, node in enumerate(nodes)}
    weight_of = {
        (min(number[a], number[b]), max(number[a], number[b])): weight
        for a, b, weight in graph.edges(data="weight", default=0.0)
        if a != b
    }
    ends = np.array(list(weight_of), dtype=np.int64).reshape(-1, 2)
    return ends[:, 0], ends[:, 1], np.array(list(weight_of.values()), dtype=np.float64), len(nodes)


def _from_matrix(call: str, graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    matrix = array(call, "graph", graph)
    is_symmetric = matrix.ndim == 2 and np.array_equal(matrix, matrix.T)
    require(is_symmetric, call, f"an adjacency matrix is square and symmetric; this one is {list(matrix.shape)}.")
    u, v = np.nonzero(np.triu(matrix, 1))
    return u, v, matrix[u, v], matrix.shape[0]
