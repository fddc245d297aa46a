"""Schedules made of schedules: `every`, `later`, `nth_round`, `alternate`, `pga`, and `relabel`.

All work for messages, averages in groups and random rounds, mixed: one graph, in which idle operators do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentfn.numbers import checks_numbers, whole
from decentfn.topologies.complete_graph import complete
from decentfn.topologies.construct import idle
from decentfn.topologies.drawn import from_rounds
from decentfn.topologies.rounds import Round, Topology, require_topology
from decentfn.words import brief


@checks_numbers
def every(H: int, topology: Topology) -> Topology:
    """Mix in the steps t = 0, H, 2H, ...; rest in the others: nothing is sent, and `W_t = I`.

    Step k H is round k of `topology`, which so goes through all its rounds. `every(H, complete(N))` is local SGD with
    periodic averaging. Cost per step and worker: that of `topology`, divided by H.

    Args:
        H: steps from one mix to the next, at least 1.
        topology: what mixes.

    Returns:
        Topology of period H x the topology's.

    Raises:
        ValueError: H < 1.

    >>> every(4, complete(8)).period
    4
    """
    _check_parts("every", H, topology)
    parts = (topology, idle(topology.num_workers))
    return _switch(
        f"every({H}, {topology.name})", parts, lambda t: (min(t % H, 1), t // H), lambda periods: H * periods[0]
    )


@checks_numbers
def later(steps: int, topology: Topology) -> Topology:
    """The same schedule, begun `steps` steps later: step t is round t - steps, and before that it rests.

    Args:
        steps: at least 0.
        topology: the schedule.

    Returns:
        Topology of the same period, from its beginning on.

    Raises:
        ValueError: a negative number of steps.

    >>> later(3, every(4, complete(8))).round(3).is_active
    True
    """
    require_topology("later(steps, topology)", topology)
    if not 0 <= steps < 2**31:
        raise ValueError(f"later(steps={brief(steps)}, ...): the number of steps is an integer >= 0.")
    if not steps:
        return topology
    parts = (topology, idle(topology.num_workers))
    name = f"later({steps}, {topology.name})"
    return _switch(name, parts, lambda t: (int(t < steps), t - steps), lambda periods: periods[0], has_start=True)


@checks_numbers
def nth_round(k: int, rounds: int, topology: Topology) -> Topology:
    """Round k of a step that mixes `rounds` times: step t is round `rounds * t + k` of `topology`.

    Args:
        k: from 0 to rounds - 1.
        rounds: at least 1.
        topology: the schedule.

    Raises:
        ValueError: k or `rounds` out of range.

    >>> from decentfn.topologies import one_peer_exp
    >>> nth_round(1, 2, one_peer_exp(16)).period
    2
    """
    require_topology("nth_round(k, rounds, topology)", topology)
    if not 0 <= k < rounds < 2**31:
        raise ValueError(f"nth_round(k={brief(k)}, rounds={brief(rounds)}, ...): k is an integer from 0 to rounds - 1.")
    if rounds == 1:
        return topology
    name = f"nth_round({k}, {rounds}, {topology.name})"
    return _switch(
        name, (topology,), lambda t: (0, rounds * t + k), lambda periods: periods[0] // math.gcd(periods[0], rounds)
    )


def paused(topology: Topology, other: Topology) -> Topology:
    """The same schedule, except that it rests in the steps in which `other` is active.

    Args:
        topology: the schedule.
        other: a schedule of as many workers.

    Returns:
        Topology whose period is the common multiple of both.

    >>> from decentfn.topologies import ring
    >>> [paused(ring(4), every(3, complete(4))).round(t).is_active for t in range(3)]
    [False, True, True]
    """
    for part in (topology, other):
        require_topology("paused(topology, other)", part)
    parts = (topology, idle(topology.num_workers), other)
    name = f"paused({topology.name}, {other.name})"
    return _switch(
        name, parts, lambda t: (int(other.round(t).is_active), t), lambda periods: math.lcm(*periods), has_start=True
    )


def alternate(*topologies: Topology) -> Topology:
    """One round of each in turn: step m k + j, of m topologies, is round k of the j-th.

    Args:
        topologies: at least one, of the same number of workers; a topology may be given more than once.

    Returns:
        Topology of period m x the common multiple of the topologies' periods.

    Raises:
        ValueError: none, or different numbers of workers.

    >>> from decentfn.topologies import ring
    >>> alternate(ring(4), complete(4)).period
    4
    """
    if not topologies:
        raise ValueError("alternate(): give at least one topology.")
    for part in topologies:
        require_topology("alternate", part)
    count = len(topologies)
    name = f"alternate({', '.join(part.name for part in topologies)})"
    return _switch(name, topologies, lambda t: (t % count, t // count), lambda periods: count * math.lcm(*periods))


@checks_numbers
def pga(H: int, topology: Topology) -> Topology:
    """Gossip with periodic global averaging: the mean over all workers in steps 0, H, 2H, ..., else `topology`.

    Step t is round t of `topology`, unless H divides t. Cost per step and worker: that of `topology`, and every H
    steps an all-reduce of 2(N-1)/N payloads in its stead.

    Args:
        H: steps from one global average to the next, at least 1.
        topology: what mixes in between.

    Returns:
        Topology whose period is the common multiple of H and the topology's.

    Raises:
        ValueError: H < 1.

    Source: Chen et al., 2021 (Gossip-PGA).

    >>> from decentfn.topologies import ring
    >>> pga(3, ring(4)).period
    6
    """
    _check_parts("pga", H, topology)
    parts = (complete(topology.num_workers), topology)
    return _switch(
        f"pga({H}, {topology.name})", parts, lambda t: (min(t % H, 1), t), lambda periods: math.lcm(H, *periods)
    )


def relabel(topology: Topology, workers: Sequence[int]) -> Topology:
    """The same schedule with `workers[i]` in the place of worker i, to put neighbours where they are close.

    Args:
        topology: the schedule.
        workers: a permutation of 0..N-1.

    Raises:
        ValueError: not a permutation.

    >>> from decentfn.topologies import ring
    >>> relabel(ring(4), [0, 2, 1, 3]).sources[0, :, 0].tolist()
    [2, 3, 0, 1]
    """
    require_topology("relabel", topology)
    n = topology.num_workers
    if (
        not isinstance(workers, Sequence)
        or isinstance(workers, str)
        or set(workers) != set(range(n))
        or len(workers) != n
    ):
        raise ValueError(f"relabel({topology!r}, workers={brief(workers)}): expected each of 0..{n - 1} once.")
    workers = [whole("relabel", "workers", i) for i in workers]
    takes_place_of = torch.tensor(list(workers)).argsort()
    place = torch.tensor([*workers, -1])  # index -1, nobody, stays nobody

    def rows(table: Tensor) -> Tensor:
        return table.index_select(0, takes_place_of)

    def moved(peers: Tensor) -> Tensor:
        return rows(place[peers])

    return _map_rounds(topology.name, topology, n, moved, rows, rows)


def blocks(topology: Topology, count: int) -> Topology:
    """`I ⊗ W`: the schedule within each of `count` blocks of consecutive workers."""
    size = topology.num_workers
    first = size * torch.arange(count)

    def shifted(numbers: Tensor) -> Tensor:
        offsets = first.view(-1, *[1] * numbers.dim())
        return torch.where(numbers < 0, -1, numbers + offsets).flatten(0, 1)

    def repeated(table: Tensor) -> Tensor:
        return table.repeat(count, *[1] * (table.dim() - 1))

    return _map_rounds(topology.name, topology, size * count, shifted, repeated, shifted)


def across(topology: Topology, size: int) -> Topology:
    """`W ⊗ I`: the schedule among blocks of `size` consecutive workers, between those at the same place in each."""
    place = torch.arange(size)

    def spread(numbers: Tensor) -> Tensor:
        places = place.view(-1, *[1] * (numbers.dim() - 1))
        numbers = numbers.unsqueeze(1)
        return torch.where(numbers < 0, -1, numbers * size + places).flatten(0, 1)

    def repeated(table: Tensor) -> Tensor:
        return table.repeat_interleave(size, dim=0)

    return _map_rounds(topology.name, topology, size * topology.num_workers, spread, repeated, spread)


# -- how -------------------------------------------------------------------------------------------------------------


def _check_parts(call: str, steps: int, topology: Topology) -> None:
    require_topology(f"{call}(H, topology)", topology)
    if not 1 <= steps < 2**31:
        raise ValueError(f"{call}(H={brief(steps)}, ...): H, the steps from one to the next, is an integer >= 1.")


def _map_rounds(
    name: str,
    topology: Topology,
    num_workers: int,
    peers: Callable[[Tensor], Tensor],
    rows: Callable[[Tensor], Tensor],
    groups: Callable[[Tensor], Tensor],
) -> Topology:
    """The schedule of `num_workers` whose every round is this one's with its columns mapped."""

    def round_of(t: Tensor) -> Round:
        this = topology.round(t)
        mean_weights = None if this.mean_weights is None else rows(this.mean_weights)
        grouping = None if this.groups is None else groups(this.groups)
        return Round(
            peers(this.sources), peers(this.destinations), rows(this.weights), grouping, mean_weights, this.is_active
        )

    table = None if topology.groups is None else torch.stack([groups(row) for row in topology.groups])
    return from_rounds(
        name,
        num_workers,
        round_of,
        period=topology.period,
        groups=table,
        is_column_stochastic=topology.is_column_stochastic,
    )


