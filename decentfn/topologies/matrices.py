"""Facts about mixing matrices, and their decomposition into weighted permutations. Matrices are `[N, N]` float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def is_doubly_stochastic(matrix: Tensor, tolerance: float = 1e-12) -> bool:
    """Whether all rows and all columns of `matrix` `[N, N]` sum to 1 and no entry is negative."""
    ones = torch.ones(matrix.shape[0], dtype=matrix.dtype)
    sums = torch.stack([matrix.sum(0), matrix.sum(1)])
    return bool((matrix >= -tolerance).all() and ((sums - ones).abs() <= tolerance).all())


def contraction(matrix: Tensor) -> float:
    """`‖W - J‖₂`, the factor by which disagreement shrinks at least: the second largest singular value."""
    n = matrix.shape[0]
    return float(torch.linalg.matrix_norm(matrix - 1.0 / n, ord=2))


def spectral_gap(matrix: Tensor) -> float:
    """`1 - ‖W - J‖₂` of a doubly stochastic `matrix` `[N, N]`, in [0, 1]."""
    return 1.0 - contraction(matrix)


def weighted_permutations(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`W = diag(w_0) + Σ_k diag(w_k) P_k`: the form in which messages carry a matrix (Birkhoff).

    As few permutations as the largest degree for directed and for bipartite undirected graphs, for other undirected
    ones one more or, if they are dense, a few. Where every link goes both ways, each permutation is an involution (an edge
    colouring).

    Args:
        matrix: `[N, N]` float64, `W[i, j]` the weight that i gives to j.

    Returns:
        `sources [N, K]` int64, every column a permutation (a worker that receives from nobody is its own source), and
        `weights [N, K+1]` float64, own weight first.
    """
    n = matrix.shape[0]
    links = (matrix != 0) & ~np.eye(n, dtype=bool)
    is_undirected = bool((links == links.T).all())
    i, j = np.nonzero(np.triu(links) if is_undirected else links)
    # A directed graph: hearing i and telling j are the two sides of a bipartite graph (König's theorem).
    colours = edge_colours(i, j, n) if is_undirected else edge_colours(i, n + j, 2 * n)
    if is_undirected:
        i, j, colours = np.concatenate([i, j]), np.concatenate([j, i]), np.tile(colours, 2)
    degree = int(colours.max(initial=-1)) + 1
    sources = np.tile(np.arange(n)[:, None], (1, degree))
    weights = np.concatenate([np.diag(matrix)[:, None], np.zeros((n, degree))], axis=1)
    sources[i, colours] = j
    weights[i, 1 + colours] = matrix[i, j]
    if not is_undirected:
        for k in range(degree):
            in_slot = colours == k
            sources[:, k] = _complete(i[in_slot], j[in_slot], n)
    return sources, weights


def _complete(i: np.ndarray, j: np.ndarray, n: int) -> np.ndarray:
    """The permutation that takes every i to its j and the loose end of each chain of links to its start.

    The added links weigh 0; all other workers stay where they are.
    """
    partial = dict(zip(i.tolist(), j.tolist(), strict=True))
    heard = set(partial.values())
    permutation = np.arange(n)
    permutation[i] = j
    for start in partial:
        if start not in heard:
            end = start
            while end in partial:
                end = partial[end]
            permutation[end] = start
    return permutation


def edge_colours(u: np.ndarray, v: np.ndarray, num_nodes: int) -> np.ndarray:
    """Colour edges so that no two at one node share a colour: each colour is a matching.

    An edge takes a colour that is free at both ends; where there is none, a path of two alternating colours is flipped
    (Kempe), and only where every such path is closed, a colour is added. Bipartite graphs get as many colours as the
    largest degree.

    Args:
        u: `[E]` one end of each edge, no edge twice.
        v: `[E]` the other end.
        num_nodes: ends are below this.

    Returns:
        `[E]` int64, colours from 0.
    """
    used: list[dict[int, int]] = [{} for _ in range(num_nodes)]  # node -> colour -> edge
    ends = list(zip(u.tolist(), v.tolist(), strict=True))
    colours = [-1] * len(ends)
    palette = int(np.bincount(np.concatenate([u, v]), minlength=1).max(initial=0)) if ends else 0

    def path(start: int, first: int, second: int) -> tuple[list[int], int]:
        """The edges of alternating colours that leave `start` with `first`, and the node where they end."""
        edges: list[int] = []
        node, colour, other = start, first, second
        while colour in used[node]:
            edge = used[node][colour]
            edges.append(edge)
            node = ends[edge][0] + ends[edge][1] - node
            colour, other = other, colour
        return edges, node

    def flip(edges: list[int], first: int, second: int) -> None:
        for edge in edges:
            for end in ends[edge]:
                del used[end][colours[edge]]
        for edge in edges:
            colours[edge] = second if colours[edge] == first else first
            for end in ends[edge]:
                used[end][colours[edge]] = edge

    def freed(a: int, b: int) -> int | None:
        """A colour that is free at both ends once a path from b is flipped; none if all paths lead to a."""
        for mine in (c for c in range(palette) if c not in used[a]):
            for theirs in (c for c in range(palette) if c not in used[b]):
                edges, last = path(b, mine, theirs)
                if last != a:
                    flip(edges, mine, theirs)
                    return mine
        return None

    for edge, (a, b) in enumerate(ends):
        at_a, at_b = used[a], used[b]
        colour = next((c for c in range(palette) if c not in at_a and c not in at_b), None)
        if colour is None:
            colour = freed(a, b)
        if colour is None:
            colour, palette = palette, palette + 1
        colours[edge] = colour
        at_a[colour] = at_b[colour] = edge
    return np.asarray(colours, dtype=np.int64)


def is_connected(u: np.ndarray, v: np.ndarray, num_nodes: int) -> bool:
    """Whether the undirected edges u - v join all of 0..num_nodes-1."""
    return reaches_everyone(np.concatenate([u, v]), np.concatenate([v, u]), num_nodes)


def reaches_everyone(u: np.ndarray, v: np.ndarray, num_nodes: int) -> bool:
    """Whether the directed links u -> v lead from node 0 to all of 0..num_nodes-1."""
    order = np.argsort(u, kind="stable")
    v = v[order]
    first = np.searchsorted(u[order], np.arange(num_nodes + 1))
    reached = np.zeros(num_nodes, dtype=bool)
    reached[0] = True
    frontier = np.array([0])
    while len(frontier):
        heads = np.concatenate([v[first[node] : first[node + 1]] for node in frontier.tolist()])
        frontier = np.unique(heads[~reached[heads]])
        reached[frontier] = True
    return bool(reached.all())
