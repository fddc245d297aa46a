"""What the workers and their processes say to each other: the world, the operators of a step, and calls outside steps."""

from decentfn.comm.collectives import within_worker as within_worker
from decentfn.comm.collectives.counters import Communication, communication
from decentfn.comm.collectives.interruption import cut_short, whole_step
from decentfn.comm.collectives.lookup import Constant, Row, look_up, members, on_device, refuse_size
from decentfn.comm.collectives.membership import (
    World,
    adopt_default_group,
    everyone,
    leave_default_group,
    processes_per_worker,
    require_workers_of,
    split_workers,
    use,
    world,
)
from decentfn.comm.collectives.operators import Flight, after, exchange, group_mean, make_groups, wait
from decentfn.comm.collectives.outside import (
    attempt,
    calling,
    compare_steps,
    fresh_board,
    gather_bytes,
    gather_objects,
    process_broadcast,
    process_mean,
)
from decentfn.comm.collectives.reports import is_lost
from decentfn.comm.collectives.sharded import (
    cut,
    is_sharded,
    leave,
    local,
    own_shards,
    placed_like,
    places,
    require_parts,
    require_unwrapped,
    whole,
)

__all__ = [
    "Communication",
    "Constant",
    "Flight",
    "Row",
    "World",
    "adopt_default_group",
    "after",
    "attempt",
    "calling",
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
    "is_lost",
    "is_sharded",
    "leave",
    "leave_default_group",
    "local",
    "look_up",
    "make_groups",
    "members",
    "on_device",
    "own_shards",
    "places",
    "placed_like",
    "process_broadcast",
    "process_mean",
    "processes_per_worker",
    "refuse_size",
    "require_parts",
    "require_unwrapped",
    "require_workers_of",
    "split_workers",
    "use",
    "wait",
    "whole",
    "whole_step",
    "world",
]
