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
    """`W = diag(w_0) + Σ_k diag(w_k) P_k`: the form in which messages carry a matrix.

    As few permutations as the largest degree for directed and for bipartite undirected graphs, one or two more for
    other undirected ones. Where every link goes both ways, each permutation is an involution (an edge colouring).

    Args:
        matrix: `[N, N]` float64, `W[i, j]` the weight that i gives to j.

    Returns:
        `sources [N, K]` int64, every column a permutation (a worker that hears nobody is its own source), and
        `weights [N, K+1]` float64, own weight first.
    """
    n = matrix.shape[0]
    links = (matrix != 0) & ~np.eye(n, dtype=bool)
    if (links == links.T).all():
        colours = _colour([(i, j) for i, j in zip(*np.nonzero(links), strict=True) if i < j], n)
        heard = [{a: b for i, j in edges for a, b in ((i, j), (j, i))} for edges in colours]
    else:
        # Hearing i and telling j are the two sides of a bipartite graph: König's theorem.
        colours = _colour([(int(i), n + int(j)) for i, j in zip(*np.nonzero(links), strict=True)], 2 * n)
        heard = [{i: j - n for i, j in edges} for edges in colours]
    sources = np.tile(np.arange(n)[:, None], (1, len(heard)))
    weights = np.concatenate([np.diag(matrix)[:, None], np.zeros((n, len(heard)))], axis=1)
    for k, pairs in enumerate(heard):
        for i, j in pairs.items():
            weights[i, 1 + k] = matrix[i, j]
        for i, j in _complete(pairs, n).items():
            sources[i, k] = j
    return sources, weights


def _complete(partial: dict[int, int], n: int) -> dict[int, int]:
    """A permutation with fixed points wherever possible that extends an injective partial map; added links weigh 0."""
    heard = set(partial.values())
    loose_ends = {}
    for start in range(n):
        if start in partial and start not in heard:
            end = start
            while end in partial:
                end = partial[end]
            loose_ends[end] = start
    return partial | loose_ends


def _colour(edges: list[tuple[int, int]], n: int) -> list[list[tuple[int, int]]]:
    """Split edges into matchings: give each a colour that is free at both ends, flipping a two-coloured path if need be."""
    degree = np.bincount(np.array(edges, dtype=np.int64).reshape(-1), minlength=n).max(initial=0)
    used: list[dict[int, int]] = [{} for _ in range(n)]  # node -> colour -> the node at the other end

    def free(node: int) -> int:
        return next(colour for colour in range(len(edges) + 1) if colour not in used[node])

    def put(u: int, v: int, colour: int) -> None:
        used[u][colour] = v
        used[v][colour] = u

    for u, v in edges:
        common = next((c for c in range(degree) if c not in used[u] and c not in used[v]), None)
        if common is None:
            a, b = free(u), free(v)
            path, node, colour = [v], v, a
            while colour in used[node]:
                node = used[node][colour]
                path.append(node)
                colour = b if colour == a else a
            if u in path or a >= degree or b >= degree:
                common = next(c for c in range(degree, len(edges) + degree) if c not in used[u] and c not in used[v])
            else:
                links = list(zip(path[:-1], path[1:], strict=True))
                for index, (x, y) in enumerate(links):
                    old = a if index % 2 == 0 else b
                    del used[x][old], used[y][old]
                for index, (x, y) in enumerate(links):
                    put(x, y, b if index % 2 == 0 else a)
                common = a
        put(u, v, common)
    count = max((colour + 1 for node in used for colour in node), default=0)
    return [[(i, used[i][c]) for i in range(n) if c in used[i] and i < used[i][c]] for c in range(count)]
