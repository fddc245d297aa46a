"""Torus and grid."""

from __future__ import annotations

import math

import numpy as np

from decentfn.numbers import require
from decentfn.topologies.construct import from_edges
from decentfn.topologies.graphs import metropolis_hastings
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


@register_topology("torus")
def torus(num_workers: int, *, rows: int | None = None) -> Topology:
    """Average with the neighbors on a grid whose sides are glued: weights 1/5 where both sides are at least 3.

    A side of 2 has one neighbor along it, not two, so the weights are 1/(1 + neighbors), 1/4 or 1/3; a side of 1 none
    (a prime number of workers is a ring). Spectral gap (2 - 2 cos(2π / longest side)) / 5 for sides of at least 3.
    Cost per step and worker: four messages at most.

    Args:
        num_workers: N = rows x columns; worker `r * columns + c` is in row r, column c.
        rows: the number of rows, a divisor of N; by default the largest that is at most √N.

    >>> torus(25).degree
    4
    """
    number, (height, width) = _numbered("torus", num_workers, rows)
    down = (number, np.roll(number, -1, 0)) if height > 2 else (number[:-1], number[1:])
    right = (number, np.roll(number, -1, 1)) if width > 2 else (number[:, :-1], number[:, 1:])
    return _from_links("torus", down, right, num_workers)


@register_topology("grid")
def grid(num_workers: int, *, rows: int | None = None) -> Topology:
    """Average with the neighbors on a grid with borders, Metropolis-Hastings weights 1/(1 + max(d_i, d_j)).

    Cost per step and worker: four messages at most.

    Args:
        num_workers: N = rows x columns; worker `r * columns + c` is in row r, column c.
        rows: the number of rows, a divisor of N; by default the largest that is at most √N.
    """
    number, _ = _numbered("grid", num_workers, rows)
    return _from_links("grid", (number[:-1], number[1:]), (number[:, :-1], number[:, 1:]), num_workers)


def _numbered(name: str, n: int, rows: int | None) -> tuple[np.ndarray, tuple[int, int]]:
    if rows is None:
        rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    is_divisor = rows >= 1 and n % rows == 0
    require(is_divisor, name, "the rows must divide the workers; leave rows out.", num_workers=n, rows=rows)
    return np.arange(n).reshape(rows, n // rows), (rows, n // rows)


def _from_links(
    name: str, down: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray], n: int
) -> Topology:
    u, v = (np.concatenate([a.ravel(), b.ravel()]) for a, b in zip(down, right, strict=True))
    return from_edges(name, [(u, v, metropolis_hastings(u, v, n))], n)
