"""Errors that end a run, with the place where they happened: `except df.errors.PeerLost as lost: ... lost.peer`."""

from __future__ import annotations

__all__ = [
    "CallMismatch",
    "CheckpointCorrupt",
    "ExchangeTimeout",
    "LeftBehind",
    "NonFinite",
    "PeerLost",
    "PlanMismatch",
    "ReplicaMismatch",
    "RunError",
    "StepMismatch",
]


class RunError(Exception):
    """Base class of a run's errors, with the place of the error; None if unknown or not applicable.

    Args:
        message: the description.
        worker: the number of the worker that raised; the first of several simulated in one process.
        process: the rank of its process.
        step: the step `t`.
        peer: the rank of the other process.
        next_step: the step to take next with the state that was passed to the failed step: `step` if the state is
            unchanged, `step + 1` if a donated step has overwritten it. The state is complete in both cases.
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
    """Processes have built different plans; `peer` is the first that differs from process 0."""


class ReplicaMismatch(RunError, ValueError):
    """Replicas that should be equal differ; `peer` is the process of the first that differs from the majority."""


class StepMismatch(RunError, RuntimeError):
    """Processes have called the step with different `t`, in different orders, or with different layers; `peer` is one that differs."""


class CallMismatch(RunError, RuntimeError):
    """Processes have made different collective calls outside steps; nothing was sent. `peer` is one that differs."""


class PeerLost(RunError, RuntimeError):
    """The connection to another process was lost while messages were in flight: it died, or ended early."""


class ExchangeTimeout(RunError, RuntimeError):
    """A message did not arrive within the timeout of `df.init`, although the connection is open."""


class LeftBehind(RunError, RuntimeError):
    """The other workers continue without this one (`df.survive`): it was late, or not reached by most of them."""


class NonFinite(RunError, RuntimeError):
    """A value is infinite or not a number."""


class CheckpointCorrupt(RunError, ValueError):
    """A checkpoint is damaged: a file is missing, truncated or changed."""
