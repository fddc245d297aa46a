"""What a topology is: whom each worker hears in step t and with which weights, and how one is made and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decentfn import mixing

_TOLERANCE = 1e-12


class Round(NamedTuple):
    """One step's mixing. Worker i's next value is
    `weights[i, 0] x_i + Σ_k weights[i, 1+k] x_sources[i, k] + mean_weights[i] · (mean of x over i's group)`.
    """

    sources: Tensor  # [N, K] int64; a worker that is its own source hears nothing in that slot
    destinations: Tensor  # [N, K] int64, the inverse: who hears i
    weights: Tensor  # [N, K+1] float64, own weight first
    groups: Tensor | None = None  # [N] int64
    mean_weights: Tensor | None = None  # [N] float64


class Edge(NamedTuple):
    """A group of workers that average: own weight `weight`, the rest shared equally among the others.

    The default weight is 1/len(ranks). (Decent-DP's `Edge`.)
    """

    ranks: Sequence[int]
    weight: float | None = None


@dataclass(frozen=True, eq=False)
class Topology:
    """A schedule of mixing matrices: whom each worker hears in step t, and with which weights.

    Made by `from_permutations`, `from_matrices`, `from_groups` or `from_draw`, which check it; or by name with
    `decentfn.topology`.
    """

    name: str
    num_workers: int
    sources: Tensor
    """`[P, N, K]` int64: the worker that i hears in slot k of phase p (itself: nobody)."""
    weights: Tensor
    """`[P, N, K+1]` float64: own weight first, then one per slot."""
    groups: Tensor | None = None
    """`[P, N]` int64: the group over which worker i averages in phase p, if the schedule averages in groups."""
    mean_weights: Tensor | None = None
    """`[P, N]` float64: the weight of that mean."""
    is_column_stochastic: bool = False
    """Declared: only the columns sum to one (push-sum); otherwise rows do too."""
    draw: Callable[[Tensor], Round] | None = None
    """Random schedules: the round of step t, computed from t alone inside the graph; the tables show round 0."""
    peers: Tensor = field(init=False)
    """`[P, 2, N, K]` int64, what `exchange` reads: sources and destinations, -1 where nothing travels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peers", _peers(self.sources, _inverse(self.sources)))

    @property
    def period(self) -> int | None:
        """Steps after which the schedule repeats; None for a random one, which never does."""
        return None if self.draw else self.sources.shape[0]

    @property
    def degree(self) -> int:
        """Messages that a worker sends in a step, at most; averages in groups are not messages."""
        return self.sources.shape[2]

    def round(self, t: int | Tensor) -> Round:
        """The round of step `t` (0-d int64 tensor inside a compiled function)."""
        t = torch.as_tensor(t, dtype=torch.int64)
        if self.draw is not None:
            return self.draw(t)
        phase = (t % self.sources.shape[0]).view(1)
        sources, destinations = self.peers.index_select(0, phase)[0].unbind(0)
        groups = None if self.groups is None else self.groups.index_select(0, phase)[0]
        mean_weights = None if self.mean_weights is None else self.mean_weights.index_select(0, phase)[0]
        return Round(sources, destinations, self.weights.index_select(0, phase)[0], groups, mean_weights)

    def __repr__(self) -> str:
        kind = "random" if self.draw else f"period={self.period}"
        return f"Topology({self.name!r}, num_workers={self.num_workers}, {kind}, degree={self.degree})"


def _inverse(sources: Tensor) -> Tensor:
    return sources.argsort(dim=1)


def _peers(sources: Tensor, destinations: Tensor) -> Tensor:
    """`[..., N, K]` twice -> `[..., 2, N, K]`, with -1 where a worker is its own peer."""
    me = torch.arange(sources.shape[-2]).unsqueeze(1)
    table = torch.stack([sources, destinations], dim=-3)
    return torch.where(table == me, -1, table)


# -- construction ---------------------------------------------------------------------------------------------


def from_permutations(
    name: str, sources: object, weights: object, *, is_column_stochastic: bool = False
) -> Topology:
    """A schedule from explicit tables of messages.

    Args:
        name: what errors and fingerprints call it.
        sources: `[P, N, K]` integers; every `sources[p, :, k]` is a permutation of the workers. A worker that is its
            own source sends nothing in that slot (its weight is added to the own weight).
        weights: `[P, N, K+1]`, own weight first; rows and columns of every mixing matrix sum to 1 (1e-12).
        is_column_stochastic: only the columns must (push-sum: `weights[p, j, 1+k]` is what j gives to what it hears,
            so that each sender's weights sum to 1).

    Raises:
        ValueError: shapes, a column that is no permutation, weights that do not sum to 1, a worker left out.
    """
    s = torch.as_tensor(np.asarray(sources), dtype=torch.int64).clone()
    w = torch.as_tensor(np.asarray(weights), dtype=torch.float64).clone()
    if s.dim() != 3 or w.shape != (*s.shape[:2], s.shape[2] + 1):
        raise ValueError(
            f"{name}: sources {list(s.shape)} and weights {list(w.shape)} must be [P, N, K] and [P, N, K+1], "
            "own weight first."
        )
    workers = torch.arange(s.shape[1])
    if not (s.sort(dim=1).values == workers[:, None]).all():
        bad = (s.sort(dim=1).values != workers[:, None]).any(1).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: phase {bad[0]}, slot {bad[1]}: sources {s[bad[0], :, bad[1]].tolist()} is not a permutation of "
            f"the {s.shape[1]} workers; let a worker that hears nobody be its own source."
        )
    alone = s == workers[:, None]
    w[..., 0] += (w[..., 1:] * alone).sum(-1)
    w[..., 1:].masked_fill_(alone, 0.0)
    topology = Topology(name, s.shape[1], s, w, is_column_stochastic=is_column_stochastic)
    _check(topology)
    return topology


