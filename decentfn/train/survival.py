"""`survive`: a step that goes on without the workers that are lost, in place: no restart, no compilation."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.comm import collectives
from decentfn.comm.collectives import World
from decentfn.core.buckets import Buckets, each
from decentfn.core.formatting import brief, brief_error
from decentfn.core.scalars import as_step
from decentfn.core.trees import PyTree
from decentfn.errors import ExchangeTimeout, LeftBehind, PeerLost, RunError, StepMismatch
from decentfn.kit.state import State, kept
from decentfn.kit.step import Step
from decentfn.train.doorbell import Doorbell
from decentfn.train.roll_call import Decision, Leave, Note, act

_log = logging.getLogger("decentfn")
_POLL_S = 0.01


def survive(step: Step | Callable[..., Any], *, patience: timedelta = timedelta(seconds=30)) -> Step:
    """Return a step that goes on without the workers that are lost: no restart, and nothing is compiled again.

    When a worker dies, or is later than the timeout of `df.init`, the others agree in the store on who is left and on
    the last step that all of them ended. They connect anew, and continue from the states in memory with
    `topology.without(lost)`, in the form that the compiled step expects. They repeat at most one step, within this
    call. `world.rank`, `world.num_workers` and `world.worker` change; `world.place` does not.

    A worker's parameters, optimizer, buffers and memory of the run stay as they are; its memory of other workers starts
    anew (`docs/surviving.md`). It reads on in its own data. Call it on every rank with the same arguments.

    Args:
        step: on gloo ranks, of one process per worker; compiled with `donate=False`, or eager, because the states
            before this step and before the last one are kept (by reference; two more than a donated step has).
        patience: how long to wait for a worker that has not noticed the loss although its process exists: longer than
            the computation of a step. A dead one is not waited for.

    Returns:
        Another step; in one process it does nothing more.

    Raises:
        ValueError: a donated step, or a patience that is not positive; at the first call, workers of several processes,
            a GPU, another surviving step, or an algorithm whose memory depends on the number of workers (`relay_sgd`).
        df.errors.LeftBehind: at a call, the others have continued without this worker: it was late, or in the smaller
            part of a partition (of equal ones, the one without the lowest worker).
        df.errors.PeerLost: the store has ended.

    >>> step = survive(lambda state, batch, t: (state + batch * t, state.sum()))
    >>> step(torch.ones(2), torch.ones(2), 3)
    (tensor([4., 4.]), tensor(2.))
    """
    if not callable(step):
        raise ValueError(f"survive({brief(step)}): expected a step; init, step = df.adapt_while_communicate(...).")
    if not isinstance(patience, timedelta) or patience <= timedelta(0):
        raise ValueError(f"survive(patience={brief(patience)}): a positive datetime.timedelta.")
    step = Step.of(step)
    _require_pure(step)
    given = {one.name: getattr(step, one.name) for one in fields(step) if one.init}
    return _Surviving(**given, survivor=_Survivor(patience.total_seconds()))


def _require_pure(step: Step) -> None:
    if step.is_donated:
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
        if torch.compiler.is_dynamo_compiling() or collectives.world().num_seats == 1:
            return super().__call__(state, batch, t)
        _require_pure(self)
        return self.survivor.take(super().__call__, _Inputs(int(as_step(t)), state, batch))


class _Survivor:
    """State of a surviving step between calls."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._last: _Inputs | None = None
        self._store: Store
        self._doorbell: Doorbell | None = None

    def take(self, step: Callable[..., tuple[Any, Any]], now: _Inputs) -> tuple[Any, Any]:
        here = collectives.world()
        if self._doorbell is None:
            self._doorbell = self._begin(here, now.state)
        todo = [now]
        while True:
            try:
                result = _whole(here, step, todo[0])
            except (PeerLost, ExchangeTimeout) as error:
                todo = self._go_on(here, todo, error)
                continue
            self._last = todo.pop(0)
            if not todo:
                return result
            todo[0] = todo[0]._replace(state=result[0])

    def _begin(self, here: World, state: Any) -> Doorbell:
        _require_survivable(here, state)
        self._store = here.store
        here.steps.agrees = True
        try:
            return Doorbell(PrefixStore("survive", self._store), here.place, here.num_seats)
        except RuntimeError as error:
            raise ExchangeTimeout(
                f"survive: another worker did not call its step within the timeout of df.init ({here.timeout}): "
                f"{brief_error(error)}",
                process=here.place,
            ) from error

    def _go_on(self, here: World, todo: list[_Inputs], error: RunError) -> list[_Inputs]:
        """Return the steps to take with those that are left; this process is connected to them."""
        since, before, kept_state = time.monotonic(), here.seats, None
        while kept_state is None:
            here.hang_up()
            decision = self._agree(here, todo[0].t, error)
            if decision.step == todo[0].t - 1 and self._last is not None:
                todo = [self._last, *todo]
            if decision.step != todo[0].t:
                raise StepMismatch(
                    f"survive: worker {here.place} is at t={todo[0].t}, another one at t={decision.step}; every rank must call "
                    "the step with consecutive t, the same on all.",
                    process=here.place,
                    step=todo[0].t,
                ) from error
            try:
                here.go_on(here.generation + 1, decision.seats)
                self._meet(here)
                here.connect()
                kept_state = _kept(todo[0].state)
            except (RunError, RuntimeError) as another:  # one more was lost meanwhile
                _log.info("survive: %s", brief_error(another))
        _log.warning(
            "survive: without worker %s; the other %d of %d continue with step t=%d after %.2f s (generation %d; %s)",
            ", ".join(str(seat) for seat in before if seat not in here.seats) or "nobody",
            here.size,
            here.num_seats,
            todo[0].t,
            time.monotonic() - since,
            here.generation,
            type(error).__name__,
        )
        return [todo[0]._replace(state=kept_state), *todo[1:]]

    def _meet(self, here: World) -> None:
        """Wait until all that are left are about to connect, which would wait much longer for one that died meanwhile."""
        board, end, doorbell = here.store, time.monotonic() + self._patience_s, self._doorbell
        assert doorbell is not None
        board.set(f"present {here.place}", "")
        while not board.check([f"present {seat}" for seat in here.seats]):
            gone = [seat for seat in here.seats if seat != here.place and doorbell.ring(seat) == "gone"]
            if gone or time.monotonic() > end:
                raise PeerLost(
                    f"survive: worker {gone[0] if gone else 'that was left'} did not come", process=here.place
                )
            time.sleep(_POLL_S)

    def _agree(self, here: World, t: int, error: RunError) -> Decision:
        board = PrefixStore(f"survive {here.generation + 1}", self._store)
        try:
            return self._decided(here, t, board)
        except LeftBehind as left:
            raise left from error
        except RuntimeError as lost:
            raise PeerLost(
                f"survive: worker {here.place} has lost others in step t={t}, and the store does not answer: "
                f"{brief_error(lost)}. It must outlive the workers (docs/surviving.md).",
                process=here.place,
                step=t,
            ) from error

    def _decided(self, here: World, t: int, board: Any) -> Decision:
        doorbell, end, gone = self._doorbell, time.monotonic() + self._patience_s, set[int]()
        assert doorbell is not None
        reached = tuple(seat for seat in here.seats if seat == here.place or doorbell.ring(seat) == "answers")
        mine = Note(here.place, t, reached)
        while True:
            decided = _decision(board.get("decision")) if board.check(["decision"]) else None
            notes = _notes(board.get("notes")) if board.check(["notes"]) else []
            doorbell.clear()
            gone = {seat for seat in here.seats if seat != here.place and doorbell.ring(seat) == "gone"}
            match act(mine, here.seats, notes, decided, gone, is_over=time.monotonic() > end):
                case Note() as note:
                    board.append("notes", json.dumps(note) + "\n")
                case Decision() as decision:
                    if decided is not None:
                        return decided
                    board.compare_set("decision", "", json.dumps(decision))
                case Leave():
                    raise LeftBehind(
                        f"survive: the others have decided to continue without worker {here.place}, which was at t={t}: it was "
                        "late, or not reached by most of them. Its state is whole; they do not wait for it.",
                        worker=here.place,
                        process=here.place,
                        step=t,
                    )
                case _:
                    time.sleep(_POLL_S)


