"""A step ends whole: with all of its messages, or with an error after which no other step follows it unaware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from decentfn.collectives.membership import World, world
from decentfn.collectives.messages import in_flight
from decentfn.collectives.reports import report
from decentfn.torch_private.profiler import is_profiled, nothing, span

_PATIENCE_S = 5.0
"""How long the messages of a step that was cut short are waited for, all together."""

_abandoned: list[Any] = []
"""What may still be written to."""


@contextmanager
def whole_step(t: int | Tensor, *, donated: bool = False) -> Iterator[None]:
    """A step at `t`. Where a message was lost, raises when the step is done; where the step raises, its messages are waited for.

    In both cases the next step is refused: the other ranks have taken this one, or wait for its messages; what this rank
    would post next, they would take for something else.

    Args:
        t: the step.
        donated: whether it writes over the state that it is given.
    """
    here = world()
    range_of_step = span("step", int(t)) if is_profiled() else nothing
    if here.size == 1:
        with range_of_step:
            yield
        return
    steps = here.steps
    steps.enter(int(t))
    try:
        with range_of_step:
            yield
    except BaseException as error:
        if steps.has_posted:
            _drain(here)
            steps.cut_short = (int(t), error)
        raise
    finally:
        steps.is_inside = False
    if steps.lost is not None:
        error = report(here, steps.lost, int(t) + donated)
        steps.cut_short = (int(t), error)
        raise error from steps.lost.error


def cut_short(t: int, error: BaseException) -> None:
    """Let no step follow that at `t`, which raises `error` after its messages are sent; alone, any may."""
    here = world()
    if here.size > 1:
        here.steps.cut_short = (t, error)


def _drain(here: World) -> None:
    end = time.monotonic() + _PATIENCE_S
    for address, flight in list(in_flight.items()):
        if flight.here is not here:
            continue
        posted = in_flight.pop(address)
        try:
            for work in flight.works:
                work.wait(timedelta(seconds=max(0.01, end - time.monotonic())))
        except RuntimeError:
            _abandoned.append(posted)