def from_matrices(name: str, matrices: object, *, is_column_stochastic: bool = False) -> Topology:
    """A schedule from mixing matrices, each decomposed into weighted permutations (messages).

    Undirected rounds are coloured by edges, so that the partner of a slot is the same both ways.

    Args:
        name: what errors and fingerprints call it.
        matrices: `[P, N, N]` (or `[N, N]`), `W[i, j]` the weight that i gives to j; non-negative off the diagonal.
        is_column_stochastic: only the columns sum to 1 (push-sum).

    Raises:
        ValueError: not square, not stochastic to 1e-12, a worker left out over the period.
    """
    stack = np.asarray(matrices, dtype=np.float64)
    stack = stack[None] if stack.ndim == 2 else stack
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2]:
        raise ValueError(f"{name}: matrices of shape {list(stack.shape)}; mixing matrices are [P, N, N] or [N, N].")
    _check_sums(name, torch.from_numpy(stack), is_column_stochastic)
    rounds = [mixing.weighted_permutations(matrix) for matrix in stack]
    num_workers, degree = stack.shape[1], max(sources.shape[1] for sources, _ in rounds)
    s = np.tile(np.arange(num_workers)[None, :, None], (len(rounds), 1, degree))
    w = np.zeros((len(rounds), num_workers, degree + 1))
    for p, (sources, weights) in enumerate(rounds):
        s[p, :, : sources.shape[1]] = sources
        w[p, :, : weights.shape[1]] = weights
    return from_permutations(name, s, w, is_column_stochastic=is_column_stochastic)


def from_groups(name: str, phases: Sequence[Sequence[Edge]], num_workers: int) -> Topology:
    """A schedule from groups of workers that average, Decent-DP's edges. Every worker is in exactly one per phase.

    A schedule whose groups are all pairs (or singles) travels as messages, one per worker and step; any larger group
    is averaged by an all-reduce within the group.

    Args:
        name: what errors and fingerprints call it.
        phases: for each step of the period, its edges: `Edge(ranks, weight)` or `(ranks, weight)`, the own weight in
            [0, 1], 1/len(ranks) if it is None.
        num_workers: N.

    Raises:
        ValueError: a worker in no edge or in two, an own weight outside [0, 1], a worker left out over the period.
    """
    edges = [[_edge(name, edge) for edge in phase] for phase in phases]
    if not edges:
        raise ValueError(f"{name}: no phase; a schedule has at least one.")
    for p, phase in enumerate(edges):
        seen = sorted(rank for ranks, _ in phase for rank in ranks)
        if seen != list(range(num_workers)):
            raise ValueError(
                f"{name}: phase {p} has workers {seen} in its edges; each of 0..{num_workers - 1} must be in exactly "
                "one (a worker that rests has an edge of its own)."
            )
    if all(len(ranks) <= 2 for phase in edges for ranks, _ in phase):
        return _from_pairs(name, edges, num_workers)
    groups = torch.zeros(len(edges), num_workers, dtype=torch.int64)
    mean_weights = torch.zeros(len(edges), num_workers, dtype=torch.float64)
    for p, phase in enumerate(edges):
        for number, (ranks, weight) in enumerate(phase):
            groups[p, list(ranks)] = number
            if len(ranks) > 1:
                mean_weights[p, list(ranks)] = len(ranks) * (1 - weight) / (len(ranks) - 1)
    sources = torch.zeros(len(edges), num_workers, 0, dtype=torch.int64)
    topology = Topology(name, num_workers, sources, (1 - mean_weights)[..., None], groups, mean_weights)
    _check(topology)
    return topology


def _edge(name: str, edge: Edge | tuple[Sequence[int], float | None]) -> tuple[tuple[int, ...], float]:
    ranks, weight = tuple(edge[0]), edge[1]
    weight = 1 / len(ranks) if weight is None else float(weight)
    if not 0 <= weight <= 1 or (len(ranks) == 1 and weight != 1):
        raise ValueError(
            f"{name}: Edge({list(ranks)}, weight={weight}): the own weight lies in [0, 1] and is 1 for a single worker."
        )
    return ranks, weight


