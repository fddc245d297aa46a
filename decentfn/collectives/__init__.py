"""What the workers say to each other: the operators, their two interpreters, and how they are compiled."""

from decentfn.collectives.operators import (
    exchange,
    gather_objects,
    group_mean,
    make_groups,
    process_broadcast,
    process_mean,
    wait,
    worker_index,
)
from decentfn.collectives.world import World, adopt_default_group, leave_default_group, use, world

__all__ = [
    "World",
    "adopt_default_group",
    "exchange",
    "gather_objects",
    "group_mean",
    "leave_default_group",
    "make_groups",
    "process_broadcast",
    "process_mean",
    "use",
    "wait",
    "worker_index",
    "world",
]
