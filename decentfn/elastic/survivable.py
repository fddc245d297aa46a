"""Checks of `df.survive`: what cannot go on without a worker is refused when the step is built, or at its first call."""

from __future__ import annotations

import logging
import os

from decentfn.comm.collectives import World
from decentfn.elastic.connections import require_recoverable
from decentfn.kit.step import Step
from decentfn.topologies.resized import in_place

_log = logging.getLogger("decentfn")


def warn_of_agent() -> None:
    """Log once per machine that torchrun ends all processes of an agent with the first that dies."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and local != "1" and os.environ.get("LOCAL_RANK") == "0":
        _log.warning(
            "survive(step): torchrun has started %s processes here, and ends them all with the first that dies; only processes of "
            "other agents would continue. Start one agent for each process (docs/surviving.md, Launching).",
            local,
        )


def require_kind(here: World) -> None:
    """Raise ValueError for workers or devices that cannot go on without others."""
    if here.processes_per_worker > 1:
        raise ValueError(
            f"survive(step): workers of {here.processes_per_worker} processes, of which one cannot go on without the others' shards; "
            "restart from a checkpoint (docs/restarts.md)."
        )
    if here.identity.size_at_start > 1 and here.device.type != "cpu":
        require_recoverable("survive(step)")


def require_schedule(here: World, step: Step) -> None:
    """Raise ValueError if the algorithm accepts no schedule without one of the processes."""
    if step.topology is None or here.identity.size_at_start == 1 or here.changes:
        return
    n = step.topology.num_workers
    try:
        in_place(step.topology, range(n - max(1, n // here.identity.size_at_start), n))
    except ValueError as error:
        raise ValueError(
            f"survive(step): the algorithm accepts no schedule in place of {step.topology!r} after a loss; restart from a checkpoint "
            "(docs/restarts.md), or use another algorithm."
        ) from error


def require_survivable(here: World) -> None:
    """Raise ValueError if another step of this run survives."""
    require_kind(here)
    if not here.loss_is_final:
        raise ValueError(
            "survive(step): another step of this run survives already, and the workers would go back to the last call of either; "
            "call df.survive once."
        )
