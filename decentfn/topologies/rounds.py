"""Topologies: sources and weights of every worker and step, and their checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from decentfn.core import brief, checks_arguments, draws, handle_of, require, rule_of, sent

if TYPE_CHECKING:
    from decentfn.topologies.resized import Resized

_TOLERANCE = 1e-12
_ROUNDS_KEPT = 256


class Round(NamedTuple):
    """Mixing of one step. Worker i's next value is
    `weights[i, 0] x_i + Σ_k weights[i, 1+k] x_sources[i, k] + mean_weights[i] · (mean of x over i's group)`.
    """

    sources: Tensor  # [N, K] int64, the worker that i receives from in slot k; -1: none
    destinations: Tensor  # [N, K] int64, the inverse: the worker that i sends to; -1: none
    weights: Tensor  # [N, K+1] float64, self-weight first
    groups: Tensor | None = None  # [N] int64
    mean_weights: Tensor | None = None  # [N] float64
    is_active: bool = True
    """False in an idle round: all workers keep their values, and an outer update waits."""

    @property
    def heard(self) -> Tensor:
        """Sources `[N, K]` int64, with the worker itself in idle slots."""
        return torch.where(self.sources < 0, torch.arange(len(self.sources))[:, None], self.sources)


class Edge(NamedTuple):
    """Decent-DP's `Edge`: workers that average with self-weight `weight` (1/len(ranks) if None), others equally."""

    ranks: Sequence[int]
    weight: float | None = None


class Peers(NamedTuple):
    """Peers of a round as Python integers, for the backend."""

    sources: list[list[int]]  # [N][K]
    destinations: list[list[int]]  # [N][K]
    members: list[list[int]] | None  # [N]: members of each worker's group, ascending


