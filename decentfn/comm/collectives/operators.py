"""Operators of a step: post messages or a group's mean, and wait for them.

Time and peers stay outside the graph. Every operator takes the topology's handle and `t`, and finds its round at run
time, so one compiled graph serves every phase of a schedule and every rank. Each has two interpreters:

* under a process group `post` starts messages and returns at once, and `wait` completes them; in processes of several
  workers a mean is complete when it is posted;
* under `torch.func.vmap` over the worker axis nothing is sent, and `wait` is an index or a segment mean. If other
  processes hold workers too, the rule calls the operator once for all workers here (`workers` of them; 0: one alone).

Only data dependencies order compiled code: the number that `post` returns is an argument of every computation that must
come after it (`after`, the gradient), and a computation that must come before a `wait` is an argument of that `wait`.
A message has no name within a step, so posts keep the step's order: each takes the number of the one before it.
Call all of them outside `torch.func.grad`.

The way of a post:

    Worker.post                 looks up the worker's row of the round                              kit/worker.py
    gossip.post                 rounds to the wire's dtype; one flight per bucket                   comm/gossip/plain.py
    exchange, group_mean        call the operator: a number in the graph                            here
    _post_kernel                finds the step's peers and numbers the call                         here
    messages.send, .reduce      start the group's receives and sends, or its sum                    messages.py

and back: `gossip.collect`, `wait`, `_wait_kernel`, `messages.land`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.comm.collectives.failures import lost_message_error, step_mismatch
from decentfn.comm.collectives.lookup import FoundRound, Row
from decentfn.comm.collectives.membership import world
from decentfn.comm.collectives.messages import land, lose_message, reduce, send
from decentfn.comm.collectives.session import Call
from decentfn.comm.collectives.world import World
from decentfn.core import BUFFERS, context, operator
from decentfn.core.buckets import wide
from decentfn.torch_private import inductor
from decentfn.torch_private.functorch import holds, with_workers_first


def make_groups(groups: Tensor) -> None:
    """Make the process groups for means over `groups`, `[P, N]` group numbers by phase and worker; collective."""
    here = world()
    if here.size > 1:
        local = groups.shape[1] // here.size
        wanted = set[tuple[int, ...]]()
        for row in groups.tolist():
            ranks: dict[int, dict[int, None]] = {}
            for worker, group in enumerate(row):
                ranks.setdefault(group, {})[worker // local] = None
            wanted.update(map(tuple, ranks.values()))
        here.channels.make_subgroups(sorted(wanted))


class Flight(NamedTuple):
    """One posted tensor, and the data that `wait` needs."""

    number: Tensor  # 0-d int64 on the CPU
    x: Tensor  # the sent tensor: kept, and not overwritten, until `wait`
    row: Row
    good: Tensor | None
    is_mean: bool


def exchange(x: Tensor, row: Row, *, good: Tensor | None = None) -> Flight:
    """Post `x`, `[D]` or one for each slot `[K, D]`, to this round's listeners; zeros if not `good` (0-d bool)."""
    x = x.contiguous()  # else the rules of several workers would make a copy for each operator
    return Flight(_post(x, row.topology.handle, row.t, good, False, 0, None), x, row, good, is_mean=False)


def group_mean(x: Tensor, row: Row, *, good: Tensor | None = None) -> Flight:
    """Post the mean of `x` `[D]` over this worker's group, an all-reduce: each worker divides by r before the sum."""
    x = x.contiguous()
    return Flight(_post(x, row.topology.handle, row.t, good, True, 0, None), x, row, good, is_mean=True)


def wait(flight: Flight, after: Sequence[Tensor] = ()) -> Tensor:
    """Complete a flight; compiled code computes the tensors in `after` before it waits.

    Returns messages `[K, D]`, zeros where nothing was sent; or the mean `[D]`, `x` itself in a group of one.
    """
    number, x, row, good, is_mean = flight
    peers, size = (row.group, row.group_size) if is_mean else (row.sources, None)
    return _wait(number, x, peers, size, good, 0, list(after))


after = operator(
    "after(Tensor[] xs, Tensor[] flights) -> Tensor[]",
    lambda xs, flights: list(map(torch.clone, xs)),
    lambda xs, flights: [torch.empty_like(x) for x in xs],
    lambda info, in_dims, xs, flights: (
        (list(xs) if world().identity.size == 1 else after(list(xs), list(flights))),
        list(in_dims[0]),
    ),
    BUFFERS,
)
"""Operator `(xs, flights)` -> `xs`, from which compiled code computes nothing before it has posted the flights, one or more."""


# -- post -----------------------------------------------------------------------------------------------------------


def _sent(x: Tensor, good: Tensor) -> Tensor:
    """Return `x` `[(L,) ...]`, with zeros where `good` `[(L)]` is False; no copy on a CPU if all are good."""
    if holds(good):
        return x
    return torch.where(good.view(*good.shape, *[1] * (x.dim() - good.dim())), x, torch.zeros_like(x))