def _from_pairs(name: str, edges: list[list[tuple[tuple[int, ...], float]]], num_workers: int) -> Topology:
    degree = max(len(ranks) for phase in edges for ranks, _ in phase) - 1
    sources = torch.arange(num_workers)[:, None].repeat(len(edges), 1, degree)
    weights = torch.zeros(len(edges), num_workers, degree + 1, dtype=torch.float64)
    weights[..., 0] = 1.0
    for p, phase in enumerate(edges):
        for ranks, weight in phase:
            if len(ranks) == 2:
                sources[p, list(ranks), 0] = torch.tensor(ranks[::-1])
                weights[p, list(ranks)] = torch.tensor([weight, 1 - weight], dtype=torch.float64)
    return from_permutations(name, sources, weights)


def from_draw(
    name: str, num_workers: int, draw: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], *, steps_checked: int = 16
) -> Topology:
    """A random schedule: a function of t alone, evaluated inside the graph and the same on every worker.

    Args:
        name: what errors and fingerprints call it.
        num_workers: N.
        draw: `t` (0-d int64) -> `(sources [N, K], destinations [N, K], weights [N, K+1])`, traceable by torch.compile;
            randomness comes from `decentfn.noise`, keyed by (seed, t).
        steps_checked: the first rounds that are checked here as tables would be.

    Raises:
        ValueError: a round that is no sum of weighted permutations, or is not doubly stochastic.
    """

    def round_of(t: Tensor) -> Round:
        sources, destinations, weights = draw(t)
        return Round(*_peers(sources, destinations).unbind(0), weights)

    drawn = [draw(torch.tensor(t)) for t in range(steps_checked)]
    tables = from_permutations(name, torch.stack([d[0] for d in drawn]), torch.stack([d[2] for d in drawn]))
    if not torch.equal(torch.stack([d[1] for d in drawn]), _inverse(torch.stack([d[0] for d in drawn]))):
        raise ValueError(f"{name}: draw(t) returned destinations that are not the inverse of its sources.")
    return Topology(name, num_workers, tables.sources[:1], tables.weights[:1], draw=round_of)


# -- checks -------------------------------------------------------------------------------------------------------


def _check(topology: Topology) -> None:
    """Stochastic in every phase, and every worker connected with another over the period."""
    rows = topology.weights.sum(-1)
    columns = topology.weights[..., 0].clone()
    for slot in range(topology.degree):
        columns.scatter_add_(1, topology.sources[..., slot], topology.weights[..., 1 + slot])
    if topology.mean_weights is not None:
        rows, columns = rows + topology.mean_weights, columns + topology.mean_weights
    _check_ones(topology.name, columns, "column")
    if not topology.is_column_stochastic:
        _check_ones(topology.name, rows, "row")
    _check_nobody_left_out(topology)


def _check_sums(name: str, matrices: Tensor, is_column_stochastic: bool) -> None:
    _check_ones(name, matrices.sum(1), "column")
    if not is_column_stochastic:
        _check_ones(name, matrices.sum(2), "row")


def _check_ones(name: str, sums: Tensor, kind: str) -> None:
    wrong = ~((sums - 1).abs() <= _TOLERANCE)
    if wrong.any():
        p, i = wrong.nonzero()[0].tolist()
        way_out = (
            "columns must sum to 1 so that the mean is kept"
            if kind == "column"
            else "rows must sum to 1 so that consensus is kept; a push-sum graph declares is_column_stochastic=True"
        )
        raise ValueError(f"{name}: {kind} {i} of phase {p} sums to {sums[p, i].item():.15g}, not 1 (1e-12); {way_out}.")


def _check_nobody_left_out(topology: Topology) -> None:
    if topology.num_workers == 1:
        return
    me = torch.arange(topology.num_workers)[:, None]
    talks = ((topology.sources != me) & (topology.weights[..., 1:] != 0)).any(-1).any(0)
    if topology.groups is not None and topology.mean_weights is not None:
        for row, weights in zip(topology.groups, topology.mean_weights, strict=True):
            talks |= (row.bincount()[row] > 1) & (weights != 0)
    if not talks.all():
        lonely = (~talks).nonzero()[:, 0].tolist()
        raise ValueError(
            f"{topology.name}: workers {lonely[:8]} hear nobody in the whole period, so they would train alone; "
            "give each a neighbour in some phase."
        )


# -- facts ----------------------------------------------------------------------------------------------------------


def mixing_matrix(topology: Topology, t: int) -> Tensor:
    """The mixing matrix of step `t`: `[N, N]` float64, `W[i, j]` the weight that worker i gives to worker j."""
    n = topology.num_workers
    sources, _, weights, groups, mean_weights = topology.round(t)
    matrix = torch.diag(weights[:, 0])
    me = torch.arange(n)
    for slot in range(sources.shape[1]):
        heard = torch.where(sources[:, slot] < 0, me, sources[:, slot])
        matrix[me, heard] += weights[:, 1 + slot]
    if groups is not None and mean_weights is not None:
        together = (groups[:, None] == groups[None, :]).to(torch.float64)
        matrix += mean_weights[:, None] * together / together.sum(1, keepdim=True)
    return matrix