@dataclass(frozen=True, eq=False)
class Topology:
    """Schedule of mixing matrices: sources and weights of every worker and step.

    Make one by name with `decentfn.topology`, or with the `from_...` functions of `decentfn.topologies`, which check
    it. `decentfn.topologies.certificate` computes its guarantees.
    """

    name: str
    num_workers: int
    sources: Tensor
    """`[P, N, K]` int64: the worker that i receives from in slot k of phase p; i itself, or any with weight 0, if it is idle."""
    weights: Tensor
    """`[P, N, K+1]` float64: self-weight first, then one per slot."""
    groups: Tensor | None = None
    """`[P, N]` int64: the group over which worker i averages in phase p, if the schedule averages in groups."""
    mean_weights: Tensor | None = None
    """`[P, N]` float64: the weight of the group's mean."""
    needs_push_sum: bool = False
    """True if only columns are declared to sum to 1, so that algorithms need push-sum; otherwise rows do too."""
    draw: Callable[[Tensor], Round] | None = None
    """Round of step t (0-d int64), a function of t alone, for schedules that are random or too long for tables.
    `sources` and `weights` then hold round 0, and `groups` all groupings that occur."""
    repeats: int | None = None
    """Period of a schedule with `draw` that is not random."""
    active: Tensor | None = None
    """`[P]` bool: False in idle phases; None: there are none."""
    start: int = 0
    """First step of the first period; the steps before it do not repeat. 0 for tables and random schedules."""
    rows_sum_to_one = True
    """False if the schedule reproduces a fault of another library: rows that do not sum to 1."""
    family: Callable[[int], Topology] | None = field(init=False, default=None)
    """Constructor for another number of workers, with the same options; None if there is none, as for own matrices."""
    made_from: partial[Topology] | None = field(init=False, default=None)
    """Call that combined it from other topologies; None if it is no combination."""
    turn: Callable[[int], tuple[Topology, int]] | None = field(init=False, default=None)
    """Of a schedule that takes turns: the part of which step t is a round, and that round's number."""
    suits: Callable[[Topology], object] | None = field(init=False, default=None)
    """Raises ValueError for a schedule that this one's algorithm would refuse in its place; None: there is no algorithm."""
    without: ClassVar[Callable[[Topology, Collection[int]], Resized]]
    resized: ClassVar[Callable[[Topology, int], Resized]]
    """Methods: the schedule of the remaining workers, and that of another number of workers (`resized.py`)."""
    degree: int = field(init=False)
    """Most messages that a worker sends in a step, without group averages. At most `slots`."""
    slots: int = field(init=False)
    """K, the number of message slots of a step: a few more than `degree` if slots must be matchings."""
    has_groups: bool = field(init=False)
    handle: Tensor = field(init=False)
    """0-d int64, the number by which operators find this topology. A tensor, so it is an input of compiled code."""
    _phase: Callable[[int], int] = field(init=False)
    """First step with the round of a step; of tables, its phase."""
    _rounds: Callable[[int], Round] = field(init=False)
    _peers: Callable[[int], Peers] = field(init=False)
    _rows: Callable[[int, torch.device], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        hears = (self.sources != torch.arange(self.num_workers)[:, None]) & (self.weights[..., 1:] != 0)
        told = self.weights.new_zeros(hears.shape[:2]).scatter_add(
            1, self.sources.flatten(1), hears.flatten(1).to(self.weights)
        )
        slots = self.sources.shape[2]
        computed = {
            "degree": slots if self.draw else int(told.max()),
            "slots": slots,
            "has_groups": self.groups is not None,
            "handle": handle_of(self),
            "_phase": self._make_phase if self.draw else len(self.sources).__rmod__,  # t % P without a frame of Python
            "_rounds": lru_cache(_ROUNDS_KEPT)(self._make_round),
            "_peers": lru_cache(_ROUNDS_KEPT)(self._make_peers),
            "_rows": lru_cache(_ROUNDS_KEPT)(self._make_rows),
        }
        noted(self, **computed)

    @property
    def period(self) -> int | None:
        """Steps after which the schedule repeats, from step `start` on; None for a random one."""
        return self.repeats if self.draw else self.sources.shape[0]

    @property
    def cycle(self) -> range | None:
        """Steps of the first period, from step `start` on; None for a random schedule."""
        return None if self.period is None else range(self.start, self.start + self.period)

    def steps(self, most: int = 64) -> list[int]:
        """Return sample steps: those before the start and those of the period (or any if random), `most` of either."""
        return [*range(min(self.start, most)), *(self.cycle or range(most))[:most]]

    def round(self, t: int | Tensor) -> Round:
        """Return the round of step `t`."""
        return self._rounds(self._phase(int(t)))

    def is_active(self, t: int) -> bool:
        """Return False if step `t` is idle; the rounds of a combination are not computed for it."""
        one = self
        while one.turn is not None:
            one, t = one.turn(t)
        return one._rounds(one._phase(t)).is_active

    def peers(self, t: int | Tensor) -> Peers:
        """Return the peers of step `t` as Python integers."""
        return self._peers(self._phase(int(t)))

    def groups_of(self, t: int | Tensor) -> Tensor:
        """Return the group of every worker in step `t`, `[N]` int64; without groups, the worker's number."""
        groups = self.round(t).groups
        return torch.arange(self.num_workers) if groups is None else groups

    def rows(self, t: int | Tensor, device: torch.device) -> Tensor:
        """Return every worker's row of round `t` on the device.

        `[N, 7 + 3K]` float64: 1 in an active round; the worker; its group; the group's size; 1 if both ends of every
        slot hear each other with the same weight; self-weight; K weights of the slots; weight of the group's mean; K
        sources; K weights that the receivers give to its messages.
        """
        return self._rows(self._phase(int(t)), device)

    def _make_phase(self, t: int) -> int:
        return t if self.repeats is None or 0 <= t < self.start else self.start + (t - self.start) % self.repeats

    def _make_round(self, key: int) -> Round:
        if self.draw is not None:
            return self.draw(torch.tensor(key))
        sources, unheard = self.sources[key], self.weights[key, :, 1:] == 0  # what completes a permutation is not sent
        destinations = silenced(inverse(sources)).masked_fill(unheard.gather(0, inverse(sources)), -1)
        sources = silenced(sources).masked_fill(unheard, -1)
        groups = None if self.groups is None else self.groups[key]
        mean_weights = None if self.mean_weights is None else self.mean_weights[key]
        is_active = self.active is None or bool(self.active[key])
        return Round(sources, destinations, self.weights[key], groups, mean_weights, is_active)

    def _make_peers(self, key: int) -> Peers:
        this = self._rounds(key)
        members = None
        if this.groups is not None:
            by_group: dict[int, list[int]] = {}
            members = [by_group.setdefault(group, []) for group in this.groups.tolist()]
            for worker, its in enumerate(members):
                its.append(worker)
        return Peers(this.sources.tolist(), this.destinations.tolist(), members)

    def _make_rows(self, key: int, device: torch.device) -> Tensor:
        this, n = self._rounds(key), self.num_workers
        groups = self.groups_of(key)
        mean_weights = torch.zeros(n) if this.mean_weights is None else this.mean_weights
        given = this.weights[:, 1:].gather(0, this.destinations.clamp(min=0)).masked_fill(this.destinations < 0, 0.0)
        are_pairs = torch.equal(this.sources, this.destinations) and torch.equal(this.weights[:, 1:], given)
        active, pairs = torch.full((n,), int(this.is_active)), torch.full((n,), int(are_pairs))
        facts = torch.stack([active, torch.arange(n), groups, groups.bincount()[groups], pairs], dim=1)
        rows = torch.cat([facts, this.weights, mean_weights[:, None], this.sources, given], dim=1).to(torch.float64)
        return sent(rows, device)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy gets its own handle
        arguments = tuple(getattr(self, field.name) for field in fields(self) if field.init)
        return type(self), arguments, {"family": self.family, "made_from": self.made_from}

    def __repr__(self) -> str:
        kind = "random" if self.period is None else f"period={self.period}"
        return f"Topology({self.name!r}, num_workers={self.num_workers}, {kind}, degree={self.degree})"


def noted(topology: Topology, **fields: Any) -> Topology:
    """Set fields of a schedule that has just been made, such as its `family`; return it."""
    for name, value in fields.items():
        object.__setattr__(topology, name, value)
    return topology


def demanding(topology: Topology, suits: Callable[[Topology], object]) -> Topology:
    """Return a copy that only schedules for which `suits` raises no ValueError may replace, as after a loss."""
    return noted(copy.copy(topology), suits=suits, turn=topology.turn)


def inverse(sources: Tensor) -> Tensor:
    """Return the destinations of `sources`, `[..., N, K]`."""
    me = torch.arange(sources.shape[-2])[:, None].expand_as(sources)
    return torch.empty_like(sources).scatter_(-2, sources, me)


def silenced(peers: Tensor) -> Tensor:
    """Return `peers` `[..., N, K]` with -1 where a worker is its own peer."""
    return peers.masked_fill(peers == torch.arange(peers.shape[-2])[:, None], -1)


def require_topology(call: str, topology: object) -> None:
    """Raise ValueError unless this is a topology; `call` is the user's call."""
    require(isinstance(topology, Topology), f"{call}({brief(topology)})", _EXPECTED)


_EXPECTED = "expected a topology, such as df.topology('ring', 4)."
_MOST_STEPS = 2**31 - 1
RULES = {
    **dict.fromkeys(
        ("topology", "other", "first", "then"),
        lambda call, name, value: require(isinstance(value, Topology), call, _EXPECTED, **{name: value}),
    ),
    "t": rule_of(lambda t: 0 <= t < 2**63, "numbers the steps, from 0."),
    "H": rule_of(lambda H: 1 <= H <= _MOST_STEPS, f"is an integer >= 1, at most {_MOST_STEPS}."),
    "steps": rule_of(lambda steps: 0 <= steps <= _MOST_STEPS, "is an integer >= 0, a number of steps."),
    "keep": rule_of(lambda keep: 0 <= keep < 1, "is in [0, 1), the share of the own parameters that is not mixed."),
    "probability": rule_of(lambda p: 0 <= p <= 1, "is in [0, 1]."),
}
"""Rules of the arguments of functions of topologies, by their names."""


def check(topology: Topology, *, all_receive: bool = True) -> None:
    """Raise ValueError unless every phase is stochastic and every worker hears another over the period."""
    name, sources, weights = topology.name, topology.sources, topology.weights
    means, sizes = torch.zeros_like(weights[..., 0]), torch.ones_like(sources[..., :1].sum(-1))
    if topology.groups is not None and topology.mean_weights is not None:
        means = topology.mean_weights
        sizes = torch.stack([row.bincount()[row] for row in topology.groups])
    entries = torch.cat([(weights[..., 0] + means / sizes)[..., None], weights[..., 1:]], dim=-1)
    if (entries < -_TOLERANCE).any():
        p, i, k = (entries < -_TOLERANCE).nonzero()[0].tolist()
        other = None if k == 0 else int(sources[p, i, k - 1])
        whose = f"worker {i}'s self-weight" if k == 0 else f"the weight that worker {i} gives to worker {other}"
        raise ValueError(
            f"{name}: {whose} in phase {p} is {entries[p, i, k].item():.15g}; weights must not be negative, or mixing "
            "could drive the workers apart."
        )
    columns = weights[..., 0] + means
    for slot in range(topology.slots):
        columns = columns.scatter_add(1, sources[..., slot], weights[..., 1 + slot])
    rows = weights.sum(-1) + means
    way_out = "columns must sum to 1 so that the mean is kept"
    if not topology.needs_push_sum and not _wrong(rows).any():
        way_out += (
            "; rows alone are not enough: for push-sum, divide each column by its sum and pass needs_push_sum=True"
        )
    _check_ones(name, columns, "column", way_out)
    if not topology.needs_push_sum:
        way_out = "rows must sum to 1 so that consensus is kept; a push-sum graph declares needs_push_sum=True"
        _check_ones(name, rows, "row", way_out)
    me = torch.arange(topology.num_workers)[:, None]
    hears = ((sources != me) & (weights[..., 1:] != 0)).any(-1) | ((sizes > 1) & (means != 0))
    lonely = (~hears.any(0)).nonzero()[:, 0].tolist()
    if all_receive and lonely and topology.num_workers > 1:
        raise ValueError(
            f"{name}: workers {lonely[:8]} receive no message in the whole period, so they would train alone; "
            "give each a neighbor in some phase."
        )


def _wrong(sums: Tensor) -> Tensor:
    return ~((sums - 1).abs() <= _TOLERANCE)


def _check_ones(name: str, sums: Tensor, kind: str, way_out: str) -> None:
    wrong = _wrong(sums)
    if wrong.any():
        p, i = wrong.nonzero()[0].tolist()
        way_out = "it was rounded: compute the weights in float64" if (sums - 1).abs().max() < 1e-5 else way_out
        raise ValueError(f"{name}: {kind} {i} of phase {p} sums to {sums[p, i].item():.15g}, not 1 (1e-12); {way_out}.")


@checks_arguments(RULES)
def mixed(topology: Topology, t: int, x: Tensor) -> Tensor:
    """Return `W_t x`, `[N, D]`: the workers' rows of `x` after mixing in step `t`."""
    has_rows = isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) == topology.num_workers
    require(has_rows, "mixed", f"x has a row for each of the {topology.num_workers} workers, [N, D].", x=x)
    this = topology.round(t)
    y = this.weights[:, :1] * x
    for slot, heard in enumerate(this.heard.T):
        y = y + this.weights[:, 1 + slot, None] * x[heard]
    if this.groups is not None and this.mean_weights is not None:
        sums = torch.zeros_like(x).index_add_(0, this.groups, x)
        y = y + (this.mean_weights / this.groups.bincount()[this.groups])[:, None] * sums[this.groups]
    return y


@checks_arguments(RULES)
def mixing_matrix(topology: Topology, t: int) -> Tensor:
    """Return the mixing matrix of step `t`: `[N, N]` float64, `W[i, j]` the weight that worker i gives to worker j."""
    return mixed(topology, t, torch.eye(topology.num_workers, dtype=torch.float64))


def is_symmetric(topology: Topology, t: int) -> bool:
    """Return True if W_t = W_tᵀ, by fixed random vectors X: Xᵀ W X is symmetric."""
    x = draws.uniform(0, 0, 0, (topology.num_workers, 4)).double() - 0.5
    products = x.T @ mixed(topology, t, x)
    return torch.allclose(products, products.T, rtol=0, atol=1e-12)
