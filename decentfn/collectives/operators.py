"""The operators of a step: look up a round, post messages or a group's mean, wait for them.

Time and peers stay outside the graph. Every operator takes the topology's handle and `t`, and finds its round when the step
runs; so one compiled graph serves every phase of a schedule and every rank. Each has two interpreters:

* under a process group `post` starts messages and returns at once, and `wait` completes them;
* under `torch.func.vmap` over the worker axis nothing travels, and `wait` is an index or a segment mean. Where other
  processes hold workers too, both happen.

The order in compiled code comes from data alone: the number that `post` returns is an argument of whatever must come after
it (`after`, the gradient), and what must come before a `wait` is an argument of it. Call all of them outside `torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.collectives.lookup import Row, operator, require_size, require_worker_axis
from decentfn.collectives.membership import world
from decentfn.collectives.messages import Flight as Posted
from decentfn.collectives.messages import Part, begin, land, post, reduce, take_off
from decentfn.topologies.rounds import by_handle
from decentfn.torch_private import functorch


def make_groups(groups: Tensor) -> None:
    """Make the process groups that means over these groups will need; collective, the same table everywhere.

    Args:
        groups: `[P, N]` int64, the group of each worker in each phase.
    """
    here = world()
    if here.size > 1:
        local = groups.shape[1] // here.size
        wanted = {tuple(ranks) for row in groups.tolist() for ranks in _ranks_by_group(row, local).values()}
        here.make_subgroups(sorted(wanted))


def _ranks_by_group(row: list[int], local: int) -> dict[int, list[int]]:
    """Return the ascending ranks that hold each group's members."""
    ranks: dict[int, list[int]] = {}
    for worker, group in enumerate(row):
        if worker // local not in ranks.setdefault(group, []):
            ranks[group].append(worker // local)
    return ranks


def _workers_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return functorch.with_workers_first(x, dim, size).contiguous()


# -- order by data --------------------------------------------------------------------------------------------------


_after = operator(
    "after(Tensor[] xs, Tensor[] flights) -> Tensor[]",
    lambda xs, flights: [x.clone() for x in xs],
    lambda xs, flights: [torch.empty_like(x) for x in xs],
    lambda info, in_dims, xs, flights: (
        (list(xs) if world().size == 1 else _after(list(xs), list(flights))),
        list(in_dims[0]),
    ),
)


def after(xs: Sequence[Tensor], flights: Sequence[Tensor]) -> list[Tensor]:
    """Return `xs` such that compiled code computes nothing from them before it has posted `flights`."""
    return _after(list(xs), list(flights)) if flights and torch.compiler.is_dynamo_compiling() else list(xs)


# -- messages -------------------------------------------------------------------------------------------------------


class Flight(NamedTuple):
    """One posted tensor, and what `wait` needs to know of it."""

    number: Tensor  # 0-d int64 on the CPU
    x: Tensor  # what was sent: kept, and not written over, until `wait`
    row: Row
    good: Tensor | None
    per_slot: bool = False
    is_mean: bool = False


def exchange(x: Tensor, row: Row, *, per_slot: bool = False, good: Tensor | None = None) -> Flight:
    """Post `x` to this round's listeners; `wait` returns what arrives in each slot.

    Args:
        x: `[D]`, or `[K, D]` with `per_slot`; contiguous.
        row: this worker's part of the round.
        per_slot: whether each slot has a message of its own.
        good: 0-d bool; where it is False zeros are sent in the place of `x`.
    """
    return Flight(_post(x, row.topology.handle, row.t, per_slot, good), x, row, good, per_slot)


def group_mean(x: Tensor, row: Row, *, good: Tensor | None = None) -> Flight:
    """Post the mean of `x` `[D]` over this worker's group; `wait` returns it.

    An all-reduce: 2(r-1)/r payloads for a group of r workers. Each worker divides by r before the sum.
    """
    return Flight(_post_mean(x, row.topology.handle, row.t, good), x, row, good, is_mean=True)


def wait(flight: Flight, after: Sequence[Tensor] = ()) -> Tensor:
    """Complete a flight.

    Args:
        flight: from `exchange` or `group_mean`.
        after: what compiled code computes before it waits.

    Returns:
        `[K, D]` of messages, zeros where nothing was sent; or the mean `[D]`, `x` itself in a group of one.
    """
    number, x, row, good, per_slot, is_mean = flight
    if is_mean:
        return _wait_mean(number, x, row.group, row.group_size, good, list(after))
    return _wait(number, x, row.sources, per_slot, good, list(after))


def _sent(x: Tensor, good: Tensor | None) -> Tensor:
    """Return `x` `[(L,) ...]`, or zeros for those of whom `good` `[(L)]` is False; a CPU copies nothing where there are none."""
    if good is None or (good.device.type == "cpu" and not functorch.has_no_value(good) and bool(good.all())):
        return x
    return torch.where(good.view(*good.shape, *[1] * (x.dim() - good.dim())), x, torch.zeros_like(x))


def _post_workers(x: Tensor, handle: Tensor, t: Tensor, per_slot: bool, good: Tensor | None) -> Tensor:
    """Post `x` `[L, (K,) D]` of the L workers here; return the flight's number."""
    topology = by_handle(handle)
    here, local = require_size(x.shape[0], topology.num_workers, "exchange")
    x = _sent(x, good)
    first, slots = here.rank * local, range(topology.slots)
    call, peers = begin(here, "exchange", t, local), topology.peers(t)
    hears, tells = peers.sources[first : first + local], peers.destinations[first : first + local]
    call.hears, call.tells = (hears[0], tells[0]) if local == 1 else (hears, tells)
    call.nbytes = x[0].nbytes // max(1, len(slots) if per_slot else 1)
    inbox = x.new_empty((local, len(slots), *x.shape[2 if per_slot else 1 :]))
    receives: list[Part] = []
    sends: list[Part] = []
    if inbox.numel():
        # Both lists are ordered by (slot, receiving worker): the order in which one process meets another's messages.
        for slot in slots:
            for i in range(local):
                source, target = hears[i][slot], inbox[i, slot]
                if source < 0:
                    target.zero_()
                elif source // local == here.rank:
                    target.copy_(x[source - first, slot] if per_slot else x[source - first])
                else:
                    receives.append(Part(target, x[i, slot] if per_slot else x[i], source // local, slot))
            for listener, i in sorted((tells[i][slot], i) for i in range(local)):
                if listener >= 0 and listener // local != here.rank:
                    sends.append(Part(x[i, slot] if per_slot else x[i], None, listener // local, slot))
    return post(here, call, inbox, receives, sends)


def _landed(number: Tensor, *_: Any) -> Tensor:
    """Return what arrived for the workers here, `[L, ...]`."""
    return land(number)


def _landed_alone(number: Tensor, *_: Any) -> Tensor:
    """Return what arrived for the one worker here."""
    return land(number)[0]


def _number(*_: Any) -> Tensor:
    """Return the form of a flight's number."""
    return torch.empty((), dtype=torch.int64, device="cpu")


def _posting_stacked(call: str, stacked: Any) -> Any:
    """Return the rule by which a post over the workers here is one post of `stacked`: `(x, handle, t, ..., good)`."""

    def rule(info: Any, in_dims: Any, x: Tensor, handle: Tensor, t: Tensor, *rest: Any) -> tuple[Tensor, None]:
        require_worker_axis(call, in_dims[0], in_dims[1:3])
        if world().size == 1:
            return handle, None  # any number: nothing is in flight
        *between, good = rest
        x = _workers_first(x, in_dims[0], info.batch_size)
        good = None if good is None else _workers_first(good, in_dims[-1], info.batch_size)
        return stacked(x, handle, t, *between, good), None

    return rule


def _wait_vmap(
    info: Any,
    in_dims: Any,
    number: Tensor,
    x: Tensor,
    sources: Tensor,
    per_slot: bool,
    good: Tensor | None,
    after: Sequence[Tensor],
) -> tuple[Tensor, int]:
    n = info.batch_size
    x, sources = _workers_first(x, in_dims[1], n), _workers_first(sources, in_dims[2], n)
    if world().size > 1:
        return _wait_stacked(number, x, sources, per_slot, list(after)), 0
    x, slots = _sent(x, None if good is None else _workers_first(good, in_dims[4], n)), sources.shape[1]
    rows = sources.clamp(min=0).reshape(-1)
    if per_slot:
        flat = x.flatten(0, 1).index_select(0, rows * slots + torch.arange(slots, device=x.device).repeat(n))
    else:
        flat = x.index_select(0, rows)
    inbox = flat.view(n, slots, *x.shape[2 if per_slot else 1 :])
    return inbox.masked_fill((sources < 0).view(n, slots, *[1] * (inbox.dim() - 2)), 0), 0


_post_stacked = operator(
    "post_stacked(Tensor x, Tensor topology, Tensor t, bool per_slot, Tensor? good) -> Tensor",
    _post_workers,
    _number,
    None,
)
_post = operator(
    "post(Tensor x, Tensor topology, Tensor t, bool per_slot, Tensor? good) -> Tensor",
    lambda x, handle, t, per_slot, good: _post_workers(
        x[None], handle, t, per_slot, None if good is None else good.view(1)
    ),
    _number,
    _posting_stacked("exchange", _post_stacked),
)
_wait = operator(
    "wait(Tensor number, Tensor x, Tensor sources, bool per_slot, Tensor? good, Tensor[] after) -> Tensor",
    _landed_alone,
    lambda number, x, sources, per_slot, good, after: x.new_empty((*sources.shape, *x.shape[1 if per_slot else 0 :])),
    _wait_vmap,
)
_wait_stacked = operator(
    "wait_stacked(Tensor number, Tensor x, Tensor sources, bool per_slot, Tensor[] after) -> Tensor",
    _landed,
    lambda number, x, sources, per_slot, after: x.new_empty((*sources.shape, *x.shape[2 if per_slot else 1 :])),
    None,
)


# -- means within groups --------------------------------------------------------------------------------------------


def _post_mean_workers(x: Tensor, handle: Tensor, t: Tensor, good: Tensor | None) -> Tensor:
    """Post the means over the groups of the L workers here, `x` `[L, D]`; return the flight's number."""
    topology = by_handle(handle)
    here, local = require_size(x.shape[0], topology.num_workers, "group_mean")
    x = _sent(x, good)
    call, row = begin(here, "group_mean", t, local), topology.peers(t).groups
    assert row is not None
    ranks = _ranks_by_group(row, local)
    call.nbytes = x[0].nbytes
    if local == 1:
        group = row[here.rank]
        call.hears = ranks[group]
        mean = x / row.count(group)
        return take_off(reduce(here, call, mean, x, ranks[group]))
    mean, groups = torch.empty_like(x), row[here.rank * local : (here.rank + 1) * local]
    for group in sorted(set(groups)):
        members = [i for i, own in enumerate(groups) if own == group]
        own = torch.stack([x[i] for i in members])
        share = (own / row.count(group)).sum(0)
        call.hears = ranks[group]
        has_arrived = reduce(here, call, share, None, ranks[group]).land()
        for i, row_of_i in zip(members, own, strict=True):
            mean[i] = share if has_arrived else row_of_i
    return take_off(Posted(here, call, mean, []))


def _wait_mean_vmap(
    info: Any,
    in_dims: Any,
    number: Tensor,
    x: Tensor,
    group: Tensor,
    group_size: Tensor,
    good: Tensor | None,
    after: Sequence[Tensor],
) -> tuple[Tensor, int]:
    n = info.batch_size
    x, group, size = (_workers_first(v, d, n) for v, d in zip((x, group, group_size), in_dims[1:4], strict=True))
    if world().size > 1:
        return _wait_mean_stacked(number, x, list(after)), 0
    x = _sent(x, None if good is None else _workers_first(good, in_dims[4], n))
    share = x / size.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    return torch.zeros_like(x).index_add(0, group, share).index_select(0, group), 0


_post_mean_stacked = operator(
    "post_mean_stacked(Tensor x, Tensor topology, Tensor t, Tensor? good) -> Tensor",
    _post_mean_workers,
    _number,
    None,
)
_post_mean = operator(
    "post_mean(Tensor x, Tensor topology, Tensor t, Tensor? good) -> Tensor",
    lambda x, handle, t, good: _post_mean_workers(x[None], handle, t, None if good is None else good.view(1)),
    _number,
    _posting_stacked("group_mean", _post_mean_stacked),
)
_wait_mean = operator(
    "wait_mean(Tensor number, Tensor x, Tensor group, Tensor group_size, Tensor? good, Tensor[] after) -> Tensor",
    _landed_alone,
    lambda number, x, group, group_size, good, after: torch.empty_like(x),
    _wait_mean_vmap,
)
_wait_mean_stacked = operator(
    "wait_mean_stacked(Tensor number, Tensor x, Tensor[] after) -> Tensor",
    _landed,
    lambda number, x, after: torch.empty_like(x),
    None,
)
