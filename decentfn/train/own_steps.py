"""Runs of workers on their own clocks: their common end, what is in flight, and the trace of what arrived when."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from decentfn.algorithms.mail import Memory
from decentfn.comm import collectives
from decentfn.core import brief, checks_numbers, require, trees
from decentfn.core.buckets import Buckets
from decentfn.elastic.connections import reported_as
from decentfn.errors import PeerLost
from decentfn.kit.state import State
from decentfn.timing import Trace, schedule_name
from decentfn.timing.trace import rows_of

Batch = TypeVar("Batch")


@checks_numbers
def until(
    batches: Iterable[Batch],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    samples: int | None = None,
    start: int = 0,
) -> Iterator[tuple[int, Batch]]:
    """Yield `(t, batch)` of this worker's own steps until all workers together have used up a budget.

    Steps and samples of all workers are counted, from this call on, in torch's store: a request per step, and nobody waits.
    When the budget is used up, each worker ends after the step that it is in. Call it on every rank.

    Args:
        batches: this worker's batches, endless or long enough; if a worker's end, so does its loop, and the others go on.
        seconds: time since the first worker asked for its first batch here, > 0; it includes compiling.
        steps: own steps of all workers together, >= 1.
        samples: rows of their batches' first tensors, >= 1.
        start: the first t of this worker.

    Raises:
        ValueError: not exactly one budget.
        df.errors.PeerLost: the store has ended, with the process that holds it.

    >>> list(until("abcdef", steps=3, start=7))
    [(7, 'a'), (8, 'b'), (9, 'c')]
    """
    budgets = {"seconds": seconds, "steps": steps, "samples": samples}
    given = {name: value for name, value in budgets.items() if value is not None}
    require(len(given) == 1, "until", "pass one of them.", **budgets)
    require(start >= 0, "until", "a step, >= 0.", start=start)
    [(kind, most)] = given.items()
    require(most > 0, "until", "a budget is greater than 0.", **given)
    return _until(batches, kind, most, start)


def _until(batches: Iterable[Batch], kind: str, most: float, start: int) -> Iterator[tuple[int, Batch]]:
    here = collectives.world()
    here.budgets += 1  # all ranks make the same ones in the same order
    key, store = f"decentfn budget {here.budgets}", here.channels.store if here.size > 1 else HashStore()
    what = (
        "df.data.until: the store in which the workers count has ended; the state is complete, and so is its last step"
    )
    since = time.monotonic()
    for t, batch in enumerate(batches, start):
        is_late = kind == "seconds" and time.monotonic() - since >= most
        amount = int(is_late) if kind == "seconds" else 1 if kind == "steps" else _rows(batch)
        with reported_as(PeerLost, what, process=here.rank):
            used = store.add(key, amount)
        if used > 0 if kind == "seconds" else used - amount >= most:
            return
        yield t, batch


def _rows(batch: Any) -> int:
    first = next((leaf for leaf in trees.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        raise ValueError(
            f"until(samples=...): the batch {brief(batch)} has no tensor whose rows could be counted; use steps=."
        )
    return len(first)


def memory_of(state: Any) -> Memory | None:
    """Return the memory of a worker on its own clock, also within a wrapper's; None for other states."""
    return next(iter(trees.nodes_of(Memory, getattr(state, "memory", ()))), None)


