"""Undirected graphs with Metropolis-Hastings weights: your own, and well-known ones; the ring of alternating pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from decentfn.core.arguments import array, require
from decentfn.topologies import matrices
from decentfn.topologies.construct import MOST_MESSAGES, from_edges, from_groups
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Edge, Topology


def _weighted(name: str, num_workers: int, *rounds: tuple[np.ndarray, np.ndarray]) -> Topology:
    """Make rounds of edges u - v with weights 1 / (1 + max(d_u, d_v)), d the degrees; always doubly stochastic."""
    weighted = []
    for u, v in rounds:
        degrees = np.bincount(np.concatenate([u, v]), minlength=num_workers)
        weighted.append((u, v, 1.0 / (1 + np.maximum(degrees[u], degrees[v]))))
    return from_edges(name, weighted, num_workers)


@register_topology("graph")
def graph(num_workers: int, *, graph: Any, has_weights: bool = False) -> Topology:
    """Average with all neighbors on a graph in every step, Metropolis-Hastings weights 1/(1 + max(d_i, d_j)).

    Cost per step and worker: one message per neighbor.

    Args:
        num_workers: N, the number of the graph's nodes.
        graph: an undirected, connected networkx graph, or an adjacency matrix `[N, N]`, with at most 64 neighbors per
            node. Nodes named 0..N-1 are the workers of that number; others follow the order of the graph. Loops are
            ignored.
        has_weights: use the edges' own weights (networkx's attribute "weight", or the matrix's entries) as the weights
            of W; the self-weight is 1 minus their sum.

    >>> graph(4, graph=[[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).degree
    3
    """
    call = f"graph(num_workers={num_workers})"
    u, v, weights, size = _from_networkx(call, graph) if hasattr(graph, "nodes") else _from_matrix(call, graph)
    require(size == num_workers, call, f"the graph has {size} nodes; they are the workers, so N must be {size}.")
    is_connected = matrices.is_connected(np.concatenate([u, v]), np.concatenate([v, u]), size)
    require(is_connected, call, "the graph is not connected, so its parts would never agree; add edges.")
    if not has_weights:
        return _weighted("graph", size, (u, v))
    require(bool((weights > 0).all()), call, "has_weights=True, but an edge has no positive weight.")
    return from_edges("graph", [(u, v, weights)], size)


def _from_networkx(call: str, graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rule = "the graph is directed; use from_matrices with a doubly stochastic matrix."
    require(not graph.is_directed(), call, rule)
    nodes = list(graph.nodes)
    if set(nodes) == set(range(len(nodes))):
        nodes = list(range(len(nodes)))
    number = {node: index for index, node in enumerate(nodes)}
    edges = [(*sorted((number[a], number[b])), w) for a, b, w in graph.edges(data="weight", default=0.0) if a != b]
    weight_of = {(a, b): weight for a, b, weight in edges}  # in a multigraph the last edge counts
    ends = np.array(list(weight_of), dtype=np.int64).reshape(-1, 2)
    return ends[:, 0], ends[:, 1], np.array(list(weight_of.values()), dtype=np.float64), len(nodes)


def _from_matrix(call: str, graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    matrix = array(call, "graph", graph)
    is_symmetric = matrix.ndim == 2 and np.array_equal(matrix, matrix.T)
    require(is_symmetric, call, f"an adjacency matrix is square and symmetric; this one is {list(matrix.shape)}.")
    u, v = np.nonzero(np.triu(matrix, 1))
    return u, v, matrix[u, v], matrix.shape[0]


@register_topology("complete")
def complete(num_workers: int) -> Topology:
    """Average over all workers, weight 1/N: `W = J`.

    Cost per step and worker: an all-reduce, 2(N-1)/N payloads; no messages.

    >>> complete(8).period
    1
    """
    return from_groups("complete", [[Edge(range(num_workers))]], num_workers)


@register_topology("ring")
def ring(num_workers: int) -> Topology:
    """Average with the right neighbor, then with the left, weight 1/2: (0 1)(2 3)..., then (0 N-1)(1 2)...

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

    Spectral gap 1 - (1 + 2 cos(2π/N)) / 3 for N >= 4; exact for N <= 3. Symmetric; odd rings need three slots, since
    each slot is a matching. Cost per step and worker: two messages (one for N = 2).

    >>> static_ring(6).degree
    2
    """
    u = np.arange(num_workers if num_workers > 2 else num_workers - 1)
    return _weighted("static-ring", num_workers, (u, (u + 1) % num_workers))


@register_topology("chain")
def chain(num_workers: int) -> Topology:
    """Average with the neighbors on a line, Metropolis-Hastings weights: 1/3 for each neighbor (two workers: 1/2).

    Spectral gap 1 - (1 + 2 cos(π/N)) / 3 for N >= 3, that of a ring of 2N.
    Cost per step and worker: two messages at most.
    """
    u = np.arange(num_workers - 1)
    return _weighted("chain", num_workers, (u, u + 1))


@register_topology("torus")
def torus(num_workers: int, *, rows: int | None = None) -> Topology:
    """Average with the neighbors on a grid that wraps around, weights 1/5 if both sides are at least 3.

    Weights are 1/(1 + neighbors): a worker has two neighbors along a side of at least 3, one along a side of 2, and
    none along a side of 1 (a prime number of workers is a ring). Spectral gap (2 - 2 cos(2π / longest side)) / 5 for
    sides of at least 3.
    Cost per step and worker: four messages at most.

    Args:
        num_workers: N = rows x columns; worker `r * columns + c` is in row r, column c.
        rows: the number of rows, a divisor of N; by default the largest that is at most √N.

    >>> torus(25).degree
    4
    """
    number = _numbered("torus", num_workers, rows)
    height, width = number.shape
    down = (number, np.roll(number, -1, 0)) if height > 2 else (number[:-1], number[1:])
    right = (number, np.roll(number, -1, 1)) if width > 2 else (number[:, :-1], number[:, 1:])
    return _lattice("torus", down, right, num_workers)


@register_topology("grid")
def grid(num_workers: int, *, rows: int | None = None) -> Topology:
    """Average with the neighbors on a grid with borders, Metropolis-Hastings weights 1/(1 + max(d_i, d_j)).

    Cost per step and worker: four messages at most.

    Args:
        num_workers: N = rows x columns; worker `r * columns + c` is in row r, column c.
        rows: the number of rows, a divisor of N; by default the largest that is at most √N.
    """
    number = _numbered("grid", num_workers, rows)
    return _lattice("grid", (number[:-1], number[1:]), (number[:, :-1], number[:, 1:]), num_workers)


def _numbered(name: str, n: int, rows: int | None) -> np.ndarray:
    if rows is None:
        rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    is_divisor = rows >= 1 and n % rows == 0
    require(is_divisor, name, "the rows must divide the workers; leave rows out.", num_workers=n, rows=rows)
    return np.arange(n).reshape(rows, n // rows)


def _lattice(name: str, down: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray], n: int) -> Topology:
    u, v = (np.concatenate([a.ravel(), b.ravel()]) for a, b in zip(down, right, strict=True))
    return _weighted(name, n, (u, v))


@register_topology("star")
def star(num_workers: int) -> Topology:
    """Average worker 0 with all others, and each other worker with worker 0, Metropolis-Hastings weights 1/N.

    Spectral gap 1/N. Cost per step: N - 1 messages to and from worker 0, which holds them all at once, so N <= 65.

    Args:
        num_workers: N, 1 to 65.
    """
    n = num_workers
    way_out = "use 'complete' (an all-reduce) or 'binary-tree'."
    rule = f"the center would hold {n - 1} messages at once, more than {MOST_MESSAGES}; {way_out}"
    require(n - 1 <= MOST_MESSAGES, "star", rule, num_workers=n)
    leaves = np.arange(1, n)
    return _weighted("star", n, (np.zeros_like(leaves), leaves))


@register_topology("binary-tree")
def binary_tree(num_workers: int) -> Topology:
    """Average with parent and children in every step; 0 is the parent of 1, and w // 2 that of w > 1.

    Metropolis-Hastings weights. Cost per step and worker: three messages at most.

    Source: the tree of RelaySGD, Vogels et al., NeurIPS 2021.

    >>> binary_tree(8).degree
    3
    """
    children = np.arange(1, num_workers)
    return _weighted("binary-tree", num_workers, (children // 2, children))


@register_topology("double-binary-tree")
def double_binary_tree(num_workers: int) -> Topology:
    """Alternate the binary tree and its mirror image, in which worker w takes the place of N - 1 - w.

    Inner workers of one tree are mostly leaves of the other, which balances the messages over two steps.
    Cost per step and worker: three messages at most. Period 2 (1 for N <= 2).
    """
    n, children = num_workers, np.arange(1, num_workers)
    mirrored = () if n <= 2 else ((n - 1 - children // 2, n - 1 - children),)
    return _weighted("double-binary-tree", n, (children // 2, children), *mirrored)
