"""What surrounds the code that a thread runs: set by a `with` further up, and read where an argument would pass through user code."""

from __future__ import annotations

import threading
from typing import Any


class _Context(threading.local):
    def __init__(self) -> None:
        # Set here, and not in the class: torch.compile guards the fields in every thread that runs what it compiled.
        self.world: Any = None  # whom the operators talk to (`collectives.use`)
        self.step: Any = None  # the world in which the step runs (`collectives.whole_step`)
        self.call: tuple[str, bool] | None = None  # the user's call outside steps (`collectives.calling`)
        self.seed: int | None = None  # torch's, outside of `draws.torch_draws`
        self.generators: tuple[Any, ...] = ()  # which the outer `draws.torch_draws` puts back
        self.chunks: tuple[int, int] | None = (
            None  # the simulation's workers, and how many at a time (`stacking.over_workers`)
        )
        # Added to and never set: torch.compile forgets what an attribute was set to where it traces a loop.
        self.guarded: list[Any] = []  # what the guarded steps have met, the innermost last (`gossip.guarded`)


context = _Context()
"""This thread's."""