def _switch(
    name: str,
    parts: Sequence[Topology],
    turn: Callable[[int], tuple[int, int]],
    period_of: Callable[[list[int]], int],
    *,
    has_start: bool = False,
) -> Topology:
    """Return the schedule whose step t is round s of part k, where `k, s = turn(t)`.

    Args:
        name: of the schedule.
        parts: the schedules that take turns.
        turn: `t -> (k, s)`.
        period_of: from the parts' periods to the schedule's.
        has_start: the first steps differ from what repeats, so that the schedule is no table of one period.
    """
    n = parts[0].num_workers
    if any(part.num_workers != n for part in parts):
        raise ValueError(f"{name}: its parts have {[part.num_workers for part in parts]} workers, not the same number.")
    slots = max(part.slots for part in parts)
    tables = [part.groups for part in parts if part.groups is not None]
    groupings = torch.cat([*tables, torch.arange(n)[None]]).unique(dim=0) if tables else None

    def round_of(t: Tensor) -> Round:
        part, step = turn(int(t))
        return _padded(parts[part].round(step), slots, has_groups=groupings is not None)

    periods = [part.period for part in parts]
    return from_rounds(
        name,
        n,
        round_of,
        period=None if None in periods else period_of([period for period in periods if period is not None]),
        groups=groupings,
        is_column_stochastic=any(part.is_column_stochastic for part in parts),
        in_tables=not has_start,
    )


def _padded(this: Round, slots: int, *, has_groups: bool) -> Round:
    """Return the round with empty slots up to `slots`, and every worker in a group where the schedule has groups."""
    n, more = this.weights.shape[0], slots - this.sources.shape[1]
    silence = torch.full((n, more), -1)
    weights = torch.cat([this.weights, torch.zeros(n, more, dtype=torch.float64)], dim=1)
    groups, mean_weights = this.groups, this.mean_weights
    if has_groups and (groups is None or mean_weights is None):
        groups, mean_weights = torch.arange(n), torch.zeros(n, dtype=torch.float64)
    sources, destinations = (torch.cat([x, silence], 1) for x in (this.sources, this.destinations))
    return Round(sources, destinations, weights, groups, mean_weights, this.is_active)
