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

from decentfn.collectives.membership import World, world
from decentfn.collectives.messages import Flight as Posted
from decentfn.collectives.messages import Part, begin, land, post, reduce, take_off
from decentfn.scalars import integer
from decentfn.topologies import Topology
from decentfn.topologies.rounds import by_handle
from decentfn.torch_private import functorch

_library = torch.library.Library("decentfn", "DEF")
_ops = torch.ops.decentfn


def operator(schema: str, kernel: Any, fake: Any, vmap: Any) -> Any:
    """Define an operator by its kernel on every device, its shapes, and its rule under `vmap`."""
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"decentfn::{name}", fake, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(f"decentfn::{name}", vmap, lib=_library)
    return getattr(_ops, name).default


# -- who and how many -----------------------------------------------------------------------------------------------


def require_size(local: int, workers: int, what: str) -> tuple[World, int]:
    """The world and `local`, once the topology's workers are known to be those that exist, so many in each process.

    Raises:
        ValueError: they are more, or fewer; `what` says who asks.
    """
    here = world()
    if local * here.size != workers:
        if (each := here.processes_per_worker) > 1:
            raise ValueError(
                f"{what}: the topology has num_workers={workers}, but {here.size * each} processes run, {each} for each worker; make it "
                f"with df.topology(name, world.num_workers), here {here.size}, or a multiple of that with df.simulate."
            )
        raise ValueError(
            f"{what}: the topology has num_workers={workers}, but {here.size} process(es) hold {local} worker(s) each. "
            f"Start {workers} processes with torchrun, or df.simulate(step, {max(1, workers // here.size)}) "
            "so that workers x processes is the topology's size."
        )
    return here, local


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


def _require_worker_axis(what: str, x: int | None, others: Sequence[int | None]) -> None:
    if x is None or any(dim is not None for dim in others):
        raise ValueError(
            f"{what} under vmap: the payload must carry the worker axis, and the topology and t must not; "
            "use in_dims=(0, 0, None) for (state, batch, t), or df.simulate."
        )


# -- the round of a step --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One worker's part of round `t`, on the device of its state."""

    topology: Topology
    t: Tensor  # 0-d int64 on the CPU
    weights: Tensor  # [K+1] float64, own weight first
    mean_weight: Tensor | None  # 0-d float64, the weight of the mean over the worker's group; None without groups
    is_active: Tensor  # 0-d bool, False where the schedule rests
    worker: Tensor  # 0-d int64, the worker's number
    sources: Tensor  # [K] int64, whom it hears in each slot; -1: nobody
    group: Tensor  # 0-d int64, the number of its group
    group_size: Tensor  # 0-d int64
    given: Tensor  # [K] float64, what its messages weigh where they are heard; W[j, i], while `weights` are W[i, j]


_FACTS = 4


def look_up(token: Tensor, topology: Topology, t: Tensor) -> Row:
    """Look up this worker's part of round `t`.

    Args:
        token: any tensor of this worker's state; it tells the device and, under `vmap`, the worker axis.
        topology: the schedule.
        t: 0-d int64 on the CPU.
    """
    k, row = topology.slots, _look_up(token, topology.handle, t, topology.slots)
    facts, weights, sources, given = row.split([_FACTS, k + 2, k, k])
    facts = facts.to(torch.int64)
    return Row(
        topology,
        t,
        weights=weights[: k + 1],
        mean_weight=weights[k + 1] if topology.has_groups else None,
        is_active=facts[0] > 0,
        worker=facts[1],
        sources=sources.to(torch.int64),
        group=facts[2],
        group_size=facts[3],
        given=given,
    )


def _row_kernel(token: Tensor, handle: Tensor, t: Tensor, slots: int) -> Tensor:
    topology = by_handle(handle)
    here, _ = require_size(1, topology.num_workers, "step(state, batch, t)")
    return topology.rows(t, token.device)[here.rank].clone()


def _rows_kernel(token: Tensor, handle: Tensor, t: Tensor, slots: int, workers: int) -> Tensor:
    topology = by_handle(handle)
    here, _ = require_size(workers, topology.num_workers, "step(state, batch, t)")
    return topology.rows(t, token.device)[here.rank * workers : (here.rank + 1) * workers].clone()


def _row_shape(slots: int) -> int:
    return _FACTS + 2 + 3 * slots


def _row_vmap(info: Any, in_dims: Any, token: Tensor, handle: Tensor, t: Tensor, slots: int) -> tuple[Tensor, int]:
    _require_worker_axis("a look-up", in_dims[0], in_dims[1:3])
    return _rows(token, handle, t, slots, info.batch_size), 0


_look_up = operator(
    "look_up(Tensor token, Tensor topology, Tensor t, int slots) -> Tensor",
    _row_kernel,
    lambda token, handle, t, slots: token.new_empty((_row_shape(slots),), dtype=torch.float64),
    _row_vmap,
)
_rows = operator(
    "look_up_rows(Tensor token, Tensor topology, Tensor t, int slots, int workers) -> Tensor",
    _rows_kernel,
    lambda token, handle, t, slots, workers: token.new_empty((workers, _row_shape(slots)), dtype=torch.float64),
    None,
)


_members = operator(
    "members(Tensor group, Tensor topology, Tensor t, int num_workers) -> Tensor",
    lambda group, handle, t, num_workers: by_handle(handle).round(t).groups.to(group.device) == group,
    lambda group, handle, t, num_workers: group.new_empty((num_workers,), dtype=torch.bool),
    lambda info, in_dims, group, handle, t, num_workers: (
        torch.stack([_members(g, handle, t, num_workers) for g in group.movedim(in_dims[0], 0)]),
        0,
    ),
)


