"""Constructors of checked topologies: from tables, matrices, groups, edges or shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from decentfn.core import MOST_WORKERS, array, brief, checks_numbers, real, require, require_at_most, whole_number
from decentfn.topologies.matrices import edge_colors, weighted_permutations
from decentfn.topologies.rounds import Edge, Topology, check, noted

MOST_MESSAGES = 64
"""Most messages that a worker of an undirected graph holds at once."""
MOST_TABLE_ENTRIES = 2**22
"""Largest schedule that is stored as tables."""


@checks_numbers
def from_permutations(name: str, sources: object, weights: object, *, needs_push_sum: bool = False) -> Topology:
    """Make a schedule from explicit tables of messages.

    Args:
        name: name in errors and fingerprints.
        sources: `[P, N, K]` integers; every `sources[p, :, k]` is a permutation of the workers. A worker that is its
            own source sends nothing in that slot (its weight is added to the self-weight).
        weights: `[P, N, K+1]`, self-weight first; rows and columns of every mixing matrix sum to 1 (1e-12).
        needs_push_sum: only columns sum to 1, so algorithms need push-sum. `weights[p, j, 1+k]` is the weight that j
            gives to its source; each sender's weights sum to 1.

    Raises:
        ValueError: wrong shapes, a column that is not a permutation, a negative weight, weights that do not sum to 1, a
            worker that receives from no other in all phases.
    """
    s = torch.from_numpy(array(name, "sources", sources, np.int64))
    w = torch.from_numpy(array(name, "weights", weights))
    rule = f"sources {list(s.shape)} and weights {list(w.shape)} must be [P, N, K] and [P, N, K+1], own weight first."
    require(s.dim() == 3 and w.shape == (*s.shape[:2], s.shape[2] + 1), name, rule)
    require(s.shape[0] > 0, name, "no phase; a schedule has at least one.")
    n = s.shape[1]
    if s.numel() and not (s.min() >= 0 and s.max() < n):
        raise ValueError(f"{name}: sources between {s.min()} and {s.max()}; workers are 0..{n - 1}.")
    is_heard_once = torch.zeros_like(s).scatter_add_(1, s, torch.ones_like(s)) == 1
    if not is_heard_once.all():
        p, k = (~is_heard_once).any(1).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: phase {p}, slot {k}: sources {s[p, :, k].tolist()} is not a permutation of "
            f"the {n} workers; let a worker that receives from nobody be its own source."
        )
    rests = s == torch.arange(n)[:, None]
    w[..., 0] += (w[..., 1:] * rests).sum(-1)
    w[..., 1:].masked_fill_(rests, 0.0)
    topology = Topology(name, n, s, w, needs_push_sum=needs_push_sum)
    check(topology)
    return topology


@checks_numbers
def from_matrices(name: str, matrices: object, *, needs_push_sum: bool = False) -> Topology:
    """Make a schedule from mixing matrices, each decomposed into weighted permutations (messages).

    Undirected rounds are edge-colored, so a slot has the same partner in both directions.

    Args:
        name: name in errors and fingerprints.
        matrices: `[P, N, N]` (or `[N, N]`), `W[i, j]` the weight that i gives to j, not negative.
        needs_push_sum: only the columns sum to 1 (push-sum).

    Raises:
        ValueError: not square, or as `from_permutations`.
    """
    stack = array(name, "matrices", matrices)
    stack = stack[None] if stack.ndim == 2 else stack
    are_square = stack.ndim == 3 and stack.shape[1] == stack.shape[2] and len(stack) > 0
    require(are_square, name, f"matrices of shape {list(stack.shape)}; mixing matrices are [P, N, N] or [N, N].")
    return _padded(name, [weighted_permutations(w) for w in stack], needs_push_sum)


@checks_numbers
def from_groups(name: str, phases: Sequence[Sequence[Edge]], num_workers: int) -> Topology:
    """Make a schedule from groups of workers that average (Decent-DP's edges), one per worker and phase.

    If all groups are pairs (or singles), workers send messages, one per worker and step. Larger groups use an
    all-reduce within the group.

    Args:
        name: name in errors and fingerprints.
        phases: the edges of each step of the period, `Edge(ranks, weight)` or `(ranks, weight)`, with a self-weight in
            [0, 1]; None is 1/len(ranks).
        num_workers: N.

    Raises:
        ValueError: a worker in no edge or in two, a self-weight outside [0, 1], a worker left out over the period.
    """
    require_at_most(name, MOST_WORKERS, num_workers=num_workers)
    _require_listed(name, "phases", phases)
    edges = [[_edge(name, edge) for edge in _require_listed(name, "a phase", phase)] for phase in phases]
    require(len(edges) > 0, name, "no phase; a schedule has at least one.")
    for p, phase in enumerate(edges):
        seen = sorted(rank for ranks, _ in phase for rank in ranks)
        if seen != list(range(num_workers)):
            raise ValueError(
                f"{name}: phase {p} has workers {seen} in its edges; each of 0..{num_workers - 1} must be in exactly "
                "one (an idle worker has its own edge)."
            )
    largest = max(len(ranks) for phase in edges for ranks, _ in phase)
    slots = largest - 1 if largest <= 2 else 0  # pairs are messages
    sources = np.tile(np.arange(num_workers)[:, None], (len(edges), 1, slots))
    weights = np.zeros((len(edges), num_workers, slots + 1))
    weights[..., 0] = 1.0
    groups, means = np.zeros((len(edges), num_workers), dtype=np.int64), np.zeros((len(edges), num_workers))
    for p, phase in enumerate(edges):
        for number, (ranks, weight) in enumerate(phase):
            groups[p, ranks] = number
            if len(ranks) > 1 and slots:
                sources[p, ranks, 0] = ranks[::-1]
                weights[p, ranks] = weight, 1 - weight
            elif len(ranks) > 1:
                means[p, ranks] = len(ranks) * (1 - weight) / (len(ranks) - 1)
    if largest <= 2:
        return from_permutations(name, sources, weights)
    tables = torch.from_numpy(sources), torch.from_numpy((1 - means)[..., None])
    topology = Topology(name, num_workers, *tables, torch.from_numpy(groups), torch.from_numpy(means))
    check(topology)
    return topology


def _edge(name: str, edge: Edge | tuple[Sequence[int], float | None]) -> tuple[list[int], float]:
    is_pair = len(_require_listed(name, "an edge", edge)) == 2
    is_edge = is_pair and len(_require_listed(name, "an edge's workers", edge[0])) > 0
    require(is_edge, name, f"the edge {brief(edge)} is not Edge(ranks, weight), of one rank at least.")
    ranks, weight = [whole_number(name, "ranks", rank) for rank in edge[0]], edge[1]
    weight = 1 / len(ranks) if weight is None else real(name, "weight", weight)
    is_share = 0 <= weight <= 1 and (len(ranks) > 1 or weight == 1)
    rule = "the self-weight lies in [0, 1] and is 1 for a single worker."
    require(is_share, name, f"Edge({ranks}, weight={weight}): {rule}")
    return ranks, weight


def _require_listed(name: str, what: str, given: Any) -> Any:
    if not isinstance(given, (Sequence, np.ndarray, Tensor)) or isinstance(given, str):
        raise ValueError(f"{name}: {what} is {brief(given)}, not a list.")
    return given


@checks_numbers
def from_edges(name: str, rounds: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]], num_workers: int) -> Topology:
    """Make a schedule of undirected rounds from weighted edges; the self-weight is 1 minus the weights of its edges.

    Edges are colored, one color per slot, so a slot has the same partner in both directions.

    Args:
        name: name in errors and fingerprints.
        rounds: `(u, v, weights)` of each step of the period, `[E]` each, every edge once; none for a single worker.
        num_workers: N.

    Raises:
        ValueError: a worker with more than 64 edges in a round, or as `from_permutations`.
    """
    require_at_most(name, MOST_WORKERS, num_workers=num_workers)
    tables = []
    for p, edges in enumerate(_require_listed(name, "rounds", rounds)):
        is_triple = isinstance(edges, (Sequence, np.ndarray)) and not isinstance(edges, str) and len(edges) == 3
        if not is_triple or len({np.shape(column) for column in edges}) != 1 or np.shape(edges[0]) == ():
            raise ValueError(
                f"{name}: round {p} is {brief(edges)}; a round is three columns of one length, (u, v, weights): "
                "([0, 2], [1, 3], [0.5, 0.5]) joins 0 with 1 and 2 with 3, and a schedule is a list of rounds."
            )
        u, v = (array(name, "ends", column, np.int64) for column in edges[:2])
        w = array(name, "weights", edges[2])
        if u.ndim != 1 or (u == v).any() or not ((np.minimum(u, v) >= 0) & (np.maximum(u, v) < num_workers)).all():
            raise ValueError(
                f"{name}: round {p} is {brief(edges)}; an edge joins two of the workers 0..{num_workers - 1}."
            )
        degrees = np.bincount(np.concatenate([u, v]), minlength=num_workers)
        if degrees.max() > MOST_MESSAGES:
            raise ValueError(
                f"{name}: worker {degrees.argmax()} would hold {degrees.max()} messages at once in phase {p}, more "
                f"than {MOST_MESSAGES}; use 'complete' (an all-reduce), 'base' or 'binary-tree'."
            )
        i, j = np.concatenate([u, v]), np.concatenate([v, u])
        k, w = np.tile(edge_colors(u, v, num_workers), 2), np.tile(w, 2)
        sources = np.tile(np.arange(num_workers)[:, None], (1, int(k.max(initial=-1)) + 1))
        weights = np.zeros((num_workers, sources.shape[1] + 1))
        sources[i, k], weights[i, 1 + k] = j, w
        weights[:, 0] = 1.0 - weights[:, 1:].sum(1)
        tables.append((sources, weights))
    return _padded(name, tables or [_idle_tables(num_workers)])


@checks_numbers
def from_shifts(name: str, rounds: Sequence[Mapping[int, float]], num_workers: int) -> Topology:
    """Make a schedule of circulant rounds `W = w_0 I + Σ_s w_s P^s`: worker i receives from i - s with weight w_s.

    Args:
        name: name in errors and fingerprints.
        rounds: shifts and weights of each step of the period; shifts that agree modulo N are one message, shift 0 is
            none. The self-weight is 1 minus the other weights.
        num_workers: N.

    Raises:
        ValueError: negative weights, or weights above 1.
    """
    require_at_most(name, MOST_WORKERS, num_workers=num_workers)
    n, tables = num_workers, []
    for shifts in _require_listed(name, "rounds", rounds):
        if not isinstance(shifts, Mapping):
            raise ValueError(f"{name}: a round is {brief(shifts)}; it is a dict of shifts and weights, {{1: 0.5}}.")
        weight_of: dict[int, float] = {}
        for shift, weight in ((whole_number(name, "shift", s), real(name, "weight", w)) for s, w in shifts.items()):
            if shift % n:
                weight_of[shift % n] = weight_of.get(shift % n, 0.0) + weight
        sources = (np.arange(n)[:, None] - np.array(list(weight_of), dtype=np.int64)) % n
        row = np.array([1.0 - sum(weight_of.values()), *weight_of.values()])
        tables.append((sources, np.tile(row, (n, 1))))
    return _padded(name, tables[: 1 if n == 1 else None] or [_idle_tables(n)])


def _idle_tables(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((n, 0), dtype=np.int64), np.ones((n, 1))


def _padded(name: str, tables: Sequence[tuple[np.ndarray, np.ndarray]], needs_push_sum: bool = False) -> Topology:
    """Make a topology of rounds `(sources [N, K_p], weights [N, K_p + 1])`, padded with idle slots."""
    num_workers, slots = tables[0][0].shape[0], max(sources.shape[1] for sources, _ in tables)
    s = np.tile(np.arange(num_workers)[None, :, None], (len(tables), 1, slots))
    w = np.zeros((len(tables), num_workers, slots + 1))
    for p, (sources, weights) in enumerate(tables):
        s[p, :, : sources.shape[1]] = sources
        w[p, :, : weights.shape[1]] = weights
    return from_permutations(name, s, w, needs_push_sum=needs_push_sum)


@checks_numbers
def idle(num_workers: int, name: str = "idle") -> Topology:
    """Send nothing in any step: `W = I`, period 1."""
    require_at_most("idle", MOST_WORKERS, num_workers=num_workers)
    sources, weights = (torch.from_numpy(table)[None] for table in _idle_tables(num_workers))
    made = Topology(name, num_workers, sources, weights, active=torch.tensor([False]))
    return noted(made, family=partial(idle, name=name))


def alone(name: str) -> Topology:
    """Return the schedule of a single worker."""
    return from_shifts(name, [], 1)
