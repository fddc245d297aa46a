"""What ends a run, by name, with the place where it happened: `except df.errors.PeerLost as lost: ... lost.peer`."""

from __future__ import annotations

__all__ = [
    "CallMismatch",
    "CheckpointCorrupt",
    "ExchangeTimeout",
    "NonFinite",
    "PeerLost",
    "PlanMismatch",
    "ReplicaMismatch",
    "RunError",
    "StepMismatch",
]


class RunError(Exception):
    """What all errors of a run have in common: where it happened. None is what does not apply, or is not known.

    Args:
        message: a sentence that says the same in words.
        worker: the number of the worker that raised; the first one of several that are simulated in a process.
        process: the rank of its process.
        step: the step `t`.
        peer: the rank of the other process.
        next_step: the step to be taken next with the state that was passed to the step that raised, which is whole: `step`
            where it was left as it was, `step + 1` where the step (donated) has written over it.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        process: int | None = None,
        step: int | None = None,
        peer: int | None = None,
        next_step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.worker, self.process, self.step, self.peer = worker, process, step, peer
        self.next_step = next_step


class PlanMismatch(RunError, ValueError):
    """Processes are about to train different things; `peer` is the first that differs from process 0."""


class ReplicaMismatch(RunError, ValueError):
    """Replicas that should be equal are not; `peer` is the process of the first that differs from most."""


class StepMismatch(RunError, RuntimeError):
    """Processes have called the step with different `t`; `peer` is one that has another."""


class CallMismatch(RunError, RuntimeError):
    """Processes have called different functions together, outside steps; nothing was sent. `peer` is one that differs."""


class PeerLost(RunError, RuntimeError):
    """The connection to another process was lost while messages were on their way: it died, or ended early."""


class ExchangeTimeout(RunError, RuntimeError):
    """A message did not come within the timeout of `df.init`, though the connection stands."""


class NonFinite(RunError, RuntimeError):
    """A value is infinite or not a number."""


class CheckpointCorrupt(RunError, ValueError):
    """A checkpoint is not what was written: a file is missing, cut short or changed."""
