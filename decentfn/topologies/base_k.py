"""Base-(k+1) graphs: the exact mean in finitely many steps for any number of workers, with at most k peers a step."""

from __future__ import annotations

import numpy as np

from decentfn.topologies.construct import from_edges
from decentfn.topologies.hypercubes import Edges, check_peers, hyper_hypercube_rounds
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


@register_topology("base")
def base(num_workers: int, *, k: int = 1) -> Topology:
    """The Base-(k+1) graph: simple Base graphs in blocks, then a hyper-hypercube across the blocks.

    N = power x rest, `power` without prime factors above k + 1: blocks of `rest` workers find their means as in
    'simple-base', then the blocks average as in 'hyper-hypercube'; the plain 'simple-base' where that is shorter.
    The mean is exact after a period, about 2 log_(k+1) N + 2 steps at most.
    Cost per step and worker: at most k messages.

    Args:
        num_workers: any N >= 1.
        k: most peers per step, 1 to 64.

    Returns:
        Topology of symmetric rounds.

    Source: Takezawa et al., NeurIPS 2023, algorithm 3.

    >>> [base(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    check_peers("base", num_workers, k)
    workers = np.arange(num_workers)
    rest = _without_small_factors(num_workers, k + 1)
    blocks = workers.reshape(-1, rest)
    first = blocks[:, :1]
    inside: list[Edges] = [
        ((first + u).ravel(), (first + v).ravel(), np.tile(w, len(blocks))) for u, v, w in _simple(workers[:rest], k)
    ]
    across: list[list[Edges]] = [hyper_hypercube_rounds(column, k) or [] for column in blocks.T]
    rounds = inside + [_together(edges) for edges in zip(*across, strict=True)]
    simple = _simple(workers, k)
    return from_edges("base", simple if len(simple) < len(rounds) else rounds, num_workers)


@register_topology("simple-base")
def simple_base(num_workers: int, *, k: int = 1) -> Topology:
    """The Simple Base-(k+1) graph: parts of N's digits in base k + 1 average, share with the later parts, average again.

    The mean is exact after a period. Cost per step and worker: at most k messages.

    Args:
        num_workers: any N >= 1.
        k: most peers per step, 1 to 64.

    Source: Takezawa et al., NeurIPS 2023, algorithm 2.
    """
    check_peers("simple_base", num_workers, k)
    return from_edges("simple-base", _simple(np.arange(num_workers), k), num_workers)


def _simple(workers: np.ndarray, k: int) -> list[Edges]:
    whole = hyper_hypercube_rounds(workers, k)
    if whole is not None:
        return whole
    digits, parts = [], []  # the digit a of each part, and its workers: a chunks of a power of k + 1
    left, power = workers, (k + 1) ** len(workers).bit_length()
    while power:
        digit = len(left) // power
        if digit:
            digits.append(digit)
            parts.append(left[: digit * power])
            left = left[digit * power :]
        power //= k + 1
    inner = [hyper_hypercube_rounds(part, k) or [] for part in parts]
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


def _without_small_factors(n: int, largest: int) -> int:
    for factor in range(2, largest + 1):
        while n % factor == 0:
            n //= factor
    return n
