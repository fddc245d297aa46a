"""Schedules given by a function of the step: random ones, and combinations. Sample rounds are checked like tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentfn.core.arguments import MOST_WORKERS, checks_numbers, require, require_at_most
from decentfn.topologies.construct import MOST_TABLE_ENTRIES, alone
from decentfn.topologies.rounds import Round, Topology, check, silenced

_LONGEST_TABLE = 2**11
_STEPS_TRIED = (*range(16), 10**6)
"""Sample rounds of a schedule without tables: checked like a table's rounds, and drawn twice."""
_ROUNDS_SEARCHED = 1000
"""Rounds in which each worker of a random schedule should receive a message."""
_MANY = 50
"""Messages that the mean worker receives where it is no chance that one receives none."""


@checks_numbers
def from_draw(name: str, num_workers: int, draw: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> Topology:
    """Make a random schedule: a function of t alone, the same on every worker, evaluated when a step runs.

    The first 16 rounds and a late one are checked like tables and drawn twice to check that they repeat.

    Args:
        name: name in errors and fingerprints.
        num_workers: N.
        draw: `t` (0-d int64, on the CPU, with a value) -> `(sources [N, K], destinations [N, K], weights [N, K+1])`, int64,
            int64 and float64: `sources[i, k]` sends to i in slot k, `destinations` is the inverse, and the self-weight is
            first. A worker that receives from nobody is its own source, or has -1, and one that sends to nobody its own
            destination; it may do the other. Randomness comes from `df.draws`, keyed by (seed, t), the same on
            every machine; a `torch.Generator().manual_seed(int(t))` made in `draw` is equal between equal versions of
            PyTorch.

    Raises:
        ValueError: a wrong shape or dtype; a round that is not a sum of weighted permutations, is not doubly
            stochastic, or differs when drawn again; workers that receive nothing in 1,000 rounds, if the others receive
            50 messages each on average, or if nobody receives any.

    >>> from decentfn import draws
    >>> def ring_in_random_order(t):
    ...     order = draws.permutation(0, t, 6)
    ...     sources, destinations = torch.empty_like(order), torch.empty_like(order)
    ...     sources[order], destinations[order] = order.roll(1), order.roll(-1)
    ...     return sources[:, None], destinations[:, None], torch.full((6, 2), 0.5, dtype=torch.float64)
    >>> from_draw("ring in random order", 6, ring_in_random_order)
    Topology('ring in random order', num_workers=6, random, degree=1)
    """
    require_at_most(name, MOST_WORKERS, num_workers=num_workers)
    if num_workers == 1:
        return alone(name)
    round_of = _with_shapes(name, num_workers, lambda t: Round(*draw(t)))
    drawn = [round_of(torch.tensor(t)) for t in _STEPS_TRIED]
    rule = f"sources and destinations are workers, 0 to {num_workers - 1}, or -1 for nobody."
    are_workers = all(bool((table >= -1).all() and (table < num_workers).all()) for this in drawn for table in this[:2])
    require(are_workers, name, rule)
    made = from_rounds(name, num_workers, lambda t: _silent_round(round_of(t)), period=None)
    heard = torch.zeros(num_workers)  # in how many rounds
    for t in range(_ROUNDS_SEARCHED):
        heard += (made.round(t).sources >= 0).any(1)
        if heard.all():
            return made
    lonely, is_by_chance = (heard == 0).nonzero()[:, 0].tolist(), 0 < float(heard.mean()) < _MANY
    rule = f"workers {lonely[:8]} receive no message in 1,000 rounds, so they would train alone; give each a source in some."
    require(is_by_chance, name, rule)
    return made


def _silent_round(this: Round) -> Round:
    others = this.weights[:, 1:].masked_fill(silenced(this.sources) < 0, 0.0)
    own = this.weights.sum(1, keepdim=True) - others.sum(1, keepdim=True)
    return Round(silenced(this.sources), silenced(this.destinations), torch.cat([own, others], dim=1))


def _with_shapes(name: str, num_workers: int, round_of: Callable[[Tensor], Round]) -> Callable[[Tensor], Round]:
    first = round_of(torch.tensor(0)).sources
    rule = "sources are [N, K], a row for each worker and a column for each message that it receives"
    way_out = "; of one message, unsqueeze(1)" if first.dim() == 1 else ""
    require(first.dim() == 2, name, f"the sources of step 0 are {list(first.shape)}; {rule}{way_out}.")
    slots = first.shape[1]

    def checked(t: Tensor) -> Round:
        this = round_of(t)
        for part, width in (("sources", slots), ("destinations", slots), ("weights", slots + 1)):
            table, dtype = getattr(this, part), torch.float64 if part == "weights" else torch.int64
            if list(table.shape) != [num_workers, width] or table.dtype != dtype:
                raise ValueError(
                    f"{name}: the {part} of step {int(t)} are {list(table.shape)} {table.dtype}, not "
                    f"{[num_workers, width]} {dtype}; sources and destinations are [N, K], weights [N, K+1], the same "
                    "K in every step (an idle worker is its own source)."
                )
        return this

    return checked


def _are_inverse(this: Round) -> bool:
    """Return True if each message that is sent is heard, and each that is heard is sent."""
    me, sent = torch.arange(len(this.sources))[:, None].expand_as(this.sources), this.destinations >= 0
    are_heard = this.sources.gather(0, this.destinations.clamp(min=0)) == me
    return bool(are_heard[sent].all()) and int(sent.sum()) == int((this.sources >= 0).sum())


@checks_numbers
def from_rounds(
    name: str,
    num_workers: int,
    round_of: Callable[[Tensor], Round],
    *,
    period: int | None,
    groups: Tensor | None = None,
    needs_push_sum: bool = False,
    start: int = 0,
) -> Topology:
    """Make a schedule from a function of the step; a short period is stored as tables.

    Args:
        name: name in errors and fingerprints.
        num_workers: N.
        round_of: `t` (0-d int64) -> its `Round`; -1 marks an idle slot.
        period: period of the schedule; None for a random one.
        groups: `[G, N]` int64, all groupings of its rounds, if any. Groups are never random, since their process groups
            are created in advance.
        needs_push_sum: as in `from_permutations`.
        start: first step of the first period; if the steps before it do not repeat, every round is computed.

    Raises:
        ValueError: a wrong shape or dtype; a round whose weights do not sum to 1, whose destinations are not the
            inverse of its sources, or that differs when drawn again.
    """
    require_at_most(name, MOST_WORKERS, num_workers=num_workers)
    rule = "a schedule repeats after one step or more, or has None; it starts to repeat at step 0 or later."
    require((period is None or period >= 1) and start >= 0, name, rule, period=period, start=start)
    round_of = _with_shapes(name, num_workers, round_of)
    entries = round_of(torch.tensor(0)).weights.numel()
    in_tables = not start and period is not None and period <= min(_LONGEST_TABLE, MOST_TABLE_ENTRIES // entries)
    steps = range(period) if in_tables and period is not None else _STEPS_TRIED
    drawn = [round_of(torch.tensor(t)) for t in steps]
    are_inverse = all(map(_are_inverse, drawn))
    rule = (
        "a round's destinations are not the inverse of its sources: in each slot, a worker sends to one that names it."
    )
    require(are_inverse, name, rule)
    sources = torch.stack([this.heard for this in drawn])
    in_tables = in_tables and torch.equal(sources.sort(1).values, torch.arange(num_workers)[:, None].expand_as(sources))
    weights = torch.stack([this.weights for this in drawn])
    rows, mean_weights = None, None
    if groups is not None:
        rows = torch.stack([this.groups for this in drawn if this.groups is not None])
        mean_weights = torch.stack([this.mean_weights for this in drawn if this.mean_weights is not None])
    are_active = torch.tensor([this.is_active for this in drawn])
    active = None if bool(are_active.all()) else are_active
    tables = Topology(name, num_workers, sources, weights, rows, mean_weights, needs_push_sum, active=active)
    check(tables, all_receive=False)
    for t, before in reversed(list(zip(steps[: len(_STEPS_TRIED)], drawn, strict=False))):
        for part, was, now in zip(Round._fields, before, round_of(torch.tensor(t)), strict=True):
            if was is not None and (now is None or not torch.equal(torch.as_tensor(was), torch.as_tensor(now))):
                raise ValueError(
                    f"{name}: the {part} of step {t} differ when drawn twice; every worker draws them itself, "
                    "so a round is a function of t (and a seed) alone: take its numbers from df.draws, for "
                    f"example df.draws.permutation(seed, t, {num_workers})."
                )
    if in_tables:
        return tables
    first = sources[:1], weights[:1], groups, None if mean_weights is None else mean_weights[:1]
    return Topology(name, num_workers, *first, needs_push_sum, round_of, repeats=period, start=start)


def like(topology: Topology, round_of: Callable[[Tensor], Round], name: str | None = None, **changes: Any) -> Topology:
    """Make the schedule of these rounds that repeats, groups and needs push-sum as another one does, but for the changes."""
    same = {name: getattr(topology, name) for name in ("period", "groups", "needs_push_sum", "start")} | changes
    n = len(round_of(torch.tensor(0)).sources)
    return from_rounds(name or topology.name, n, round_of, **same)
