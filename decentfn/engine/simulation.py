"""`simulate`: many workers in one process, with the same step that trains on many processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.fingerprint import require_equal_rows
from decentfn.core import PyTree, batches_of, over_workers, require_rows, trees
from decentfn.core.arguments import MOST_WORKERS, checks_numbers, require, require_at_most
from decentfn.engine.memory import device_memory, keep_freed_memory
from decentfn.gradient.side_channel import SideChannel
from decentfn.kit.state import is_state
from decentfn.kit.step import Step
from decentfn.timing import Trace
from decentfn.timing.trace import Replay
from decentfn.torch_private import functorch


@checks_numbers
def simulate(
    step: Step | Callable[..., Any], num_workers: int, *, chunk_size: int | None = None, arrivals: Trace | None = None
) -> Step:
    """Return the step of `num_workers` workers at once: every leaf of state, batch and metrics gains a leading `[N]`.

    In one process N is the topology's size. Under torchrun each process simulates N workers and
    N x processes is the topology's size; worker i is in process i // N. Compile as
    `compile(simulate(step, N))`; `donate=False` saves the copy back, at the price of a second state. Random
    operations in the loss (dropout) differ between workers.

    Args:
        step: a step written for one worker.
        num_workers: N >= 1, the workers of this process.
        chunk_size: number of workers for which the loss and its gradient are evaluated at a time (None: all), to
            limit the memory of activations. The compiled graph grows with the number of chunks, and a loss that
            draws random numbers is refused.
        arrivals: a trace of workers on their own clocks (`df.asynchronous_gradient_push`). Step `t` is then level t of it:
            the own steps `arrivals.levels[t]`, each with the batch of its own step. The other workers keep their state, and
            their metrics mean nothing. The state has room for messages in flight: `df.stack(state, N, arrivals=trace)`.

    Raises:
        ValueError: N or `chunk_size` is not positive, `step` is compiled or simulated already, or (when called) a leaf
            does not have N rows, or N x processes is not the topology's size; a trace of another schedule.
    """
    step = Step.of(step, "simulate", refuse=("compile", "donate", "simulate"))
    require_at_most("simulate", MOST_WORKERS, num_workers=num_workers)
    rule = "workers at a time, an integer >= 1, or None for all."
    require(chunk_size is None or chunk_size >= 1, "simulate", rule, chunk_size=chunk_size)

    replay = None
    if arrivals is not None:
        rule = "a recorded or computed df.timing.Trace."
        require(isinstance(arrivals, Trace), "simulate", rule, arrivals=arrivals)
        rule = "only workers on their own clocks take a trace, as with df.asynchronous_gradient_push."
        require(step.own_steps, f"simulate({step.name}, arrivals=trace)", rule)
        assert step.topology is not None
        replay = Replay("simulate(step, N, arrivals=trace)", arrivals, step.topology)

    keep_freed_memory()
    one = step.run

    def run(state: Any, batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        require_rows("state", state, num_workers)
        if isinstance(batch, SideChannel):
            new, metrics = over_workers(lambda state: one(state, batch, t), num_workers, state, chunk_size=chunk_size)
        else:
            require_rows("batch", batch := trees.plain(batch), num_workers)
            given = num_workers, state, batch
            new, metrics = over_workers(lambda state, batch: one(state, batch, t), *given, chunk_size=chunk_size)
        if replay is not None:
            goes_on = collectives.own_step(state.params[0], t, num_workers) >= 0
            new = trees.map(
                lambda new, old: torch.where(goes_on.view(-1, *[1] * (new.dim() - 1)), new, old), new, state
            )
        return new, metrics

    def check(state: Any, batch: PyTree, t: Tensor) -> None:
        here = collectives.world()
        if step.num_workers is not None and num_workers * here.identity.size_at_start != step.num_workers:
            collectives.refuse_size(here, num_workers, step.num_workers, "simulate")
        require_rows("state", state, num_workers)
        if not step.is_by_autograd:
            require_rows("batch", batch := trees.plain(batch), num_workers)
        its_batch = batches_of(batch, num_workers)[0]
        if step.starts_equal and not functorch.has_no_value(t) and int(t) == 0 and is_state(state):
            require_equal_rows("simulate(step, N)(state, batch, 0)", {"params": state.params.shared()})
        assert step.check is not None
        first = trees.map(lambda leaf: leaf[0], state)
        if replay is not None and is_state(first):
            if (room := trees.nodes_of(collectives.Ring, first)[0].to.shape[0]) < replay.trace.room:
                raise ValueError(
                    f"simulate(step, {num_workers}, arrivals=trace): the state has room for {room} messages of each worker in flight, and "
                    f"the trace needs R={replay.trace.room}; make it with df.stack(init(params), {num_workers}, arrivals=trace), into which "
                    "df.checkpoint.restore reads a settled run that goes on."
                )
            first = collectives.with_room(first, int(num_workers > 1))  # as laid out: one worker sends nothing
        step.check(first, its_batch, t)

    own_check = None if step.check is None else check
    return step.transformed("simulate", num_workers, run=run, check=own_check, arrivals=replay)


@checks_numbers
def stack(state: PyTree, num_workers: int, *, arrivals: Trace | None = None) -> PyTree:
    """Stack `num_workers` copies of a state (or a batch): every leaf `[...]` becomes `[N, ...]`, in new memory.

    With `arrivals`, each worker has room for the messages that are in flight in that trace.

    Raises:
        ValueError: `num_workers` is not an integer >= 1, or the state is stacked already; the messages in flight do not fit
            into memory.
    """
    require_at_most("stack", MOST_WORKERS, num_workers=num_workers)
    if is_state(state) and state.params[0].dim() > 1:
        raise ValueError(
            f"stack(state, {num_workers}): the state is stacked already, for {state.params[0].shape[0]} workers; stack what "
            "init(params) returned. Stacked states of several runs are df.stack_runs(states)."
        )
    if arrivals is not None:
        state = collectives.with_room(state, _room(state, num_workers, arrivals))
    return trees.map(lambda leaf: leaf.unsqueeze(0).repeat(num_workers, *[1] * leaf.dim()), state)


def _room(state: Any, num_workers: int, arrivals: Trace) -> int:
    """Return the places of a worker's ring; raise ValueError if all rings together exceed a CPU's memory."""
    each = sum(box.shape[-1] * box.itemsize for ring in trees.nodes_of(collectives.Ring, state) for box in ring.values)
    needed, room = num_workers * arrivals.room * each, device_memory(state.params[0].device)
    if needed > room:
        worker, step = max(arrivals.places, key=lambda one: arrivals.places[one])
        raise ValueError(
            f"stack(state, {num_workers}, arrivals=trace): R={arrivals.room} messages of each worker, as many of worker {worker} are in "
            f"flight at its own step {step}, take {needed:,} bytes, and this machine has {room:,}; replay a shorter trace, fewer workers, "
            "or a smaller model."
        )
    return arrivals.room


@checks_numbers
def worker(state: PyTree, i: int) -> PyTree:
    """Copy worker `i`'s own part of a stacked state.

    Args:
        state: stacked, every leaf `[N, ...]`.
        i: from 0 to N - 1, counted among the workers that this process holds; from -N to -1, from the last one.

    Raises:
        ValueError: there is no such worker.
    """
    is_one = is_state(state) and state.params[0].dim() == 1
    held = 0 if is_one else min((leaf.shape[0] if leaf.dim() else 0 for leaf in trees.leaves(state)), default=0)
    rule = f"the state has {held} workers here, from 0; a state that is not stacked has none."
    require(-held <= i < held, f"worker(state, {i})", rule)
    return trees.map(lambda leaf: leaf[i].clone(), state)
