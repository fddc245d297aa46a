"""The schedule for fewer or more workers: of the same family where it has that size, else one that keeps the promises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from decentfn.core import MOST_WORKERS, brief, checks_arguments, require, require_at_most, whole_number
from decentfn.topologies import drawn
from decentfn.topologies.certificates import Certificate, certificate, consensus_steps
from decentfn.topologies.combine import lazy, padded, recombined
from decentfn.topologies.construct import from_groups, from_matrices, from_shifts
from decentfn.topologies.registry import topology as by_name
from decentfn.topologies.rounds import RULES, Edge, Round, Topology, is_symmetric, mixing_matrix

ANY_SIZE = "base"
"""A family of any size that is exact in finite time, doubly stochastic and symmetric."""


Case = Literal["same family", "another family", "own weights"]


class Resized(NamedTuple):
    """A schedule for another number of workers, and where it comes from."""

    topology: Topology
    case: Case
    """The family, with its options, has that size; or a family of any size replaces it; or the schedule stays, and each worker
    keeps the weights that it gave to lost ones. Of a combination: the last of these that holds for a part."""

    @property
    def certificate(self) -> Certificate:
        """Measured properties of the schedule."""
        return certificate(self.topology)


@checks_arguments(RULES)
def without(topology: Topology, workers: Collection[int]) -> Resized:
    """Return the schedule of the workers that are left, renumbered in their order.

    If the family has no such size, a schedule with finite-time consensus becomes `base`. Any other keeps its links, and each survivor
    adds the weights of lost workers to its own weight; it becomes `base` too if that leaves it unconnected, or a random or directed
    schedule not doubly stochastic as declared. A combination (`every`, `later`, ...) is made again of its parts' schedules.

    Args:
        topology: of all workers.
        workers: the lost ones; at least one worker is left.

    >>> import decentfn as df
    >>> left = df.topology("one-peer-exp", 4).without([2])
    >>> left.topology, left.case, left.certificate.steps_to_consensus
    (Topology('base', num_workers=3, period=3, degree=1), 'another family', 3)
    """
    n, lost = topology.num_workers, {whole_number("without", "workers", worker) for worker in workers}
    rule = f"distinct numbers of lost workers, of 0..{n - 1}; one is left."
    is_subset = lost <= set(range(n)) and len(lost) == len(workers) < n
    require(is_subset, "without", rule, workers=brief(sorted(workers)))
    if not lost:
        return Resized(topology, "same family")

    def own() -> Topology | None:
        settles = topology.draw is not None or (topology.active is None and consensus_steps(topology) is not None)
        return None if settles else _own_weights(topology, [worker for worker in range(n) if worker not in lost])

    return _of_size(topology, n - len(lost), lambda part: without(part, workers), own)


def in_place(topology: Topology, workers: Collection[int]) -> Topology:
    """Return the schedule of the workers that are left, for a step compiled for all of them: it is data, and no shape changes.

    It has as many slots as before, idle ones too, stays static, symmetric and doubly stochastic where the schedule was, and is one that
    its algorithm accepts (`Topology.suits`). That is `without(workers)` if it fits, else the first that does of: the same links with
    lost weights added to a worker's own; a static ring; `base`; `base`, lazily; a line; the mean of all. A combination (`every`,
    `later`, ...) is made again of its parts' schedules. Raises ValueError if none fits.
    """
    kept = [i for i in range(topology.num_workers) if i not in workers]
    has_tables = topology.draw is None and topology.groups is None
    return _first_that_fits(
        topology,
        len(kept),
        lambda part: in_place(part, workers),
        lambda: without(topology, workers).topology,
        lambda: _own_weights(topology, kept) if has_tables else None,
    )


def enlarged(topology: Topology, num_workers: int) -> Topology:
    """Return the schedule of more workers in this one's form, as `in_place`; raise ValueError if none fits."""
    wanted = resized(topology, num_workers).topology
    made = _first_that_fits(topology, num_workers, lambda part: enlarged(part, num_workers), lambda: wanted)
    is_mean = consensus_steps(topology) == consensus_steps(wanted) == 1
    rule = f"the mean of all of {topology!r} has no form for {num_workers} workers in the compiled step."
    require(not is_mean or consensus_steps(made) == 1, "enlarged", rule)
    return made


