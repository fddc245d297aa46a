"""Schedules made of schedules: `every`, `alternate`, `pga`, and `relabel`.

All work for messages, averages in groups and random rounds, mixed: one graph, in which idle operators do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentfn.numbers import checks_numbers, whole
from decentfn.topologies.complete_graph import complete
from decentfn.topologies.construct import MOST_TABLE_ENTRIES, from_rounds, idle
from decentfn.topologies.rounds import Round, Topology, require_topology
from decentfn.words import brief


@checks_numbers
def every(H: int, topology: Topology) -> Topology:
    """Mix in the steps t = 0, H, 2H, ...; nothing is sent in the others: `W_t = I` unless H divides t.

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
        f"every({H}, {topology.name})", parts, lambda t: ((t % H).clamp(max=1), t // H), lambda periods: H * periods[0]
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
        f"pga({H}, {topology.name})", parts, lambda t: ((t % H).clamp(max=1), t), lambda periods: math.lcm(H, *periods)
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
        return Round(peers(this.sources), peers(this.destinations), rows(this.weights), None, mean_weights)

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
    turn: Callable[[Tensor], tuple[Tensor, Tensor]],
    period_of: Callable[[list[int]], int],
) -> Topology:
    """The schedule whose step t is round s of part k, where `k, s = turn(t)`; its period, from the parts' periods."""
    n = parts[0].num_workers
    if any(part.num_workers != n for part in parts):
        raise ValueError(f"{name}: its parts have {[part.num_workers for part in parts]} workers, not the same number.")
    slots = max(part.slots for part in parts)
    has_groups = any(part.groups is not None for part in parts)

    def round_of(t: Tensor) -> Round:
        part, step = turn(t)
        rounds = [_padded(each.round(step), slots) for each in parts]
        chosen = [torch.stack(tables).index_select(0, part.view(1))[0] for tables in zip(*rounds, strict=True)]
        sources, destinations, weights, mean_weights = chosen
        return Round(sources, destinations, weights, None, mean_weights if has_groups else None)

    periods = [part.period for part in parts]
    return from_rounds(
        name,
        n,
        round_of,
        period=None if None in periods else period_of([period for period in periods if period is not None]),
        groups=_group_table(name, parts, turn, period_of) if has_groups else None,
        is_column_stochastic=any(part.is_column_stochastic for part in parts),
    )


def _padded(this: Round, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources, destinations, weights and mean weights of a round, with empty slots up to `slots`."""
    n, more = this.sources.shape[0], slots - this.sources.shape[1]
    silence = torch.full((n, more), -1)
    mean_weights = torch.zeros(n, dtype=torch.float64) if this.mean_weights is None else this.mean_weights
    weights = torch.cat([this.weights, torch.zeros(n, more, dtype=torch.float64)], dim=1)
    return torch.cat([this.sources, silence], 1), torch.cat([this.destinations, silence], 1), weights, mean_weights


def _group_table(
    name: str,
    parts: Sequence[Topology],
    turn: Callable[[Tensor], tuple[Tensor, Tensor]],
    period_of: Callable[[list[int]], int],
) -> Tensor:
    """`[G, N]`: the groups of each step; every worker alone where the step's part has none."""
    n = parts[0].num_workers
    tables = [torch.arange(n)[None] if part.groups is None else part.groups for part in parts]
    period = period_of([len(table) for table in tables])
    if period * n > MOST_TABLE_ENTRIES:
        raise ValueError(
            f"{name}: its groups repeat after {period} steps, so for {n} workers their table has {period * n} entries, "
            f"more than {MOST_TABLE_ENTRIES}; choose steps with a smaller common multiple."
        )
    part, step = turn(torch.arange(period))
    rows = torch.stack([table[step % len(table)] for table in tables])
    return rows[part, torch.arange(period)]
