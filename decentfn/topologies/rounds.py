"""What a topology is: whom each worker receives from in step t and with which weights, and what is checked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.numbers import checks_numbers
from decentfn.words import brief

_TOLERANCE = 1e-12


class Round(NamedTuple):
    """One step's mixing. Worker i's next value is
    `weights[i, 0] x_i + Σ_k weights[i, 1+k] x_sources[i, k] + mean_weights[i] · (mean of x over i's group)`.
    """

    sources: Tensor  # [N, K] int64, whom i receives from in slot k; -1: nobody
    destinations: Tensor  # [N, K] int64, the inverse: whom i sends to; -1: nobody
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
    """A schedule of mixing matrices: whom each worker receives from in step t, and with which weights.

    Made by the `from_...` functions of `decentfn.topologies.construct`, which check it; or by name with
    `decentfn.topology`. What it promises is computed by `decentfn.certificate`.
    """

    name: str
    num_workers: int
    sources: Tensor
    """`[P, N, K]` int64: the worker that i receives from in slot k of phase p (itself: nobody)."""
    weights: Tensor
    """`[P, N, K+1]` float64: own weight first, then one per slot."""
    groups: Tensor | None = None
    """`[P, N]` int64: the group over which worker i averages in phase p, if the schedule averages in groups."""
    mean_weights: Tensor | None = None
    """`[P, N]` float64: the weight of that mean."""
    is_column_stochastic: bool = False
    """Declared: only the columns sum to one (push-sum); otherwise rows do too."""
    draw: Callable[[Tensor], Round] | None = None
    """Schedules without tables: the round of step t, computed from t alone inside the graph. Random ones are such, and
    ones whose tables would be too long. `sources` and `weights` then show round 0; `groups` stays a table."""
    repeats: int | None = None
    """With `draw`: the period, if it is not random."""
    peers: Tensor = field(init=False)
    """`[P, 2, N, K]` int64, what `exchange` reads: sources and destinations, -1 where nothing travels."""
    degree: int = field(init=False)
    """Messages that a worker sends in a step, at most; averages in groups are not messages. At most `slots`."""
    rows_sum_to_one = True
    """Whether rows sum to one unless only columns do; False where a fault of another library is repeated."""
    weighs_alike: bool = field(init=False)
    """Whether in each phase all workers have the same weights. False with `draw`, whose rounds are not known."""

    def __post_init__(self) -> None:
        peers = with_silence(self.sources, inverse(self.sources))
        sent = (peers[:, 1] >= 0).sum(-1)
        object.__setattr__(self, "peers", peers)
        object.__setattr__(self, "degree", self.slots if self.draw else int(sent.max()))
        tables = [self.weights] if self.mean_weights is None else [self.weights, self.mean_weights]
        alike = not self.draw and all([torch.equal(x, x[:, :1].expand_as(x)) for x in tables])
        object.__setattr__(self, "weighs_alike", alike)

    @property
    def period(self) -> int | None:
        """Steps after which the schedule repeats; None for a random one, which never does."""
        return self.repeats if self.draw else self.sources.shape[0]

    @property
    def slots(self) -> int:
        """K, the messages that a step has room for: a few more than `degree` where partners must pair up."""
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
        kind = "random" if self.period is None else f"period={self.period}"
        return f"Topology({self.name!r}, num_workers={self.num_workers}, {kind}, degree={self.degree})"


def inverse(sources: Tensor) -> Tensor:
    """Sources -> destinations, `[..., N, K]`."""
    me = torch.arange(sources.shape[-2])[:, None].expand_as(sources)
    return torch.empty_like(sources).scatter_(-2, sources, me)


def with_silence(sources: Tensor, destinations: Tensor) -> Tensor:
    """`[..., N, K]` twice -> `[..., 2, N, K]`, with -1 where a worker is its own peer."""
    me = torch.arange(sources.shape[-2]).unsqueeze(1)
    table = torch.stack([sources, destinations], dim=-3)
    return torch.where(table == me, -1, table)


# -- checks -------------------------------------------------------------------------------------------------------


def require_topology(call: str, topology: object) -> None:
    """Raise ValueError unless this is a topology; `call` is how the user wrote what takes it."""
    if not isinstance(topology, Topology):
        raise ValueError(f"{call}({brief(topology)}): expected a topology, such as df.topology('ring', 4).")


def require_step(call: str, t: int) -> None:
    """Raise ValueError for a step before the first."""
    if not 0 <= t < 2**63:
        raise ValueError(f"{call}(t={brief(t)}): t numbers the steps, from 0.")


def check(topology: Topology, *, nobody_left_out: bool = True) -> None:
    """Stochastic in every phase, and every worker connected with another over the period."""
    rows = topology.weights.sum(-1)
    columns = topology.weights[..., 0].clone()
    for slot in range(topology.slots):
        columns.scatter_add_(1, topology.sources[..., slot], topology.weights[..., 1 + slot])
    _check_signs(topology)
    if topology.mean_weights is not None:
        rows, columns = rows + topology.mean_weights, columns + topology.mean_weights
    _check_ones(topology.name, columns, "column")
    if not topology.is_column_stochastic:
        _check_ones(topology.name, rows, "row")
    if nobody_left_out:
        _check_nobody_left_out(topology)


def check_sums(name: str, matrices: Tensor, is_column_stochastic: bool) -> None:
    """Columns of `matrices` `[P, N, N]` sum to 1, and rows too unless only columns need to."""
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


def _check_signs(topology: Topology) -> None:
    """No weight is negative: neither the own, with its share of the mean over the group, nor another's."""
    weights = topology.weights.clone()
    if topology.groups is not None and topology.mean_weights is not None:
        for row, groups, means in zip(weights, topology.groups, topology.mean_weights, strict=True):
            row[:, 0] += means / groups.bincount()[groups]
    if (weights < -_TOLERANCE).any():
        p, i, k = (weights < -_TOLERANCE).nonzero()[0].tolist()
        whose = (
            f"worker {i}'s own weight"
            if k == 0
            else f"the weight that worker {i} gives to worker {topology.sources[p, i, k - 1]}"
        )
        raise ValueError(
            f"{topology.name}: {whose} in phase {p} is {weights[p, i, k].item():.15g}; weights are not negative, or mixing could "
            "drive the workers apart."
        )


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
            f"{topology.name}: workers {lonely[:8]} receive from nobody in the whole period, so they would train alone; "
            "give each a neighbour in some phase."
        )


