"""The operators that talk to other workers: `exchange`, `group_mean`, `wait`, `worker_index`.

Each is written once for the workers that this process holds and has two sides:

* under a process group it posts messages and returns at once (`wait` completes them);
* under `torch.func.vmap` over the worker axis it is an index or a segment mean, and where other processes hold
  workers too, both.

Peers and groups are data (tables of integers), so one compiled graph serves every phase of a schedule and every
rank. All four must be called outside `torch.func.grad`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from decentfn.collectives.membership import World, world
from decentfn.collectives.messages import Part, begin, complete, post, reduce, track
from decentfn.scalars import integer, moved, once
from decentfn.torch_private import functorch, lowering

_library = torch.library.Library("decentfn", "DEF")
for _ending in ("", "_stacked"):
    _library.define(f"exchange{_ending}(Tensor x, Tensor peers, Tensor t, bool per_slot, Tensor? good) -> Tensor")
    _library.define(f"group_mean{_ending}(Tensor x, Tensor groups, Tensor t, Tensor? good) -> Tensor")
_library.define("wait(Tensor x) -> Tensor")
_library.define("complete(Tensor x) -> ()")
_library.define("worker_index(Tensor token, int[] local) -> Tensor")
_ops = torch.ops.decentfn


def exchange(x: Tensor, peers: Tensor, t: Tensor, *, per_slot: bool = False, good: Tensor | None = None) -> Tensor:
    """Post `x` to this step's listeners and return the messages in flight; call `wait` on them before use.

    Args:
        x: `[D]`, or `[K, D]` with `per_slot`; contiguous.
        peers: `[P, 2, N, K]` int64 on the CPU. `peers[p, 0, i, k]` is the worker that i receives from in slot k of phase p,
            `peers[p, 1, i, k]` the one that i sends to; -1 is nobody, and a worker that is its own peer copies locally.
        t: 0-d int64 on the CPU; the phase is `t mod P`.
        per_slot: whether each slot has a message of its own.
        good: 0-d bool; where it is False zeros are sent in the place of `x`.

    Returns:
        `[K, D]` of x's dtype: what arrived in each slot, zeros where nothing was sent.
    """
    return _ops.exchange(x, peers, t, per_slot, good)


def group_mean(x: Tensor, groups: Tensor, t: Tensor, *, good: Tensor | None = None) -> Tensor:
    """Start the mean of `x` over this step's group and return it in flight; call `wait` on it before use.

    An all-reduce: 2(r-1)/r payloads for a group of r workers. Each worker divides by r before the sum.

    Args:
        x: `[D]`.
        groups: `[P, N]` int64 on the CPU, the group (below N) that each worker belongs to in phase `t mod P`.
        t: 0-d int64 on the CPU.
        good: 0-d bool; where it is False zeros count in the place of `x`.

    Returns:
        `[D]` of x's dtype: `x` itself in a group of one.
    """
    return _ops.group_mean(x, groups, t, good)


def wait(x: Tensor) -> Tensor:
    """Complete what `exchange` or `group_mean` posted and return it. Nothing to do for other tensors."""
    if not functorch.has_no_value(x):
        complete(x)
        return x
    return _ops.wait(x)


def worker_index(token: Tensor) -> Tensor:
    """This worker's number, 0-d int64 on token's device; the token only tells `vmap` which axis is the workers'."""
    return _ops.worker_index(token, [])


def make_groups(groups: Tensor) -> None:
    """Make the process groups that `group_mean` with this table will need; collective, the same table everywhere.

    Args:
        groups: `[P, N]` int64, as for `group_mean`.
    """
    here = world()
    if here.size > 1:
        local = groups.shape[1] // here.size
        wanted = {tuple(ranks) for row in groups.tolist() for ranks in _ranks_by_group(row, local).values()}
        here.make_subgroups(sorted(wanted))


def _sent(x: Tensor, good: Tensor | None) -> Tensor:
    """`x` `[(L,) ...]`, or zeros for those of whom `good` `[(L)]` is False; on a CPU nothing is copied where there are none."""
    if good is None or (good.device.type == "cpu" and not functorch.has_no_value(good) and bool(good.all())):
        return x
    return torch.where(good.view(*good.shape, *[1] * (x.dim() - good.dim())), x, torch.zeros_like(x))


# -- exchange: one implementation for the L workers that a process holds ----------------------------------------


