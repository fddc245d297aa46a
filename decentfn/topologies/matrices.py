"""Decomposition of mixing matrices into weighted permutations, edge coloring and connectivity."""

from __future__ import annotations

import numpy as np


def weighted_permutations(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decompose a matrix `[N, N]` float64 into messages: `W = diag(w_0) + Σ_k diag(w_k) P_k` (Birkhoff).

    In undirected graphs each permutation is an involution, an edge coloring. Returns `sources [N, K]` int64 (an idle
    worker is its own) and `weights [N, K+1]` float64, self-weight first.
    """
    n = matrix.shape[0]
    links = (matrix != 0) & ~np.eye(n, dtype=bool)
    is_undirected = bool((links == links.T).all())
    i, j = np.nonzero(np.triu(links) if is_undirected else links)
    # A directed graph: receivers i and senders j are the two sides of a bipartite graph (König's theorem).
    colors = edge_colors(i, j, n) if is_undirected else edge_colors(i, n + j, 2 * n)
    if is_undirected:
        i, j, colors = np.concatenate([i, j]), np.concatenate([j, i]), np.tile(colors, 2)
    degree = int(colors.max(initial=-1)) + 1
    sources = np.tile(np.arange(n)[:, None], (1, degree))
    weights = np.concatenate([np.diag(matrix)[:, None], np.zeros((n, degree))], axis=1)
    sources[i, colors] = j
    weights[i, 1 + colors] = matrix[i, j]
    if not is_undirected:
        for k in range(degree):
            in_slot = colors == k
            sources[:, k] = _complete(i[in_slot], j[in_slot], n)
    return sources, weights


def _complete(i: np.ndarray, j: np.ndarray, n: int) -> np.ndarray:
    """Return the permutation that maps i to j and closes each chain of links into a cycle by a link of weight 0."""
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


def edge_colors(u: np.ndarray, v: np.ndarray, num_nodes: int) -> np.ndarray:
    """Color the edges u - v, `[E]` each, no edge twice, so that each color is a matching; return `[E]` int64, from 0.

    An edge takes a color that is free at both ends. If there is none, a path of two alternating colors is flipped
    (Kempe); a color is added only if every such path is closed. Bipartite graphs need as many as the largest degree.
    """
    used: list[dict[int, int]] = [{} for _ in range(num_nodes)]  # node -> color -> edge
    ends = list(zip(u.tolist(), v.tolist(), strict=True))
    colors = [-1] * len(ends)
    palette = int(np.bincount(np.concatenate([u, v]), minlength=1).max(initial=0)) if ends else 0

    def path(start: int, first: int, second: int) -> tuple[list[int], int]:
        """Return the path of alternating colors that leaves `start` with `first`, and its last node."""
        edges: list[int] = []
        node, color, other = start, first, second
        while color in used[node]:
            edge = used[node][color]
            edges.append(edge)
            node = ends[edge][0] + ends[edge][1] - node
            color, other = other, color
        return edges, node

    def flip(edges: list[int], first: int, second: int) -> None:
        for edge in edges:
            for end in ends[edge]:
                del used[end][colors[edge]]
        for edge in edges:
            colors[edge] = second if colors[edge] == first else first
            for end in ends[edge]:
                used[end][colors[edge]] = edge

    def freed(a: int, b: int) -> int | None:
        """Flip a path from b so that a color is free at both ends; return it, or None if all paths lead to a."""
        for mine in (c for c in range(palette) if c not in used[a]):
            for theirs in (c for c in range(palette) if c not in used[b]):
                edges, last = path(b, mine, theirs)
                if last != a:
                    flip(edges, mine, theirs)
                    return mine
        return None

    for edge, (a, b) in enumerate(ends):
        at_a, at_b = used[a], used[b]
        color = next((c for c in range(palette) if c not in at_a and c not in at_b), None)
        if color is None:
            color = freed(a, b)
        if color is None:
            color, palette = palette, palette + 1
        colors[edge] = color
        at_a[color] = at_b[color] = edge
    return np.asarray(colors, dtype=np.int64)


def is_connected(u: np.ndarray, v: np.ndarray, num_nodes: int) -> bool:
    """Return True if the directed links u -> v lead from each of 0..num_nodes-1 to every other."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(u)), (u, v)), shape=(num_nodes, num_nodes))
    return connected_components(links, connection="strong", return_labels=False) == 1
