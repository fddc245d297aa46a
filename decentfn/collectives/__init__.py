"""What the workers say to each other: the operators, their two interpreters, and how they are compiled."""

from decentfn.collectives.counters import Communication, communication
from decentfn.collectives.interruption import cut_short, whole_step
from decentfn.collectives.membership import (
    World,
    adopt_default_group,
    everyone,
    leave_default_group,
    processes_per_worker,
    split_workers,
    use,
    world,
)
from decentfn.collectives.operators import exchange, group_mean, make_groups, wait, worker_index
from decentfn.collectives.processes import (
    compare_steps,
    fresh_board,
    gather_bytes,
    gather_objects,
    mean_inside,
    process_broadcast,
    process_mean,
)
from decentfn.collectives.sharded import cut, is_sharded, local, own_shards, places, require_shards, whole

__all__ = [
    "Communication",
    "World",
    "adopt_default_group",
    "communication",
    "compare_steps",
    "cut",
    "cut_short",
    "everyone",
    "exchange",
    "fresh_board",
    "gather_bytes",
    "gather_objects",
    "group_mean",
    "is_sharded",
    "leave_default_group",
    "local",
    "make_groups",
    "mean_inside",
    "own_shards",
    "places",
    "process_broadcast",
    "process_mean",
    "processes_per_worker",
    "require_shards",
    "split_workers",
    "use",
    "wait",
    "whole",
    "whole_step",
    "worker_index",
    "world",
]
