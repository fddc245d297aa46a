"""A step ends whole: with all of its messages, or with an error after which no other step follows it unaware."""

from __future__ import annotations

import time
from datetime import timedelta

from torch import Tensor
from torch.profiler import record_function

from decentfn.comm.collectives.membership import World, world
from decentfn.comm.collectives.reports import report
from decentfn.comm.collectives.steps import Call
from decentfn.core.context import context

_PATIENCE_S = 5.0
"""How long the messages of a step that was cut short are waited for, all together."""

_abandoned: list[Call] = []
"""What may still be written to."""


class whole_step:
    """A step at `t`. Where a message was lost, raises when the step is done; where the step raises, its messages are waited for.

    In both cases the next step is refused: the other ranks have taken this one, or wait for its messages; what this rank
    would post next, they would take for something else.

    `with` gives the world in which it runs.

    Args:
        t: the step.
        donated: whether it writes over the state that it is given.
    """

    __slots__ = ("_donated", "_here", "_outer", "_range", "_t")

    def __init__(self, t: int | Tensor, *, donated: bool = False) -> None:
        self._t, self._donated = int(t), donated

    def __enter__(self) -> World:
        self._here = here = world()
        if here.size * here.processes_per_worker > 1:
            here.steps.enter(self._t)
        self._outer, context.step = context.step, here
        self._range = record_function(f"decentfn::step {self._t}")
        self._range.__enter__()
        return here

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._range.__exit__(kind, error, traceback)
        here, steps, context.step = self._here, self._here.steps, self._outer
        steps.is_inside = False
        if here.size == 1:
            return
        if steps.in_flight:  # of this step what nobody has waited for; all, where it raised after it had posted
            if error is None:
                _drain(here, steps.before)
            elif steps.calls != steps.before:
                _drain(here, 0)
        if error is not None:
            if steps.calls != steps.before:
                steps.cut_short = f"step t={self._t}", error
        elif steps.lost is not None:
            named = report(here, steps.lost, self._t + self._donated)
            steps.cut_short = f"step t={self._t}", named
            raise named from steps.lost.error


def cut_short(t: int, error: BaseException) -> None:
    """Let no step follow that at `t`, which raises `error` after its messages are sent; alone, any may."""
    here = world()
    if here.size > 1:
        here.steps.cut_short = f"step t={t}", error


def _drain(here: World, since: int) -> None:
    """Let this world's calls land, those after the first `since`."""
    end, in_flight = time.monotonic() + _PATIENCE_S, here.steps.in_flight
    for number in [number for number in in_flight if number > since]:
        call = in_flight.pop(number)
        try:
            for work in call.works:
                work.wait(timedelta(seconds=max(0.01, end - time.monotonic())))
            call.inbox, call.parts, call.works = None, (), []
        except RuntimeError:
            _abandoned.append(call)