def _exchange_stacked(x: Tensor, peers: Tensor, t: Tensor, per_slot: bool, good: Tensor | None) -> Tensor:
    """`x` `[L, (K,) D]` of the L workers here -> `[L, K, D]` in flight."""
    here, local = require_size(x.shape[0], peers.shape[2], "exchange")
    x = _sent(x, good)
    first = here.rank * local
    call = begin(here, "exchange", t, local)
    hears, tells = peers[call.t % peers.shape[0], :, first : first + local].tolist()
    slots = range(peers.shape[3])
    call.hears, call.tells, call.nbytes = hears, tells, x[0].nbytes // max(1, len(slots) if per_slot else 1)
    inbox = here.inbox(x, (local, len(slots), *x.shape[2 if per_slot else 1 :]))
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
    post(here, call, inbox, receives, sends)
    return inbox


def _wait(x: Tensor) -> Tensor:
    complete(x)
    return x.clone()  # an operator must not return its input; compiled code calls `complete` and copies nothing


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


def _exchange(x: Tensor, peers: Tensor, t: Tensor, per_slot: bool, good: Tensor | None) -> Tensor:
    """The common case of one worker here, without a detour: a small network's step takes as long as ten of its lines."""
    phases, _, workers, slots = peers.shape
    here, _ = require_size(1, workers, "exchange")
    x = _sent(x, good)
    call = begin(here, "exchange", t, 1)
    sources, listeners = peers.select(0, call.t % phases).select(1, here.rank).tolist()
    call.hears, call.tells, call.nbytes = sources, listeners, x.nbytes // max(1, slots if per_slot else 1)
    inbox = here.inbox(x, (slots, *x.shape[1 if per_slot else 0 :]))
    receives: list[Part] = []
    sends: list[Part] = []
    if inbox.numel():
        for slot, (source, listener) in enumerate(zip(sources, listeners, strict=True)):
            message = x[slot] if per_slot else x
            if source < 0:
                inbox[slot].zero_()
            elif source == here.rank:
                inbox[slot].copy_(message)
            else:
                receives.append(Part(inbox[slot], message, source, slot))
            if listener >= 0 and listener != here.rank:
                sends.append(Part(message, None, listener, slot))
    post(here, call, inbox, receives, sends)
    return inbox


def _exchange_vmap(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, peers: Tensor, t: Tensor, per_slot: bool, good: Tensor | None
) -> tuple[Tensor, int]:
    _require_worker_axis("exchange", in_dims)
    x = x.movedim(in_dims[0] or 0, 0)
    here, _ = require_size(x.shape[0], peers.shape[2], "exchange")
    if here.size > 1:
        return _ops.exchange_stacked(x.contiguous(), peers, t, per_slot, good), 0
    x = _sent(x, good)
    hears = moved(peers.index_select(0, (t % peers.shape[0]).view(1))[0, 0], x.device)
    slots = peers.shape[3]
    # Looked up once, and not again for every element of a row.
    rows = once(hears.clamp(min=0).reshape(-1))
    if per_slot:
        flat = x.flatten(0, 1).index_select(0, rows * slots + torch.arange(slots, device=x.device).repeat(x.shape[0]))
    else:
        flat = x.index_select(0, rows)
    inbox = flat.view(x.shape[0], slots, *x.shape[2 if per_slot else 1 :])
    silent = once(hears < 0).view(x.shape[0], slots, *[1] * (inbox.dim() - 2))
    return inbox.masked_fill(silent, 0), 0


# -- means within groups ----------------------------------------------------------------------------------------


def _ranks_by_group(row: list[int], local: int) -> dict[int, list[int]]:
    """Group number -> ascending ranks that hold its members."""
    ranks: dict[int, list[int]] = {}
    for worker, group in enumerate(row):
        if worker // local not in ranks.setdefault(group, []):
            ranks[group].append(worker // local)
    return ranks


def _group_mean_stacked(x: Tensor, groups: Tensor, t: Tensor, good: Tensor | None) -> Tensor:
    """`x` `[L, D]` -> `[L, D]` in flight: every worker's row is the mean over its group."""
    here, local = require_size(x.shape[0], groups.shape[1], "group_mean")
    x = _sent(x, good)
    call = begin(here, "group_mean", t, local)
    row = groups[call.t % groups.shape[0]].tolist()
    ranks = _ranks_by_group(row, local)
    call.nbytes = x[0].nbytes
    if local == 1:
        group = row[here.rank]
        call.hears = ranks[group]
        mean = torch.div(x.detach(), row.count(group), out=here.inbox(x, x.shape))
        flight = reduce(here, call, mean, x, ranks[group])
        if flight.works:
            track(mean, flight)
        return mean
    mean, index = torch.empty_like(x), torch.tensor(row[here.rank * local : (here.rank + 1) * local])
    for group in index.unique().tolist():
        members = moved((index == group).nonzero()[:, 0], x.device)
        own = x.index_select(0, members)
        share = (own / row.count(group)).sum(0)
        call.hears = ranks[group]
        has_arrived = reduce(here, call, share, None, ranks[group]).land()
        mean[members] = share if has_arrived else own
    return mean


def _group_mean(x: Tensor, groups: Tensor, t: Tensor, good: Tensor | None) -> Tensor:
    return _group_mean_stacked(x[None], groups, t, None if good is None else good.view(1))[0]


def _group_mean_vmap(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, groups: Tensor, t: Tensor, good: Tensor | None
) -> tuple[Tensor, int]:
    _require_worker_axis("group_mean", in_dims)
    x = x.movedim(in_dims[0] or 0, 0)
    here, _ = require_size(x.shape[0], groups.shape[1], "group_mean")
    if here.size > 1:
        return _ops.group_mean_stacked(x.contiguous(), groups, t, good), 0
    x = _sent(x, good)
    row = moved(groups.index_select(0, (t % groups.shape[0]).view(1))[0], x.device)
    size = torch.zeros_like(row).index_add(0, row, torch.ones_like(row)).index_select(0, row)
    share = x / size.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    return torch.zeros_like(x).index_add(0, row, share).index_select(0, row), 0


def _require_worker_axis(what: str, in_dims: tuple[int | None, ...]) -> None:
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:3]):
        raise ValueError(
            f"{what} under vmap: the payload must carry the worker axis, and the peers and t must not; "
            "use in_dims=(0, 0, None) for (state, batch, t), or df.simulate."
        )


