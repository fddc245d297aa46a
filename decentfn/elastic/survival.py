"""`survive`: a step that goes on without the workers that are lost, and with those that `join`: no restart, no compilation."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.comm import collectives
from decentfn.comm.collectives import World
from decentfn.core import PyTree, as_step, brief, brief_error, log
from decentfn.core.buckets import Buckets
from decentfn.elastic import connections, joining
from decentfn.elastic.generation import Generation, Members, awaited_run, begin, generation_of, go_on
from decentfn.elastic.liveness import Liveness
from decentfn.elastic.roll_call import Decision, Note, hold, places_of
from decentfn.errors import ExchangeTimeout, LeftBehind, PeerLost, RunError, StepMismatch
from decentfn.kit.state import State, kept
from decentfn.kit.step import Step
from decentfn.topologies.resized import in_place

_LOOK_S = 0.2
"""Interval at which a worker answers its door and the first one looks for newcomers, which takes 0.1 ms."""


def survive(step: Step | Callable[..., Any], *, patience: timedelta = timedelta(seconds=30)) -> Step:
    """Return a step that goes on without the workers that are lost: no restart, and nothing is compiled again.

    When a worker dies, or is later than the timeout of `df.init`, the others agree in the store on who is left and on
    the last step that all of them ended. They reconnect, and continue from the states in memory with
    `topology.without(lost)`, in the form that the compiled step expects. They repeat at most one step, within this
    call. `world.rank`, `world.num_workers` and `world.worker` change; `world.place` does not. Processes that `join` are
    admitted between two steps, in the same way.

    A worker's parameters, optimizer, buffers and memory of the run stay as they are; its memory of other workers is
    reset (`docs/surviving.md`). Each worker keeps its data shard. Call it on every rank with the same arguments.

    On GPUs it has not yet been run. There NCCL's communicators are aborted and made again, and a step ends once the GPU
    has its messages.

    Args:
        step: on ranks of one process per worker; compiled with `donate=False`, or eager, because the states before this
            step and before the last one are kept (by reference; two more than a donated step has).
        patience: how long to wait for a worker that has not noticed the loss although its process exists: longer than
            the computation of a step. A dead one is not waited for.

    Returns:
        Another step; in one process it does nothing more.

    Raises:
        ValueError: a donated step, or a patience that is not positive; workers of several processes; on GPUs, without
            the variables that docs/surviving.md names; an algorithm that accepts no schedule of fewer workers
            (`relay_sgd`; `gasloc` with a number of steps for each); at the first call, another surviving step.
        df.errors.LeftBehind: at a call, the others have continued without this worker: it was late, or in the smaller
            part of a partition (of equal ones, the one without the lowest worker).
        df.errors.PeerLost: the run or its store has ended.

    >>> step = survive(lambda state, batch, t: (state + batch * t, state.sum()))
    >>> step(torch.ones(2), torch.ones(2), 3)
    (tensor([4., 4.]), tensor(2.))
    """
    if not isinstance(patience, timedelta) or patience <= timedelta(0):
        raise ValueError(f"survive(patience={brief(patience)}): a positive datetime.timedelta.")
    step, here = Step.of(step, "survive"), collectives.world()
    step.require_common_steps("survive(step)")
    _require_pure(step)
    _require_kind(here)
    _require_schedule(here, step)
    _warn_of_agent()
    given = {one.name: getattr(step, one.name) for one in fields(step) if one.init}
    return _Surviving(**given, survivor=_Survivor(patience))


def join(step: Step, state: Any, batch: PyTree) -> tuple[Any, int]:
    """Enter a run whose step survives: wait until the others admit this process, between two of their steps.

    In a process of `df.init(join=True)`; in any other it does nothing. First it takes a step alone, to compile it. The
    state is then that of the lowest worker, bit for bit, but that memory of other workers is reset on all, as after
    a loss. `world.place` is that of a lost worker, if there is one, and else a new one.

    Args:
        step: from `df.survive`, of the same program as the others', for `world.num_workers` workers.
        state: from the algorithm's `init`; only its form counts.
        batch: a batch of the usual form.

    Returns:
        `(state, t)`: the state, and the step to begin with; `(state, 0)` in a process that did not come to join.

    Raises:
        ValueError: `step` is not from `df.survive`; the others do not reach this process, or have no schedule for it.
        df.errors.PlanMismatch: the run's states have another form, or its algorithm other hyperparameters; it goes on
            undisturbed.
        df.errors.PeerLost: the run or its store has ended.

    >>> step = survive(lambda state, batch, t: (state + batch, None))
    >>> join(step, torch.ones(2), torch.ones(2))
    (tensor([1., 1.]), 0)
    """
    if not isinstance(step, _Surviving):
        raise ValueError(f"join({brief(step)}, state, batch): expected a surviving step; df.survive(step).")
    here = collectives.world()
    if awaited_run(here) is None:
        return state, 0
    step(state, batch, 0)
    return step.survivor.enter(here, state)


def _require_pure(step: Step) -> None:
    if step.had("donate"):
        raise ValueError(
            "survive(step): a donated step overwrites the state that the workers may have to go back to; "
            "df.compile(step, donate=False), or without df.donate."
        )


class _Inputs(NamedTuple):
    t: int
    state: Any
    batch: PyTree


@dataclass(frozen=True, eq=False)
class _Surviving(Step):
    survivor: Any = field(default=None, repr=False)

    def __call__(self, state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Any]:
        """Take step `t`, and before it the last one again if others have not ended it."""
        here = collectives.world()
        if torch.compiler.is_dynamo_compiling() or here.identity.size_at_start == 1 or awaited_run(here):
            return super().__call__(state, batch, t)
        _require_pure(self)
        return self.survivor.take(super().__call__, _Inputs(int(as_step(t)), state, batch))


class _Survivor:
    """State of a surviving step between calls."""

    def __init__(self, patience: timedelta) -> None:
        self._patience = patience
        self._last: _Inputs | None = None
        self._has_begun = False
        self._looked = 0.0
        self._store: Store
        self._liveness: Liveness

    def take(self, step: Callable[..., tuple[Any, Any]], now: _Inputs) -> tuple[Any, Any]:
        here = collectives.world()
        if not self._has_begun:
            self._begin(here, now.state)
        todo = [now] if not generation_of(here).somebody_waits else self._go_on(here, [now], None)
        while True:
            try:
                if here.session.cut_short is not None:  # by a call outside steps
                    where, cause = here.session.cut_short
                    raise PeerLost(f"{where}: {cause}", process=here.rank, step=todo[0].t)
                sees_newcomers = self._looks(here)  # now, since those that waited may have been admitted above
                generation_of(here).take_part(sees_newcomers=sees_newcomers)  # a step ends when all have begun it
                result = step(todo[0].state, todo[0].batch, todo[0].t)
            except (PeerLost, ExchangeTimeout) as error:
                todo = self._go_on(here, todo, error)
                continue
            self._last = todo.pop(0)
            if not todo:
                return result
            todo[0] = todo[0]._replace(state=result[0])

    def _begin(self, here: World, state: Any) -> None:
        _require_kind(here)
        if not here.hooks.failure_is_final:
            raise ValueError(
                "survive(step): another step of this run survives already, and the workers would go back to the last call of "
                "either; call df.survive once."
            )
        import scipy.sparse.csgraph  # noqa: F401  # for the schedule after a loss, when others would wait for the import

        seats = tuple(here.identity.processes)
        late = f"survive: another worker did not call its step within the timeout of df.init ({here.channels.timeout})"
        with connections.reported_as(ExchangeTimeout, late, process=here.rank):
            self._store = joining.open_run(here, state)
            self._announce(here.rank)
            self._liveness.learn(seats)
            begin(here, Generation(here, Members(0, seats, seats), here.rank, self._store, self._liveness.is_gone))
        if generation_of(here).polls:
            connections.watch(weakref.ref(here), lambda here: generation_of(here).require_present())

    def _announce(self, seat: int) -> None:
        """Let others see that this process exists."""
        self._liveness, self._has_begun = Liveness(PrefixStore("survive", self._store), seat), True

    def _looks(self, here: World) -> bool:
        """Accept probes at intervals; return True on the first worker if somebody waits to join."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return False
        self._looked = now
        self._liveness.clear()
        with suppress(RuntimeError):  # the store has ended, which matters after a loss only
            return here.rank == 0 and bool(joining.waiting(here, self._store, self._liveness))
        return False

    def enter(self, here: World, state: Any) -> tuple[Any, int]:
        """Wait until the run admits this process; return its state and the step to begin with."""
        self._store = run = cast(Store, awaited_run(here))
        with connections.reported_as(PeerLost, "join: the store does not answer"):
            joining.require_same(here, run, state)
            while True:
                seat = joining.new_seat(here, run)
                alone = generation_of(here)
                self._announce(seat)
                begin(here, alone.next(alone.members, seat, self._liveness.is_gone))
                members, decision = joining.await_admission(run, seat, self._liveness)
                try:
                    self._liveness.learn(members.seats)
                    return self._connect(here, members, decision, state, [seat]), decision.step
                except RuntimeError as lost:
                    # One more was lost meanwhile; the others go on without this process.
                    log.info("join: %s; waiting again", brief_error(lost))
                    here.hang_up()
                    self._liveness.close()

    def _go_on(self, here: World, todo: list[_Inputs], error: RunError | None) -> list[_Inputs]:
        """Return the steps to take with those that continue; this process is connected to them."""
        since, before, kept_state = time.monotonic(), generation_of(here).members.seats, None
        if error is not None:  # otherwise others may still be in the last step
            self._leave(here)
        while kept_state is None:
            (changes, seats, places), seat = generation_of(here).members, generation_of(here).seat
            decision = self._agree(here, todo[0].t, len(todo) > 1, error)
            if decision.step == todo[0].t - 1 and self._last is not None:
                todo = [self._last, *todo]
            if decision.step != todo[0].t:
                raise StepMismatch(
                    f"survive: worker {seat} is at t={todo[0].t}, another one at t={decision.step}; every rank must call "
                    "the step with consecutive t, the same on all.",
                    process=seat,
                    step=todo[0].t,
                ) from error
            newcomers = [seat for seat in decision.seats if seat not in seats]
            places = places_of(decision.seats, dict(zip(seats, places, strict=True)))
            members = Members(changes + 1, decision.seats, places)
            try:
                joining.admit(self._store, members, decision, newcomers)
                self._liveness.learn(newcomers, answered=True)
                kept_state = self._connect(here, members, decision, todo[0].state, newcomers)
            except RuntimeError as another:  # one more was lost meanwhile
                self._leave(here)
                log.info("survive: %s", brief_error(another))
        members = generation_of(here).members
        why = "" if error is None else f"; {type(error).__name__}"
        log.warning(
            f"survive: of workers {list(before)}, {list(members.seats)} continue with step t={todo[0].t} after "
            f"{time.monotonic() - since:.2f} s (generation {members.changes}{why})"
        )
        return [todo[0]._replace(state=kept_state), *todo[1:]]

    def _connect(self, here: World, members: Members, decision: Decision, state: Any, newcomers: Sequence[int]) -> Any:
        """Connect to the workers of the next generation; return the state with which this one continues."""
        generation = go_on(here, members, self._patience)
        state = _kept(joining.hand_over(here, state, newcomers))
        generation.miss(decision.step if decision.repeats else None)
        return state

    def _leave(self, here: World) -> None:
        """End this generation here, so that nobody waits for this process in it."""
        here.session.note_failure(None, timed_out=False)
        here.hang_up()

    def _agree(self, here: World, t: int, repeats: bool, error: RunError | None) -> Decision:
        (_, seats, _), seat, liveness = generation_of(here).members, generation_of(here).seat, self._liveness
        what = f"survive: worker {seat} has lost others in step t={t}, and the store, which must outlive the workers, does not answer"
        with connections.reported_as(PeerLost, what, process=seat, step=t):
            reached = tuple(other for other in seats if other == seat or liveness.probe(other) == "answers")
            mine, waiting = Note(seat, t, reached, repeats), partial(joining.waiting, here, self._store, liveness)
            decision = hold(mine, seats, generation_of(here).roll, liveness, waiting, self._patience)
        if decision is None:
            raise LeftBehind(
                f"survive: the others have decided to continue without worker {seat}, which was at t={t}: it was "
                "late, or not reached by most of them. Its state is whole; they do not wait for it.",
                worker=seat,
                process=seat,
                step=t,
            ) from error
        return decision


