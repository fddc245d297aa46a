"""Hooks by which other rooms take part in a world's steps. A fixed group of processes has none."""

from __future__ import annotations

from typing import Any

from decentfn.topologies import Topology


class Hooks:
    """Calls of another room at some points of a world's steps; `World.become` sets them. By default they do nothing."""

    changes = 0  # number of times that the processes have changed
    failure_is_final = True  # True if no step can follow one that has lost a message

    def before_step(self, t: int) -> None:
        """Take part before step `t`, when earlier steps are whole."""

    def after_step(self, t: int) -> None:
        """Take part after step `t`, when all of its messages have arrived; may raise a RunError."""

    def before_call(self, call: str) -> None:
        """Take part before a collective outside steps; may raise a RunError, so that it does not wait for others."""

    def schedule(self, made: Topology) -> Topology:
        """Return the schedule that holds now, of the form of the one that a step was made for."""
        return made

    def on_failure(self, groups: list[Any]) -> None:
        """End what still uses these groups, whose connections this process has closed."""

    def wait_on_gpu(self, works: list[Any] | None) -> None:
        """Wait for works of a step that only the GPU waits for; None: for a collective outside steps."""