def _first_that_fits(
    topology: Topology, n: int, of_part: Callable[[Topology], Topology], *candidates: Callable[[], Topology | None]
) -> Topology:
    """Return the combination of the parts' schedules, or the first candidate of the topology's form, widened to it."""
    made = recombined(topology, of_part) if topology.family is None else None
    if made is not None and _suits(made, topology):
        return _widened(made, topology)
    for candidate in (
        *candidates,
        lambda: from_shifts("static-ring", [{1: 0.25, n - 1: 0.25}], n) if n > 2 else None,
        lambda: by_name(ANY_SIZE, n),
        lambda: lazy(by_name(ANY_SIZE, n), 0.75),
        lambda: _line(n, topology.period or 2),
        lambda: _average(n),
    ):
        if (made := candidate()) is not None and _fits(made, topology) and _suits(made, topology):
            return _widened(made, topology)
    raise ValueError(
        f"in_place: no schedule of {n} workers fits a step that was made for {topology!r} and suits its algorithm; start the run "
        f"again, on {n} workers."
    )


def _line(n: int, period: int) -> Topology:
    """Neighbors on a line, static or as even and odd pairs by turns."""
    if period == 1 or n < 3:
        return by_name("chain", n)
    starts = [range(-(phase % 2), n, 2) for phase in range(period)]
    return from_groups("line", [[Edge(range(max(i, 0), min(i + 2, n))) for i in its] for its in starts], n)


def _average(n: int) -> Topology:
    """The mean of all as a group average, also of two workers, for whom `complete` is messages."""
    zeros, ones = torch.zeros(1, n, dtype=torch.int64), torch.ones(1, n, dtype=torch.float64)
    return Topology("complete", n, zeros[..., None][..., :0], 0 * ones[..., None], zeros, ones)


def _suits(made: Topology, topology: Topology) -> bool:
    """Return True if the algorithm of `topology` accepts this schedule."""
    with suppress(ValueError):
        if topology.suits is not None:
            topology.suits(made)
        return True
    return False


def _fits(made: Topology, topology: Topology) -> bool:
    needs_more = made.slots > topology.slots or made.has_groups > topology.has_groups
    if needs_more or made.needs_push_sum > topology.needs_push_sum or (topology.period == 1 != made.period):
        return False
    was, is_now = (all(is_symmetric(x, t) for t in x.steps()) for x in (topology, made))
    return is_now or not was


def _widened(made: Topology, like: Topology) -> Topology:
    """The same schedule with idle slots, and groups of one, up to the form of another."""
    if made.slots == like.slots and made.has_groups == like.has_groups:
        return made

    def round_of(t: Tensor) -> Round:
        return padded(made.round(t), like.slots, has_groups=like.has_groups)

    groups = made.groups if made.has_groups or not like.has_groups else torch.arange(made.num_workers)[None]
    return drawn.like(made, round_of, groups=groups)


@checks_arguments(RULES)
def resized(topology: Topology, num_workers: int) -> Resized:
    """Return the schedule for another number of workers: of the same family, or `base` where that has no such size.

    A combination (`every`, `later`, ...) is made again of its parts' schedules.

    >>> import decentfn as df
    >>> df.topology("ring", 4).resized(6).topology, df.topology("ring", 4).resized(5).topology
    (Topology('ring', num_workers=6, period=2, degree=1), Topology('base', num_workers=5, period=5, degree=1))
    """
    n = num_workers
    require_at_most("resized", MOST_WORKERS, num_workers=n)
    if n == topology.num_workers:
        return Resized(topology, "same family")
    return _of_size(topology, n, lambda part: resized(part, n), lambda: None)


def _of_size(
    topology: Topology, n: int, change: Callable[[Topology], Resized], own: Callable[[], Topology | None]
) -> Resized:
    """The schedule of n workers: of the family, of changed parts, with the worker's own weights, or of another family."""
    cases: list[Case] = ["same family"]

    def of_part(part: Topology) -> Topology:
        made, case = change(part)
        cases.append(case)
        return made

    if topology.family is not None:
        with suppress(ValueError):  # it has no such size
            return Resized(topology.family(n), "same family")
    with suppress(ValueError):  # the parts' schedules do not combine, as `lossy` and group averages
        if (made := recombined(topology, of_part)) is not None:
            return Resized(made, max(cases, key=get_args(Case).index))
    if (made := own()) is not None:
        return Resized(made, "own weights")
    return Resized(by_name(ANY_SIZE, n), "another family")


def _own_weights(topology: Topology, kept: list[int]) -> Topology | None:
    """The same rounds among these workers, or None where they are not connected, or not as stochastic as declared."""
    rounds = torch.stack([mixing_matrix(topology, t)[kept][:, kept] for t in range(len(topology.sources))])
    missing = 1 - rounds.sum(1 if topology.needs_push_sum else 2)
    name = f"{topology.name} of {topology.num_workers}, workers {kept}"
    try:
        made = from_matrices(name, rounds + torch.diag_embed(missing), needs_push_sum=topology.needs_push_sum)
    except ValueError:
        return None
    made = replace(made, active=topology.active)
    return made if certificate(made).is_connected else None


Topology.without, Topology.resized = without, resized