def _kept(state: Any) -> Any:
    """Return the state of a worker that continues with others than before. Collective."""
    if not isinstance(state, State):
        return state
    x = _mean(state.params) if state.params.plan.starts_equal else state.params
    return state._replace(params=x, memory=kept(state.memory, x, _mean))


def _mean(x: Buckets) -> Buckets:
    """Average what is shared over all workers in float64, and round once."""

    def one(b: Tensor) -> Tensor:
        rows = b.double().view(-1, b.shape[-1])
        return collectives.process_mean(rows.mean(0)).to(b.dtype).expand_as(b).clone()

    return Buckets([one(b) if plan.is_shared else b for b, plan in zip(x, x.plan.buckets, strict=True)], x.plan)


def _warn_of_agent() -> None:
    """Log once per machine that torchrun ends all processes of an agent with the first that dies."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and local != "1" and os.environ.get("LOCAL_RANK") == "0":
        log.warning(
            f"survive(step): torchrun has started {local} processes here, and ends them all with the first that dies; only processes "
            "of other agents would continue. Start one agent for each process (docs/surviving.md, Launching)."
        )


def _require_kind(here: World) -> None:
    """Raise ValueError for workers or devices that cannot go on without others."""
    if here.processes_per_worker > 1:
        raise ValueError(
            f"survive(step): workers of {here.processes_per_worker} processes, of which one cannot go on without the others' shards; "
            "restart from a checkpoint (docs/restarts.md)."
        )
    if here.identity.size_at_start > 1 and here.device.type != "cpu":
        connections.require_recoverable("survive(step)")


def _require_schedule(here: World, step: Step) -> None:
    """Raise ValueError if the algorithm accepts no schedule without one of the processes."""
    if step.topology is None or here.identity.size_at_start == 1 or here.hooks.changes:
        return
    n = step.topology.num_workers
    try:
        in_place(step.topology, range(n - max(1, n // here.identity.size_at_start), n))
    except ValueError as error:
        raise ValueError(
            f"survive(step): the algorithm accepts no schedule in place of {step.topology!r} after a loss; restart from a checkpoint "
            "(docs/restarts.md), or use another algorithm."
        ) from error
