"""The hypercube, and its generalization to sides of up to k + 1."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from decentfn.numbers import MOST_WORKERS, require
from decentfn.topologies.construct import from_edges, from_permutations
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""`u, v, weights`, `[E]` each: one round of undirected edges."""


@register_topology("hypercube")
def hypercube(num_workers: int) -> Topology:
    """Average with all workers whose number differs in one bit, in every step; all weights 1/(1 + log2 N).

    Spectral gap 2/(1 + log2 N). Cost per step and worker: log2(N) messages. One bit at a time is 'one-peer-hypercube'.

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

    Exact after one period, as many rounds as there are factors. Cost per step and worker: at most k messages.

    Args:
        num_workers: N, without prime factors above k + 1.
        k: most peers per step, 1 to 64.

    Source: Takezawa et al., NeurIPS 2023.

    >>> hyper_hypercube(12, k=2).period
    3
    """
    check_peers("hyper_hypercube", num_workers, k)
    rounds = hyper_hypercube_rounds(np.arange(num_workers), k)
    if rounds is None:
        raise ValueError(
            f"hyper_hypercube(num_workers={num_workers}, k={k}): {num_workers} has a prime factor above k + 1 = {k + 1}; "
            f"use base(num_workers={num_workers}, k={k}), which takes any number."
        )
    return from_edges("hyper-hypercube", rounds, num_workers)


def check_peers(call: str, n: int, k: int) -> None:
    """Raise unless k, the most peers per step, is in range."""
    rule = f"k, the most peers of a step, is at least 1 and at most {MOST_WORKERS}."
    require(1 <= k <= MOST_WORKERS, call, rule, num_workers=n, k=k)


def hyper_hypercube_rounds(nodes: np.ndarray, k: int) -> list[Edges] | None:
    """The rounds over `nodes`; None if their number has a prime factor above k + 1."""
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
    """As few factors of n as possible, each at most `largest`, in descending order; None if there are none."""
    if n == 1:
        return ()
    best = None
    for factor in range(min(n, largest), 1, -1):
        if n % factor == 0 and (best is None or len(best) > 1 + math.ceil(math.log(n / factor, largest) - 1e-9)):
            rest = _fewest_factors(n // factor, largest)
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = (factor, *rest)
    return best
