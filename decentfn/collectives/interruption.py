"""A step that is cut short leaves nothing in flight, and no other step follows it unaware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from decentfn.collectives.membership import World, world
from decentfn.collectives.operators import in_flight

_PATIENCE_S = 5.0
"""How long the messages of a step that was cut short are waited for, all together."""

_abandoned: list[Any] = []
"""What may still be written to."""


@contextmanager
def whole_step(t: int | Tensor) -> Iterator[None]:
    """A step at `t`: where it raises after it has posted, its messages are waited for, and the next step is refused.

    The other ranks have taken this step, or wait for its messages; what this rank would post next, they would take for
    something else.
    """
    here = world()
    if here.size == 1:
        yield
        return
    here.steps.require_whole()
    before = here.steps.calls
    try:
        yield
    except BaseException as error:
        if here.steps.calls != before:
            _drain(here)
            here.steps.cut_short = (int(t), error)
        raise


def _drain(here: World) -> None:
    end = time.monotonic() + _PATIENCE_S
    for address, (works, call, _) in list(in_flight.items()):
        if call.steps is not here.steps:
            continue
        posted = in_flight.pop(address)
        try:
            for work in works:
                work.wait(timedelta(seconds=max(0.01, end - time.monotonic())))
        except RuntimeError:
            _abandoned.append(posted)