@collectives.calling("df.settle(state)")
def settle(state: State, *, arrivals: Trace | None = None) -> State:
    """Return the state in which this worker has taken all mail in flight. Collective; copies.

    After it `Σ w z / Σ w`, which is what `df.consensus_mean` computes, is exact: nothing is in flight. All ranks call it
    between two steps, and wait until the mail of all has arrived. Needed before checkpoints, `df.with_params`, `df.resize`,
    and any mean over the workers.

    Args:
        state: of workers on their own clocks (`df.asynchronous_gradient_push`), of one worker or stacked.
        arrivals: of a stacked state that replays a trace: that trace, which says in which order what is left was taken.

    Raises:
        ValueError: a state of another algorithm.
    """
    memory = memory_of(state)
    rule = (
        "only workers on their own clocks have messages in flight between steps, as of df.asynchronous_gradient_push."
    )
    require(memory is not None, "settle(state)", rule)
    assert memory is not None
    weight, ring = memory
    if weight.dim():
        last, levels = state.params.taken_at, 0 if arrivals is None else len(arrivals.levels)
        rule = f"the state is of level {last} of {levels}, and what is in flight is known after the last one; replay the others."
        require(arrivals is None or last is None or last == levels - 1, "settle(state, arrivals=trace)", rule)
        rows = collectives.addressed(ring.to)
        if arrivals is not None:
            rows = rows_of("settle(state, arrivals=trace)", arrivals, arrivals.settled, ring.to)
        *x, total = collectives.with_rows([*state.params, weight], ring.values, ring.shares, rows)
        rule = "mail is taken twice; of a state that replays a trace pass arrivals=trace, the one that it replays."
        require(float(total.sum()) < len(weight) * (1 + 1e-9), "settle(state)", rule, mass=float(total.sum()))
        is_known = arrivals is None or len([*arrivals.settled]) == len(weight)
        rule = "the trace lacks who took the mail in flight; on the ranks call df.trace() after df.settle(state)."
        is_whole = float(total.sum()) > len(weight) * (1 - 1e-9)
        require(is_known or is_whole, "settle(state, arrivals=trace)", rule, mass=float(total.sum()))
    else:
        here = collectives.world()
        if here.size == 1:
            return trees.map(torch.clone, state)
        if (box := here.mailbox) is None:
            raise ValueError(
                "settle(state): there is no mailbox here; call the algorithm's init(params) on every rank."
            )
        *x, total = box.take(0, [*state.params, weight], collectives.counts(box, state.params, here))
        collectives.gather_objects(None, here)  # no rank sends more before all have taken theirs
    x, new = Buckets(x, state.params.plan), Memory(total, ring.with_room(ring.to.shape[-2]))
    settled = trees.map(
        torch.clone, state._replace(params=x, memory=trees.map_nodes(Memory, lambda _: new, state.memory))
    )
    if arrivals is None:  # a replay ends
        goes_on(state, settled)
    if not weight.dim():
        box.owners = WeakSet([settled.params])
    return settled


def goes_on(state: State, new: State) -> None:
    """Note that the run of a state goes on with a new one: with its next step and, on a rank, its mail."""
    new.params.taken_at = state.params.taken_at
    if (box := collectives.world().mailbox) is not None and state.params in box.owners:
        box.owners.add(new.params)


def with_room_of(call: str, state: Any, template: Any) -> Any:
    """Return the state with the template's room for messages in flight; if that is another one, nothing may be in flight."""
    for ring, own in zip(*(trees.nodes_of(collectives.Ring, its) for its in (state, template)), strict=True):
        if ring.to.shape == own.to.shape:
            return state
        rule = "messages are in flight, and the state has another room for them; save what df.settle(state) returned."
        require(bool((ring.to < 0).all()), call, rule, saved=ring.to.shape[-2], here=own.to.shape[-2])
        return collectives.with_room(state, own.to.shape[-2])
    return state


@collectives.calling("df.trace()")
def trace() -> Trace:
    """Return the trace of all ranks since `init`, or since the last `df.settle` before the last steps. Collective.

    `df.simulate(step, N, arrivals=trace)` replays it. Only what is gathered after `df.settle` can be settled in the simulator.

    Raises:
        ValueError: no asynchronous steps are running here, or a worker has left out steps.
    """
    here = collectives.world()
    if (box := here.mailbox) is None:
        raise ValueError("trace(): no mailbox is open; call it on ranks that step with df.asynchronous_gradient_push.")
    record = box.record
    own = [record.taken, record.sent, record.ended, record.first, record.late, record.gap]
    *told, gaps = zip(*collectives.gather_objects(own, here), strict=True)
    for i, gap in enumerate(gaps):
        rule = "and a trace has all: count t on by 1, or call df.settle(state) before the gap, after which another trace begins."
        require(not gap, "trace()", f"worker {i} left out its own steps t={gap} (from, to), {rule}")
    return Trace(schedule_name(box.topology), here.size, *told)
