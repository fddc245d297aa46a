"""Topologies: whom each worker receives from in step t, with which weights, and the checks of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from decentfn.core.formatting import brief
from decentfn.core.numbers import checks_numbers, require

if TYPE_CHECKING:
    from decentfn.topologies.resized import Resized

_TOLERANCE = 1e-12
_ROUNDS_KEPT = 256


class Round(NamedTuple):
    """One step's mixing. Worker i's next value is
    `weights[i, 0] x_i + Σ_k weights[i, 1+k] x_sources[i, k] + mean_weights[i] · (mean of x over i's group)`.
    """

    sources: Tensor  # [N, K] int64, whom i receives from in slot k; -1: nobody
    destinations: Tensor  # [N, K] int64, the inverse: whom i sends to; -1: nobody
    weights: Tensor  # [N, K+1] float64, own weight first
    groups: Tensor | None = None  # [N] int64
    mean_weights: Tensor | None = None  # [N] float64
    is_active: bool = True
    """False where the schedule rests: everyone keeps what it has, and an outer update waits."""

    @property
    def heard(self) -> Tensor:
        """`[N, K]` int64: the sources, with a worker itself where it hears nobody."""
        return torch.where(self.sources < 0, torch.arange(len(self.sources))[:, None], self.sources)


class Edge(NamedTuple):
    """A group of workers that average: own weight `weight`, the rest shared equally among the others.

    The default weight is 1/len(ranks). (Decent-DP's `Edge`.)
    """

    ranks: Sequence[int]
    weight: float | None = None


class Peers(NamedTuple):
    """A round's peers as Python integers, for the backend."""

    sources: list[list[int]]  # [N][K]
    destinations: list[list[int]]  # [N][K]
    members: list[list[int]] | None  # [N]: of each worker's group, ascending


@dataclass(frozen=True, eq=False)
class Topology:
    """A schedule of mixing matrices: whom each worker receives from in step t, and with which weights.

    Made by the `from_...` functions of `decentfn.topologies.construct`, which check it; or by name with
    `decentfn.topology`. `decentfn.certificate` computes its guarantees.
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
    """Schedules without tables: the round of step t (0-d int64), a function of t alone. Random ones are such, and ones
    whose tables would be too long. `sources` and `weights` then show round 0, and `groups` all groupings that occur."""
    repeats: int | None = None
    """With `draw`: the period, if it is not random."""
    active: Tensor | None = None
    """`[P]` bool: False in phases in which the schedule rests; None: it never does."""
    rows_sum_to_one = True
    """Whether rows sum to one unless only columns do; False where a fault of another library is repeated."""
    family: Callable[[int], Topology] | None = field(init=False, default=None)
    """What makes it for another number of workers, with its options; None where it was not made by name."""
    degree: int = field(init=False)
    """Messages that a worker sends in a step, at most; averages in groups are not messages. At most `slots`."""
    slots: int = field(init=False)
    """K, the messages that a step has room for: a few more than `degree` where partners must pair up."""
    has_groups: bool = field(init=False)
    handle: Tensor = field(init=False)
    """0-d int64, the number by which operators find this topology. A tensor, so that it is an input of compiled code."""
    _rounds: Callable[[int], Round] = field(init=False)
    _peers: Callable[[int], Peers] = field(init=False)
    _rows: Callable[[int, torch.device], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sent = (inverse(self.sources) != torch.arange(self.num_workers)[:, None]).sum(-1)
        slots, number = self.sources.shape[2], next(_numbers)
        _known[number] = self
        computed = {
            "degree": slots if self.draw else int(sent.max()),
            "slots": slots,
            "has_groups": self.groups is not None,
            "handle": torch.tensor(number),
            "_rounds": lru_cache(_ROUNDS_KEPT)(self._make_round),
            "_peers": lru_cache(_ROUNDS_KEPT)(self._make_peers),
            "_rows": lru_cache(_ROUNDS_KEPT)(self._make_rows),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    @property
    def period(self) -> int | None:
        """Steps after which the schedule repeats; None for a random one, which never does."""
        return self.repeats if self.draw else self.sources.shape[0]

    def round(self, t: int | Tensor) -> Round:
        """Return the round of step `t`."""
        return self._rounds(int(t) if self.draw else int(t) % len(self.sources))

    def peers(self, t: int | Tensor) -> Peers:
        """Return the peers of step `t`, as Python integers."""
        return self._peers(int(t) if self.draw else int(t) % len(self.sources))

    def groups_of(self, t: int | Tensor) -> Tensor:
        """Return the group of every worker in step `t`, `[N]` int64; of a schedule without groups, the worker's own number."""
        groups = self.round(t).groups
        return torch.arange(self.num_workers) if groups is None else groups

    def rows(self, t: int | Tensor, device: torch.device) -> Tensor:
        """Return every worker's part of round `t` as numbers, on the device.

        `[N, 7 + 3K]` float64: 1 in an active round, the worker, its group, the group's size, 1 where each slot's two ends hear each
        other with the same weight, own weight, a weight for each slot, the weight of the group's mean, whom it hears in each slot,
        what its own messages weigh where they are heard.
        """
        return self._rows(int(t) if self.draw else int(t) % len(self.sources), device)

    def _make_round(self, key: int) -> Round:
        if self.draw is not None:
            return self.draw(torch.tensor(key))
        sources, destinations = silenced(self.sources[key]), silenced(inverse(self.sources[key]))
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
        if device.type == "cpu":
            return rows
        # Nobody writes to this pinned copy, and PyTorch's allocator keeps it until the device has read it.
        return rows.pin_memory().to(device, non_blocking=True)

    def without(self, workers: Collection[int]) -> Resized:
        """Return the schedule of the workers that are left, as `decentfn.topologies.resized.without` does."""
        from decentfn.topologies.resized import without

        return without(self, workers)

    def resized(self, num_workers: int) -> Resized:
        """Return the schedule for another number of workers, as `decentfn.topologies.resized.resized` does."""
        from decentfn.topologies.resized import resized

        return resized(self, num_workers)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy gets a handle of its own
        arguments = tuple(getattr(self, field.name) for field in fields(self) if field.init)
        return type(self), arguments, {"family": self.family}

    def __repr__(self) -> str:
        kind = "random" if self.period is None else f"period={self.period}"
        return f"Topology({self.name!r}, num_workers={self.num_workers}, {kind}, degree={self.degree})"


_numbers = itertools.count()
_known: WeakValueDictionary[int, Topology] = WeakValueDictionary()


def by_handle(handle: Tensor) -> Topology:
    """Return the topology of this handle."""
    return _known[int(handle)]


def inverse(sources: Tensor) -> Tensor:
    """Sources -> destinations, `[..., N, K]`."""
    me = torch.arange(sources.shape[-2])[:, None].expand_as(sources)
    return torch.empty_like(sources).scatter_(-2, sources, me)


def silenced(peers: Tensor) -> Tensor:
    """`[..., N, K]`, with -1 where a worker is its own peer."""
    return peers.masked_fill(peers == torch.arange(peers.shape[-2])[:, None], -1)


def require_topology(call: str, topology: object) -> None:
    """Raise ValueError unless this is a topology; `call` is how the user wrote what takes it."""
    if not isinstance(topology, Topology):
        raise ValueError(f"{call}({brief(topology)}): expected a topology, such as df.topology('ring', 4).")


def check(topology: Topology, *, nobody_left_out: bool = True) -> None:
    """Raise ValueError unless every phase is stochastic and every worker hears another one over the period."""
    name, sources, weights = topology.name, topology.sources, topology.weights
    means, sizes = torch.zeros_like(weights[..., 0]), torch.ones_like(sources[..., :1].sum(-1))
    if topology.groups is not None and topology.mean_weights is not None:
        means = topology.mean_weights
        sizes = torch.stack([row.bincount()[row] for row in topology.groups])
    entries = torch.cat([(weights[..., 0] + means / sizes)[..., None], weights[..., 1:]], dim=-1)
    if (entries < -_TOLERANCE).any():
        p, i, k = (entries < -_TOLERANCE).nonzero()[0].tolist()
        other = None if k == 0 else int(sources[p, i, k - 1])
        whose = f"worker {i}'s own weight" if k == 0 else f"the weight that worker {i} gives to worker {other}"
        raise ValueError(
            f"{name}: {whose} in phase {p} is {entries[p, i, k].item():.15g}; weights are not negative, or mixing could "
            "drive the workers apart."
        )
    columns = weights[..., 0] + means
    for slot in range(topology.slots):
        columns = columns.scatter_add(1, sources[..., slot], weights[..., 1 + slot])
    _check_ones(name, columns, "column", "columns must sum to 1 so that the mean is kept")
    if not topology.is_column_stochastic:
        way_out = "rows must sum to 1 so that consensus is kept; a push-sum graph declares is_column_stochastic=True"
        _check_ones(name, weights.sum(-1) + means, "row", way_out)
    me = torch.arange(topology.num_workers)[:, None]
    hears = ((sources != me) & (weights[..., 1:] != 0)).any(-1) | ((sizes > 1) & (means != 0))
    lonely = (~hears.any(0)).nonzero()[:, 0].tolist()
    if nobody_left_out and lonely and topology.num_workers > 1:
        raise ValueError(
            f"{name}: workers {lonely[:8]} receive from nobody in the whole period, so they would train alone; "
            "give each a neighbor in some phase."
        )


def _check_ones(name: str, sums: Tensor, kind: str, way_out: str) -> None:
    wrong = ~((sums - 1).abs() <= _TOLERANCE)
    if wrong.any():
        p, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: {kind} {i} of phase {p} sums to {sums[p, i].item():.15g}, not 1 (1e-12); {way_out}.")


@checks_numbers
def mixed(topology: Topology, t: int, x: Tensor) -> Tensor:
    """`W_t x`, `[N, D]`: what mixing in step `t` makes of the workers' rows of `x`."""
    require_topology("mixed", topology)
    require(0 <= t < 2**63, "mixed", "t numbers the steps, from 0.", t=t)
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


@checks_numbers
def mixing_matrix(topology: Topology, t: int) -> Tensor:
    """The mixing matrix of step `t`: `[N, N]` float64, `W[i, j]` the weight that worker i gives to worker j."""
    require_topology("mixing_matrix", topology)
    require(0 <= t < 2**63, "mixing_matrix", "t numbers the steps, from 0.", t=t)
    return mixed(topology, t, torch.eye(topology.num_workers, dtype=torch.float64))