# -- facts ----------------------------------------------------------------------------------------------------------


@checks_numbers
def mixed(topology: Topology, t: int, x: Tensor) -> Tensor:
    """`W_t x`, `[N, D]`: what mixing in step `t` makes of the workers' rows of `x`."""
    require_topology("mixed", topology)
    require_step("mixed", t)
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or len(x) != topology.num_workers:
        raise ValueError(
            f"mixed(topology, t, x={brief(x)}): x has a row for each of the {topology.num_workers} workers, [N, D]."
        )
    sources, _, weights, groups, mean_weights = topology.round(t)
    me = torch.arange(topology.num_workers)
    y = weights[:, :1] * x
    for slot in range(sources.shape[1]):
        heard = torch.where(sources[:, slot] < 0, me, sources[:, slot])
        y = y + weights[:, 1 + slot, None] * x[heard]
    if groups is not None and mean_weights is not None:
        sums = torch.zeros_like(x).index_add_(0, groups, x)
        y = y + (mean_weights / groups.bincount()[groups])[:, None] * sums[groups]
    return y


@checks_numbers
def mixing_matrix(topology: Topology, t: int) -> Tensor:
    """The mixing matrix of step `t`: `[N, N]` float64, `W[i, j]` the weight that worker i gives to worker j."""
    require_topology("mixing_matrix", topology)
    require_step("mixing_matrix", t)
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