# -- worker index and wait ----------------------------------------------------------------------------------------


def _worker_index(token: Tensor, local: list[int]) -> Tensor:
    """The worker here, 0-d, or with `local` = [L] the L workers here."""
    if not local:
        return integer(world().rank, token.device)
    first, count = world().rank * prod(local), prod(local)
    return torch.arange(first, first + count, device=token.device).view(local)


def _worker_index_vmap(
    info: Any, in_dims: tuple[int | None, ...], token: Tensor, local: list[int]
) -> tuple[Tensor, int]:
    if world().size == 1:
        return torch.arange(info.batch_size, device=token.device), 0
    # Looked up when the step runs: ranks share compiled code, so what is traced must not hold the rank.
    return _ops.worker_index(token, [info.batch_size]), 0


def _wait_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
    return (_ops.wait(x) if world().size > 1 else x), in_dims[0]


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")
_library.impl("exchange_stacked", _exchange_stacked, "CompositeExplicitAutograd")
_library.impl("group_mean", _group_mean, "CompositeExplicitAutograd")
_library.impl("group_mean_stacked", _group_mean_stacked, "CompositeExplicitAutograd")
_library.impl("wait", _wait, "CompositeExplicitAutograd")
_library.impl("complete", complete, "CompositeExplicitAutograd")
_library.impl("worker_index", _worker_index, "CompositeExplicitAutograd")


def _exchange_fake(x: Tensor, peers: Tensor, t: Tensor, per_slot: bool, good: Tensor | None) -> Tensor:
    require_size(1, peers.shape[2], "exchange")
    return x.new_empty((peers.shape[3], *x.shape[1 if per_slot else 0 :]))


def _exchange_stacked_fake(x: Tensor, peers: Tensor, t: Tensor, per_slot: bool, good: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], peers.shape[3], *x.shape[2 if per_slot else 1 :]))


def _group_mean_fake(x: Tensor, groups: Tensor, t: Tensor, good: Tensor | None) -> Tensor:
    require_size(1, groups.shape[1], "group_mean")
    return torch.empty_like(x)


_fakes = {
    "exchange": _exchange_fake,
    "exchange_stacked": _exchange_stacked_fake,
    "group_mean": _group_mean_fake,
    "group_mean_stacked": lambda x, groups, t, good: torch.empty_like(x),
    "wait": torch.empty_like,
    "complete": lambda x: None,
    "worker_index": lambda token, local: token.new_empty(local, dtype=torch.int64),
}
for _name, _fake in _fakes.items():
    lowering.register_fake(f"decentfn::{_name}", _fake, _library)
torch.library.register_vmap("decentfn::exchange", _exchange_vmap, lib=_library)
torch.library.register_vmap("decentfn::group_mean", _group_mean_vmap, lib=_library)
torch.library.register_vmap("decentfn::wait", _wait_vmap, lib=_library)
torch.library.register_vmap("decentfn::worker_index", _worker_index_vmap, lib=_library)

lowering.lower_collectives(
    collectives=[_ops.exchange, _ops.exchange_stacked, _ops.group_mean, _ops.group_mean_stacked],
    wait=_ops.wait,
    # Compiled code calls an operator that returns nothing: one that returns its input is deprecated there.
    complete=_ops.complete,
)