def _post_kernel(
    x: Tensor, handle: Tensor, t: Tensor, good: Tensor | None, is_mean: bool, workers: int, before: Tensor | None
) -> Tensor:
    """Post `x`, or `[L, ...]` of the L workers here; return the call's number."""
    memory = x.data_ptr()
    if good is not None:
        x = _sent(x, good)
    if not workers:
        x = x[None]
    here, local = context.step_world or world(), x.shape[0]
    topology, number, _ = here.session.rounds.get((id(handle), id(t))) or FoundRound.of(here, handle, t)
    what = "group_mean" if is_mean else "exchange"
    if here.session.lost is not None and not here.session.is_running:
        raise lost_message_error(here, here.session.lost)
    call, different = here.session.call(what, number, local)
    if different is not None:  # another rank has made this call at another step
        lose_message(here, call, step_mismatch(here, call, call.place, *different), different[0])
    peers = topology.peers(number)
    if is_mean:
        _post_mean(here, call, peers.members or [], x)
    else:
        send(here, call, peers, x, topology.slots)
    here.session.in_flight[call.number], call.memory = call, memory
    return torch.scalar_tensor(call.number, dtype=torch.int64)


def _post_mean(here: World, call: Call, members: list[list[int]], x: Tensor) -> None:
    local, call.nbytes = call.local, x[0].nbytes
    if local == 1:
        ranks = members[here.identity.rank]
        call.inbox = x / len(ranks)
        reduce(here, call, call.inbox, x, ranks)
        return
    rank = here.identity.rank
    mean, first = torch.empty_like(x), rank * local
    for group in sorted({tuple(its) for its in members[first : first + local]}):  # the same order everywhere
        rows = [worker - first for worker in group if worker // local == rank]
        own = torch.stack([x[i] for i in rows])
        share = (own / len(group)).sum(0)
        reduce(here, call, share, None, sorted({worker // local for worker in group}))
        has_arrived = land(here, call)
        for i, row_of_i in zip(rows, own, strict=True):
            mean[i] = share if has_arrived else row_of_i
    call.inbox = mean


def _post_vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, None]:
    x, handle, t, good, is_mean, *_ = arguments
    n = info.batch_size
    if world().identity.size == 1:
        return handle, None  # any number, as nothing is in flight
    x, good = with_workers_first(x, in_dims[0], n), None if good is None else with_workers_first(good, in_dims[3], n)
    return _post(x, handle, t, good, is_mean, n, None), None


_post = operator(
    "post(Tensor x, Tensor topology, Tensor t, Tensor? good, bool is_mean, int workers, Tensor? before) -> Tensor",
    _post_kernel,
    lambda *_: torch.empty((), dtype=torch.int64, device="cpu"),
    _post_vmap,
    BUFFERS,  # what travels is what `wait` keeps
)
inductor.keep_in_order("post")  # else their order depends on the batch's size, which differs between ranks


# -- wait -----------------------------------------------------------------------------------------------------------


def _wait_kernel(number: Tensor, x: Tensor, peers: Tensor, size: Any, good: Any, workers: int, after: Any) -> Tensor:
    here = context.step_world or world()
    call = here.session.in_flight[int(number)]
    if not workers and call.memory != x.data_ptr():
        raise RuntimeError(
            "wait: the compiler kept a copy of what was sent, and may have written over what travels; post its clone."
        )
    land(here, here.session.in_flight.pop(call.number))
    inbox, call.inbox = call.inbox, None
    return inbox if workers else inbox[0]


def _wait_vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    number, x, peers, size, good, _, after = arguments
    n = info.batch_size
    x, peers = with_workers_first(x, in_dims[1], n), with_workers_first(peers, in_dims[2], n)
    if world().identity.size > 1:
        return _wait(number, x, peers, size, None, n, list(after)), 0
    if good is not None:
        x = _sent(x, with_workers_first(good, in_dims[4], n))
    if size is not None:
        sizes = with_workers_first(size, in_dims[3], n).view(-1, *[1] * (x.dim() - 1))
        share = (x / sizes.to(x.dtype)).to(wide(x.dtype))
        # Wide: whether index_add rounds each of a thousand 16-bit shares depends on the axis and on who compiles it.
        return torch.zeros_like(share).index_add(0, peers, share).to(x.dtype).index_select(0, peers), 0
    slots, is_heard = peers.shape[1], peers >= 0
    all_heard = holds(is_heard)
    rows = (peers if all_heard else peers.clamp(min=0)).reshape(-1)
    if x.dim() == 3:
        x, rows = x.flatten(0, 1), rows * slots + torch.arange(slots, device=x.device).repeat(n)
    inbox = x.index_select(0, rows).view(n, slots, x.shape[-1])
    return inbox if all_heard else inbox.masked_fill_(~is_heard.view(n, slots, 1), 0), 0


_wait = operator(
    # Of a mean, `peers` and `size` are the worker's group; of messages, `peers` are its sources.
    "wait(Tensor number, Tensor x, Tensor peers, Tensor? size, Tensor? good, int workers, Tensor[] after) -> Tensor",
    _wait_kernel,
    lambda number, x, peers, size, *_: x.new_empty((*peers.shape, x.shape[-1]) if size is None else x.shape),
    _wait_vmap,
    BUFFERS,
)
