"""What the workers say to each other: the operators, their two interpreters, and how they are compiled."""

from decentfn.collectives.counters import Communication, communication
from decentfn.collectives.interruption import cut_short, whole_step
from decentfn.collectives.membership import World, adopt_default_group, leave_default_group, use, world
from decentfn.collectives.operators import exchange, group_mean, make_groups, wait, worker_index
from decentfn.collectives.processes import (
    compare_steps,
    fresh_board,
    gather_bytes,
    gather_objects,
    process_broadcast,
    process_mean,
)

__all__ = [
    "Communication",
    "World",
    "adopt_default_group",
    "communication",
    "compare_steps",
    "cut_short",
    "exchange",
    "fresh_board",
    "gather_bytes",
    "gather_objects",
    "group_mean",
    "leave_default_group",
    "make_groups",
    "process_broadcast",
    "process_mean",
    "use",
    "wait",
    "whole_step",
    "worker_index",
    "world",
]
