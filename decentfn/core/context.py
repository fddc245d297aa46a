"""Thread-local context, set by an enclosing `with` and read where an argument would have to pass through user code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Context(threading.local):
    def __init__(self) -> None:
        # Set here, and not in the class: torch.compile guards the fields in every thread that runs what it compiled.
        self.world: Any = None  # the world of the operators (`collectives.use`)
        self.step_world: Any = None  # of the running step (`collectives.whole_step`)
        self.inputs: Any = None  # memory of the step that is being recorded (`scalars.of_step`)
        self.arrivals: Any = None  # what each worker takes and sends in the running simulated step (`timing.Replay`)
        self.resting: tuple[Any, ...] = ()  # schedules without a round in the running step (`collectives.resting`)
        self.call: tuple[str, bool] | None = None  # the user's call outside steps (`collectives.calling`)
        self.seed: int | None = None  # torch's seed outside `draws.torch_draws`
        self.generators: tuple[Any, ...] = ()  # restored by the outer `draws.torch_draws`
        self.donating: list[bool] | None = (
            None  # in an eager, donated step: not empty once its optimizer has overwritten
        )
        self.overwriting: list[bool] | None = None  # the same, while the optimizer may (`buckets.into`)
        self.outside: Any = None  # the running step's values outside the graph (`gradient.side_channel`)
        self.dispatching: Any = None  # state of PyTorch's dispatcher at that step's call
        self.evaluates = False  # a metric runs, with modules in eval mode (`df.evaluate`)
        # The number of simulated workers, and of those in a chunk (`stacking.over_workers`).
        self.chunks: tuple[int, int] | None = None
        # Appended to and never assigned: torch.compile loses an assignment to an attribute when it traces a loop.
        self.hostile: list[Any] = []  # what hostile workers send, the innermost last (`decentfn.testing.hostile`)
        self.runs: list[Any] = []  # number, 0-d int64, and count of the runs of a sweep (`df.sweep`)
        self.used: list[Any] = []  # what leaves have a gradient, while an optimizer updates (`Gradient.used`)
        self.guarded: list[Any] = []  # notes of the guarded steps, the innermost last (`gossip.guarded`)

    @contextmanager
    def having(self, **fields: Any) -> Iterator[None]:
        """Context in which these fields have these values; not for traced code."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)


context = _Context()
"""The context of this thread."""