def _require_survivable(here: World, state: Any) -> None:
    if here.processes_per_worker > 1 or here.device.type != "cpu":
        raise ValueError(
            f"survive(step): workers of {here.processes_per_worker} process(es) on {here.device.type}; it needs one process per "
            "worker and gloo on the CPU. Otherwise restart from a checkpoint (docs/restarts.md)."
        )
    if here.steps.agrees or here.generation:
        raise ValueError(
            "survive(step): another step of this run survives already, and the workers would go back to the last call of either; "
            "call df.survive once."
        )
    memory = getattr(state, "memory", None)
    if getattr(memory, "needs_all_workers", False):
        raise ValueError(
            f"survive(step): the state's memory, a {type(memory).__name__}, depends on the number of workers and on who they are; "
            "restart from a checkpoint (docs/restarts.md), or use another algorithm."
        )


def _whole(here: World, step: Callable[..., tuple[Any, Any]], now: _Inputs) -> tuple[Any, Any]:
    """Take a step, which ends when all workers have begun it."""
    if here.steps.cut_short is not None:  # by a call outside steps
        raise PeerLost(f"{here.steps.cut_short[0]}: {here.steps.cut_short[1]}", process=here.rank, step=now.t)
    begun = None
    try:
        if here.group is not None:
            begun = here.group.allreduce([torch.zeros(1)])
    except RuntimeError as error:
        raise _not_begun(here, now.t, error) from error
    result = step(now.state, now.batch, now.t)
    try:
        if begun is not None:
            begun.wait()
    except RuntimeError as error:
        raise _not_begun(here, now.t, error) from error
    return result


def _not_begun(here: World, t: int, error: RuntimeError) -> PeerLost:
    return PeerLost(
        f"step t={t} on worker {here.rank}: not all workers have begun it: {brief_error(error)}",
        process=here.rank,
        step=t,
    )


def _kept(state: Any) -> Any:
    """Return the state of a worker that continues with fewer others. Collective."""
    if not isinstance(state, State):
        return state
    x = _mean(state.params) if state.params.plan.starts_equal else state.params
    return state._replace(params=x, memory=kept(state.memory, x, _mean))


def _mean(x: Buckets) -> Buckets:
    """Average over all workers in float64, and round once."""

    def one(b: Tensor) -> Tensor:
        rows = b.double().view(-1, b.shape[-1])
        return collectives.process_mean(rows.mean(0)).to(b.dtype).expand_as(b).clone()

    return each(one, x)


def _notes(told: bytes) -> list[Note]:
    return [Note(seat, step, tuple(reaches)) for seat, step, reaches in map(json.loads, told.decode().splitlines())]


def _decision(told: bytes) -> Decision:
    seats, step = json.loads(told)
    return Decision(tuple(seats), step)
