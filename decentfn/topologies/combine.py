"""Schedules made of schedules: `every`, `later`, `until`, `nth_round`, `alternate`, `shuffled`, `pga`, `lazy` and `relabel`.

They may combine messages, group averages and random rounds in one graph, in which idle operators do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from decentfn.core import checks_arguments, draws, require, whole_number
from decentfn.topologies.construct import idle
from decentfn.topologies.drawn import from_rounds, like
from decentfn.topologies.graphs import complete
from decentfn.topologies.rounds import RULES, Round, Topology, noted, require_topology

Function = TypeVar("Function", bound=Callable[..., Topology])


def combination(function: Function) -> Function:
    """Decorate a function of topologies whose result can be made again from other topologies, as after a loss."""
    checked = checks_arguments(RULES)(function)

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Topology:
        made = checked(*args, **kwargs)
        is_new = all(made is not part for part in (*args, *kwargs.values()))
        return noted(made, made_from=partial(make, *args, **kwargs)) if is_new else made

    return make  # pyright: ignore[reportReturnType]


def recombined(topology: Topology, change: Callable[[Topology], Topology]) -> Topology | None:
    """Return the same combination of changed parts; None if the topology is no combination."""
    if (call := topology.made_from) is None:
        return None

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Topology) else value

    return call.func(*map(changed, call.args), **{name: changed(value) for name, value in call.keywords.items()})


@combination
def every(H: int, topology: Topology) -> Topology:
    """Mix in steps t = 0, H, 2H, ...; send nothing in all others, `W_t = I`.

    Step k H is round k of `topology`, so all its rounds are used. `every(H, complete(N))` is local SGD with periodic
    averaging. Cost per step and worker: that of `topology`, divided by H.

    Args:
        H: steps from one mix to the next, at least 1.
        topology: the schedule of mixes; the new period is H times its period.

    >>> every(4, complete(8)).period
    4
    """
    parts, name = (topology, idle(topology.num_workers)), f"every({H}, {topology.name})"
    turn, longer = (lambda t: (min(t % H, 1), t // H)), (lambda steps: H * steps[0])
    return _switch(name, parts, turn, longer, longer)


@combination
def later(steps: int, topology: Topology) -> Topology:
    """Delay a schedule by `steps` steps: step t is round t - steps, and the first `steps` steps are idle.

    Args:
        steps: at least 0.
        topology: the schedule; its period stays the same after the idle steps.

    >>> later(3, every(4, complete(8))).round(3).is_active
    True
    """
    if not steps:
        return topology
    parts = (topology, idle(topology.num_workers))
    name = f"later({steps}, {topology.name})"
    turn, start_of = (lambda t: (int(t < steps), t - steps)), (lambda starts: steps + starts[0])
    return _switch(name, parts, turn, lambda periods: periods[0], start_of)


@combination
def nth_round(k: int, rounds: int, topology: Topology) -> Topology:
    """Select round k of a step that mixes `rounds` times: step t is round `rounds * t + k` of `topology`.

    Args:
        k: from 0 to rounds - 1.
        rounds: at least 1.
        topology: the schedule.

    >>> from decentfn.topologies import one_peer_exp
    >>> nth_round(1, 2, one_peer_exp(16)).period
    2
    """
    is_one = 0 <= k < rounds < 2**31
    require(is_one, "nth_round", "k is an integer from 0 to rounds - 1.", k=k, rounds=rounds)
    if rounds == 1:
        return topology

    def period_of(periods: list[int]) -> int:
        return periods[0] // math.gcd(periods[0], rounds)

    def start_of(starts: list[int]) -> int:
        return max(0, -((k - starts[0]) // rounds))

    name = f"nth_round({k}, {rounds}, {topology.name})"
    return _switch(name, (topology,), lambda t: (0, rounds * t + k), period_of, start_of)


@combination
def paused(topology: Topology, other: Topology) -> Topology:
    """Pause a schedule in the steps in which `other` is active.

    Args:
        topology: the schedule.
        other: a schedule of the same number of workers; the new period is the common multiple of both.

    >>> from decentfn.topologies import ring
    >>> [paused(ring(4), every(3, complete(4))).round(t).is_active for t in range(3)]
    [False, True, True]
    """
    parts = (topology, idle(topology.num_workers), other)
    name = f"paused({topology.name}, {other.name})"
    return _switch(name, parts, lambda t: (int(other.round(t).is_active), t), lambda periods: math.lcm(*periods))


@combination
def alternate(*topologies: Topology) -> Topology:
    """Cycle through topologies: with m of them, step m k + j is round k of the j-th.

    Args:
        topologies: at least one, of the same number of workers; repetitions are allowed. The new period is m times the
            common multiple of their periods.

    >>> from decentfn.topologies import ring
    >>> alternate(ring(4), complete(4)).period
    4
    """
    require(len(topologies) > 0, "alternate()", "give at least one topology.")
    for part in topologies:
        require_topology("alternate", part)
    count = len(topologies)
    name = f"alternate({', '.join(part.name for part in topologies)})"
    turn, start_of = (lambda t: (t % count, t // count)), (lambda starts: count * max(starts))
    return _switch(name, topologies, turn, lambda periods: count * math.lcm(*periods), start_of)


@combination
def until(steps: int, first: Topology, then: Topology) -> Topology:
    """Use one schedule in the first `steps` steps, and another one from there on.

    Step t is round t of either. Most messages late: `until(9_000, every(100, ring(N)), ring(N))`. One global merge at
    the end of T steps: `until(T - 1, topology, complete(N))`.

    Args:
        steps: at least 0.
        first: the schedule of steps 0 to steps - 1.
        then: the schedule of all later steps, of the same number of workers; the new period is its own.

    Source: Zhu et al., 2025 (arXiv:2507.06542): a fixed budget of messages is best spent late, and one merge of all
    workers at the end recovers most of what frequent averages give.

    >>> from decentfn.topologies import ring
    >>> [until(2, every(2, ring(4)), ring(4)).round(t).is_active for t in range(4)]
    [True, False, True, True]
    """
    if not steps:
        return then
    parts, name = (first, then), f"until({steps}, {first.name}, {then.name})"
    turn, start_of = (lambda t: (int(t >= steps), t)), (lambda starts: max(steps, starts[1]))
    return _switch(name, parts, turn, lambda periods: periods[1], start_of)


@checks_arguments(RULES)
def shuffled(topology: Topology, *, seed: int = 0) -> Topology:
    """Draw one of the rounds of a schedule's period at random in every step, the same on every worker.

    `shuffled(ring(N))` is a ring whose even and odd pairs meet at random, as `df.a2cid2` supposes.

    Args:
        topology: a schedule with a period.
        seed: any integer; a round is a function of (seed, t).

    >>> from decentfn.topologies import ring
    >>> shuffled(ring(4)).period is None
    True
    """
    cycle = topology.cycle or range(0)
    require(bool(cycle), "shuffled", "the rounds of a random schedule are drawn already.", topology=topology)

    def turn(t: int) -> tuple[int, int]:
        return 0, cycle[int(draws.integers(seed, t, 0, (1,), len(cycle)))]

    return _switch(f"shuffled({topology.name}, seed={seed})", (topology,), turn, lambda periods: None)


@checks_arguments(RULES)
def pga(H: int, topology: Topology) -> Topology:
    """Gossip with periodic global averaging: average over all workers in steps 0, H, 2H, ..., else use `topology`.

    Step t is round t of `topology`, unless H divides t. Cost per step and worker: that of `topology`, and every H
    steps an all-reduce of 2(N-1)/N payloads instead.

    Args:
        H: steps from one global average to the next, at least 1.
        topology: the schedule in between; the new period is the common multiple of H and its period.

    Source: Chen et al., 2021 (Gossip-PGA).

    >>> from decentfn.topologies import ring
    >>> pga(3, ring(4)).period
    6
    """
    parts, name = (complete(topology.num_workers), topology), f"pga({H}, {topology.name})"
    return _switch(name, parts, lambda t: (min(t % H, 1), t), lambda periods: math.lcm(H, *periods))


@checks_arguments(RULES)
def lazy(topology: Topology, keep: float = 0.5) -> Topology:
    """Keep a share of the own parameters in every round: `keep I + (1 - keep) W`.

    With `keep=0.5` the eigenvalues of a symmetric W become at least 0, as some methods need. Cost: that of `topology`.

    Args:
        topology: the schedule.
        keep: in [0, 1).

    >>> from decentfn.topologies import mixing_matrix, ring
    >>> mixing_matrix(lazy(ring(4)), 0)[0].tolist()
    [0.75, 0.25, 0.0, 0.0]
    """

    def round_of(t: Tensor) -> Round:
        this = topology.round(t)
        weights = (1 - keep) * this.weights
        weights[:, 0] += keep
        means = None if this.mean_weights is None else (1 - keep) * this.mean_weights
        return Round(this.sources, this.destinations, weights, this.groups, means, this.is_active)

    return like(topology, round_of, f"lazy({topology.name}, {keep:g})")


@checks_arguments(RULES)
def relabel(topology: Topology, workers: Sequence[int]) -> Topology:
    """Replace worker i of a schedule by `workers[i]`, for example to place neighbors on one machine.

    Args:
        topology: the schedule.
        workers: a permutation of 0..N-1.

    >>> from decentfn.topologies import ring
    >>> relabel(ring(4), [0, 2, 1, 3]).sources[0, :, 0].tolist()
    [2, 3, 0, 1]
    """
    n = topology.num_workers
    is_list = isinstance(workers, Sequence) and not isinstance(workers, str) and len(workers) == n
    is_permutation = is_list and set(workers) == set(range(n))
    require(is_permutation, "relabel", f"expected each of 0..{n - 1} once.", topology=topology, workers=workers)
    places = torch.tensor([whole_number("relabel", "workers", i) for i in workers])
    name_of = torch.cat([places, torch.tensor([-1])])  # index -1, no peer, stays -1
    return _rearranged(topology, places.argsort(), lambda peers: name_of[peers])


def blocks(topology: Topology, count: int) -> Topology:
    """Apply the schedule within each of `count` blocks of consecutive workers: `I ⊗ W`."""
    worker = torch.arange(count * topology.num_workers)
    place = worker % topology.num_workers
    return _rearranged(topology, place, lambda peers: peers + (worker - place)[:, None])


def across(topology: Topology, size: int) -> Topology:
    """Apply the schedule across blocks of `size` consecutive workers, between equal places in them: `W ⊗ I`."""
    worker = torch.arange(size * topology.num_workers)
    return _rearranged(topology, worker // size, lambda peers: peers * size + (worker % size)[:, None])


def _rearranged(topology: Topology, rows: Tensor, renamed: Callable[[Tensor], Tensor]) -> Topology:
    """Return the schedule whose worker w has the row `rows[w]`, with renamed peers and groups, `[N', K] -> [N', K]`."""

    def peers(table: Tensor) -> Tensor:
        return torch.where(table < 0, -1, renamed(table))

    def grouped(groups: Tensor) -> Tensor:
        return peers(groups[rows][:, None])[:, 0]

    def round_of(t: Tensor) -> Round:
        this = topology.round(t)
        sources, destinations = peers(this.sources[rows]), peers(this.destinations[rows])
        groups = None if this.groups is None else grouped(this.groups)
        means = None if this.mean_weights is None else this.mean_weights[rows]
        return Round(sources, destinations, this.weights[rows], groups, means, this.is_active)

    groups = None if topology.groups is None else torch.stack([grouped(row) for row in topology.groups])
    return like(topology, round_of, groups=groups)


def _switch(
    name: str,
    parts: Sequence[Topology],
    turn: Callable[[int], tuple[int, int]],
    period_of: Callable[[list[int]], int | None],
    start_of: Callable[[list[int]], int] = max,
) -> Topology:
    """Return the schedule whose step t is round s of part k, `k, s = turn(t)`; period and start from the parts'."""
    n, sizes = parts[0].num_workers, [part.num_workers for part in parts]
    require(set(sizes) == {n}, name, f"its parts have {sizes} workers, not the same number.")
    slots = max(part.slots for part in parts)
    tables = [part.groups for part in parts if part.groups is not None]
    groupings = torch.cat([*tables, torch.arange(n)[None]]).unique(dim=0) if tables else None

    def turn_of(t: int) -> tuple[Topology, int]:
        part, step = turn(t)
        return parts[part], step

    def round_of(t: Tensor) -> Round:
        part, step = turn_of(int(t))
        return padded(part.round(step), slots, has_groups=groupings is not None)

    periods = [part.period for part in parts]
    period = None if None in periods else period_of([period for period in periods if period is not None])
    made = from_rounds(
        name,
        n,
        round_of,
        period=period,
        groups=groupings,
        needs_push_sum=any(part.needs_push_sum for part in parts),
        start=0 if period is None else start_of([part.start for part in parts]),
    )
    return noted(made, turn=turn_of)


def padded(this: Round, slots: int, *, has_groups: bool) -> Round:
    """Add idle slots to a round, and groups of one worker each if it has none."""
    more = (0, slots - this.sources.shape[1])
    sources, destinations = pad(this.sources, more, value=-1), pad(this.destinations, more, value=-1)
    groups, mean_weights = this.groups, this.mean_weights
    if has_groups and (groups is None or mean_weights is None):
        groups, mean_weights = torch.arange(len(sources)), torch.zeros(len(sources), dtype=torch.float64)
    return Round(sources, destinations, pad(this.weights, more), groups, mean_weights, this.is_active)
