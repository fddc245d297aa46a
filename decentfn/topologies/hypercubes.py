"""Hypercubes, hyper-hypercubes and Base-(k+1) graphs: exact in finitely many steps, at most k peers per step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from decentfn.core.arguments import require
from decentfn.topologies.construct import from_edges, from_permutations
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""`u, v, weights`, `[E]` each: one round of undirected edges."""


@register_topology("hypercube")
def hypercube(num_workers: int) -> Topology:
    """Average in every step with all workers whose number differs in one bit, all weights 1/(1 + log2 N).

    Spectral gap 2/(1 + log2 N). Cost per step and worker: log2(N) messages. 'one-peer-hypercube' uses one bit per step.

    Args:
        num_workers: N, a power of two.
    """
    n, rule = num_workers, "corners of a cube are a power of two; use 'torus' or 'base'."
    require(n & (n - 1) == 0, "hypercube", rule, num_workers=n)
    bits = 1 << np.arange(n.bit_length() - 1)
    weights = np.full((1, n, len(bits) + 1), 1 / (len(bits) + 1))
    return from_permutations("hypercube", (np.arange(n)[:, None] ^ bits)[None], weights)


@register_topology("hyper-hypercube")
def hyper_hypercube(num_workers: int, *, k: int = 1) -> Topology:
    """Average in groups of f_r at stride f_1 ... f_(r-1) in round r, where N = f_1 f_2 ... and all f <= k + 1.

    Exact after one period, one round per factor. Cost per step and worker: at most k messages.

    Args:
        num_workers: N, without prime factors above k + 1.
        k: most peers per step, 1 to 64.

    Source: Takezawa et al., NeurIPS 2023.

    >>> hyper_hypercube(12, k=2).period
    3
    """
    rounds = _hyper_hypercube_rounds(np.arange(num_workers), k)
    if rounds is None:
        raise ValueError(
            f"hyper_hypercube(num_workers={num_workers}, k={k}): {num_workers} has a prime factor above k + 1 = "
            f"{k + 1}; use base(num_workers={num_workers}, k={k}), which accepts any number."
        )
    return from_edges("hyper-hypercube", rounds, num_workers)


def _hyper_hypercube_rounds(nodes: np.ndarray, k: int) -> list[Edges] | None:
    """Return the rounds over `nodes`; None if their number has a prime factor above k + 1."""
    factors = _fewest_factors(len(nodes), k + 1)
    if factors is None:
        return None
    rounds, stride = [], 1
    for factor in factors:
        groups = nodes.reshape(-1, factor, stride)
        first, second = np.triu_indices(factor, 1)
        u, v = groups[:, first].ravel(), groups[:, second].ravel()
        rounds.append((u, v, np.full(len(u), 1 / factor)))
        stride *= factor
    return rounds


@lru_cache(maxsize=4096)
def _fewest_factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors of n that are at most `largest`, in descending order; None if there are none."""
    if n == 1:
        return ()
    rests = {
        factor: _fewest_factors(n // factor, largest) for factor in range(min(n, largest), 1, -1) if n % factor == 0
    }
    return min(((factor, *rest) for factor, rest in rests.items() if rest is not None), key=len, default=None)


@register_topology("base")
def base(num_workers: int, *, k: int = 1) -> Topology:
    """Base-(k+1) graph: simple Base graphs in blocks, then a hyper-hypercube across the blocks.

    N = power x rest, `power` without prime factors above k + 1: blocks of `rest` workers average as in 'simple-base',
    then the blocks average as in 'hyper-hypercube'. If plain 'simple-base' is shorter, it is used instead.
    The mean is exact after a period, at most about 2 log_(k+1) N + 2 steps.
    Cost per step and worker: at most k messages.

    Args:
        num_workers: any N.
        k: most peers per step, 1 to 64.

    Source: Takezawa et al., NeurIPS 2023, algorithm 3.

    >>> [base(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    workers = np.arange(num_workers)
    rest = num_workers
    for factor in range(2, k + 2):
        while rest % factor == 0:
            rest //= factor
    blocks = workers.reshape(-1, rest)
    first = blocks[:, :1]
    within: list[Edges] = [
        ((first + u).ravel(), (first + v).ravel(), np.tile(w, len(blocks))) for u, v, w in _simple(workers[:rest], k)
    ]
    across: list[list[Edges]] = [_hyper_hypercube_rounds(column, k) or [] for column in blocks.T]
    rounds = within + [_together(edges) for edges in zip(*across, strict=True)]
    simple = _simple(workers, k)
    return from_edges("base", simple if len(simple) < len(rounds) else rounds, num_workers)


@register_topology("simple-base")
def simple_base(num_workers: int, *, k: int = 1) -> Topology:
    """Simple Base-(k+1) graph: parts of N's digits in base k + 1 average, share with later parts, average again.

    The mean is exact after a period. Cost per step and worker: at most k messages.

    Args:
        num_workers: any N.
        k: most peers per step, 1 to 64.

    Source: Takezawa et al., NeurIPS 2023, algorithm 2.
    """
    return from_edges("simple-base", _simple(np.arange(num_workers), k), num_workers)


def _simple(workers: np.ndarray, k: int) -> list[Edges]:
    single = _hyper_hypercube_rounds(workers, k)
    if single is not None:
        return single
    digits, parts = [], []  # the digit a of each part, and its workers: a chunks of a power of k + 1
    left, power = workers, (k + 1) ** len(workers).bit_length()
    while power:
        digit = len(left) // power
        if digit:
            digits.append(digit)
            parts.append(left[: digit * power])
            left = left[digit * power :]
        power //= k + 1
    inner = [_hyper_hypercube_rounds(part, k) or [] for part in parts]
    first, last = len(inner[0]), len(parts) - 1
    length = max(first + j + 1 + len(inner[j]) for j in range(last))
    rounds = []
    for step in range(length):
        edges = []
        sharing = step - first  # the part that shares with the later ones in this step
        for j in range(len(parts)):
            turn = step if sharing < 0 else sharing - min(j + 1, last)
            if inner[j] and turn >= 0:
                edges.append(inner[j][turn % len(inner[j])])
        if 0 <= sharing < last:
            later = np.concatenate(parts[sharing + 1 :])
            weight = len(parts[sharing]) / (len(parts[sharing]) + len(later)) / digits[sharing]
            for chunk in np.split(parts[sharing], digits[sharing]):
                edges.append((chunk[-len(later) :], later, np.full(len(later), weight)))
        rounds.append(_together(edges))
    return rounds


def _together(edges: list[Edges] | tuple[Edges, ...]) -> Edges:
    u, v, weights = (np.concatenate(columns) for columns in zip(*edges, strict=True))
    return u, v, weights
