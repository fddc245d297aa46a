"""EquiTopo: shifts by random distances; the spectral gap does not shrink as N grows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from decentfn.core import draws
from decentfn.topologies.construct import from_edges, from_shifts
from decentfn.topologies.drawn import from_draw
from decentfn.topologies.matching import pair_weights
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


def _distances(n: int, m: int | None, seed: int) -> list[int]:
    """Draw M random distances until they connect all workers (a few even ones for N = 8 might not)."""
    count = max(1, (n - 1).bit_length()) if m is None else m
    distances: list[int] = []
    for attempt in itertools.count() if n > 1 else ():
        distances = (1 + draws.integers(seed, 0, attempt, (count,), n - 1)).tolist()
        if math.gcd(n, *distances) == 1:
            break
    return distances


@register_topology("equitopo-d-static")
def equitopo_d_static(num_workers: int, *, M: int | None = None, seed: int = 0) -> Topology:
    """D-EquiStatic: the mean of M matrices A = I/N + (N-1)/N P^a with random distances a in 1..N-1, in every step.

    Distances that leave the graph disconnected are drawn again.

    Cost per step and worker: M messages (fewer if distances repeat). A static graph for each seed, not symmetric.

    Args:
        num_workers: N >= 1.
        M: number of distances, at least 1; ⌈log2 N⌉ by default.
        seed: any integer.

    Source: Song et al., NeurIPS 2022.
    """
    n = num_workers
    distances = _distances(n, M, seed)
    shifts: dict[int, float] = {}
    for a in distances:
        shifts[a] = shifts.get(a, 0.0) + (n - 1) / n / len(distances)
    return from_shifts("equitopo-d-static", [shifts], n)


@register_topology("equitopo-u-static")
def equitopo_u_static(num_workers: int, *, M: int | None = None, seed: int = 0) -> Topology:
    """U-EquiStatic: D-EquiStatic symmetrized, (W + Wᵀ)/2.

    Cost per step and worker: at most 2M messages. A static graph for each seed.

    Args:
        num_workers: N >= 1.
        M: number of distances, 1 to 32; ⌈log2 N⌉ by default.
        seed: any integer.

    Source: Song et al., NeurIPS 2022.
    """
    n = num_workers
    distances = _distances(n, M, seed)
    weight_of: dict[int, float] = {}
    for a in distances:
        near = min(a, n - a)
        # At distance N/2 both directions are one edge.
        weight_of[near] = weight_of.get(near, 0.0) + (n - 1) / n / len(distances) / (1 if 2 * a == n else 2)
    u, a, weights = (
        np.array([(i, a, weight) for a, weight in weight_of.items() for i in range(n // 2 if 2 * a == n else n)])
        .reshape(-1, 3)
        .T
    )
    return from_edges("equitopo-u-static", [(u, (u + a) % n, weights)], n)


@register_topology("equitopo-od-dyn")
def equitopo_od_dyn(num_workers: int, *, eta: float = 0.5, seed: int = 0) -> Topology:
    """OD-EquiDyn: `W_t = (1-η) I + η (I/N + (N-1)/N P^a)`, with a new random distance a in every step.

    In expectation a step contracts the squared disagreement by `1 - 2η(1-η)` for large N.
    Cost per step and worker: one message. A function of (seed, t), the same on every worker; rounds are not symmetric.

    Args:
        num_workers: N >= 1.
        eta: η in (0, 1].
        seed: any integer.

    Source: Song et al., NeurIPS 2022.
    """
    n, weight = num_workers, eta * (num_workers - 1) / num_workers
    worker = torch.arange(n)
    weights = torch.tensor([1.0 - weight, weight], dtype=torch.float64).repeat(n, 1)

    def draw(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = 1 + draws.integers(seed, t, 0, (), n - 1)
        return ((worker - a) % n)[:, None], ((worker + a) % n)[:, None], weights

    return from_draw("equitopo-od-dyn", n, draw)


@register_topology("equitopo-ou-dyn")
def equitopo_ou_dyn(num_workers: int, *, eta: float = 0.5, seed: int = 0) -> Topology:
    """OU-EquiDyn: pairs at a random distance, `W_t = (1-η) I + η A`, where A gives a pair's partner (N-1)/N.

    From a random start s, workers s, s+1, ... in turn pair with the worker at distance a, if both are free.
    Cost per step and worker: at most one message. A function of (seed, t), the same on every worker.

    Args:
        num_workers: N >= 1.
        eta: η in (0, 1].
        seed: any integer.

    Source: Song et al., NeurIPS 2022.
    """
    n, weight = num_workers, eta * (num_workers - 1) / num_workers

    def draw(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance = 1 + int(draws.integers(seed, t, 0, (), n - 1))
        start = int(draws.integers(seed, t, 1, (), n))
        partner = list(range(n))
        for i in (*range(start, n), *range(start)):
            j = (i + distance) % n
            if partner[i] == i and partner[j] == j:
                partner[i], partner[j] = j, i
        return pair_weights(torch.tensor(partner), weight)

    return from_draw("equitopo-ou-dyn", n, draw)