def members(row: Row) -> Tensor | None:
    """Return who is in this worker's group, `[N]` bool; None for a schedule without groups."""
    topology = row.topology
    return None if not topology.has_groups else _members(row.group, topology.handle, row.t, topology.num_workers)


on_device = operator(
    "step_number(Tensor token, Tensor t) -> Tensor",
    lambda token, t: integer(int(t), token.device),
    lambda token, t: token.new_empty((), dtype=torch.int64),
    lambda info, in_dims, token, t: (on_device(token.select(in_dims[0], 0), t), None),
)
"""`(token, t)` -> t as 0-d int64 on the token's device."""


class Constant:
    """A table of int64 numbers that operators find by a handle; a device gets it once.

    Args:
        table: on the CPU.
    """

    def __init__(self, table: Tensor) -> None:
        self.shape = tuple(table.shape)
        self.handle = torch.tensor(len(_constants))
        _constants.append({torch.device("cpu"): table})

    def on(self, token: Tensor) -> Tensor:
        """Return the table on the token's device."""
        return _constant(token, self.handle, self.shape)


_constants: list[dict[torch.device, Tensor]] = []


def _constant_kernel(token: Tensor, handle: Tensor, shape: Sequence[int]) -> Tensor:
    tables = _constants[int(handle)]
    if token.device not in tables:
        tables[token.device] = tables[torch.device("cpu")].to(token.device)
    return tables[token.device].clone()


_constant = operator(
    "constant(Tensor token, Tensor handle, int[] shape) -> Tensor",
    _constant_kernel,
    lambda token, handle, shape: token.new_empty(tuple(shape), dtype=torch.int64),
    lambda info, in_dims, token, handle, shape: (_constant(token.select(in_dims[0], 0), handle, shape), None),
)


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
    return _after(list(xs), list(flights)) if flights and torch.compiler.is_compiling() else list(xs)


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


def _post_vmap(
    info: Any, in_dims: Any, x: Tensor, handle: Tensor, t: Tensor, per_slot: bool, good: Tensor | None
) -> tuple[Tensor, None]:
    _require_worker_axis("exchange", in_dims[0], in_dims[1:3])
    if world().size == 1:
        return torch.zeros((), dtype=torch.int64), None
    x = _workers_first(x, in_dims[0], info.batch_size)
    good = None if good is None else _workers_first(good, in_dims[4], info.batch_size)
    return _post_stacked(x, handle, t, per_slot, good), None


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


_post = operator(
    "post(Tensor x, Tensor topology, Tensor t, bool per_slot, Tensor? good) -> Tensor",
    lambda x, handle, t, per_slot, good: _post_workers(
        x[None], handle, t, per_slot, None if good is None else good.view(1)
    ),
    lambda x, handle, t, per_slot, good: torch.empty((), dtype=torch.int64, device="cpu"),
    _post_vmap,
)
_wait = operator(
    "wait(Tensor number, Tensor x, Tensor sources, bool per_slot, Tensor? good, Tensor[] after) -> Tensor",
    _landed_alone,
    lambda number, x, sources, per_slot, good, after: x.new_empty((*sources.shape, *x.shape[1 if per_slot else 0 :])),
    _wait_vmap,
)
_post_stacked = operator(
    "post_stacked(Tensor x, Tensor topology, Tensor t, bool per_slot, Tensor? good) -> Tensor",
    _post_workers,
    lambda x, handle, t, per_slot, good: torch.empty((), dtype=torch.int64, device="cpu"),
    None,
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


def _post_mean_vmap(
    info: Any, in_dims: Any, x: Tensor, handle: Tensor, t: Tensor, good: Tensor | None
) -> tuple[Tensor, None]:
    _require_worker_axis("group_mean", in_dims[0], in_dims[1:3])
    if world().size == 1:
        return torch.zeros((), dtype=torch.int64), None
    x = _workers_first(x, in_dims[0], info.batch_size)
    good = None if good is None else _workers_first(good, in_dims[3], info.batch_size)
    return _post_mean_stacked(x, handle, t, good), None


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


_post_mean = operator(
    "post_mean(Tensor x, Tensor topology, Tensor t, Tensor? good) -> Tensor",
    lambda x, handle, t, good: _post_mean_workers(x[None], handle, t, None if good is None else good.view(1)),
    lambda x, handle, t, good: torch.empty((), dtype=torch.int64, device="cpu"),
    _post_mean_vmap,
)
_wait_mean = operator(
    "wait_mean(Tensor number, Tensor x, Tensor group, Tensor group_size, Tensor? good, Tensor[] after) -> Tensor",
    _landed_alone,
    lambda number, x, group, group_size, good, after: torch.empty_like(x),
    _wait_mean_vmap,
)
_post_mean_stacked = operator(
    "post_mean_stacked(Tensor x, Tensor topology, Tensor t, Tensor? good) -> Tensor",
    _post_mean_workers,
    lambda x, handle, t, good: torch.empty((), dtype=torch.int64, device="cpu"),
    None,
)
_wait_mean_stacked = operator(
    "wait_mean_stacked(Tensor number, Tensor x, Tensor[] after) -> Tensor",
    _landed,
    lambda number, x, after: torch.empty_like(x),
    None,
)
