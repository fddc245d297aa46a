"""Collectives between workers and their processes: the world, the operators of a step, and calls outside steps."""

from decentfn.comm.collectives import within_worker
from decentfn.comm.collectives.channels import Channels
from decentfn.comm.collectives.hooks import FIXED, Hooks
from decentfn.comm.collectives.identity import Identity
from decentfn.comm.collectives.lookup import Row, look_up, members, on_device, refuse_size, resting, rests
from decentfn.comm.collectives.membership import (
    adopt_default_group,
    everyone,
    leave_default_group,
    processes_per_worker,
    require_messages_from,
    require_workers_of,
    split_workers,
    use,
    world,
)
from decentfn.comm.collectives.messages import Communication, communication, cut_short, whole_step
from decentfn.comm.collectives.operators import Flight, after, exchange, group_mean, make_groups, wait
from decentfn.comm.collectives.outside import (
    attempt,
    calling,
    compare_steps,
    gather_bytes,
    gather_objects,
    process_broadcast,
    process_mean,
)
from decentfn.comm.collectives.reports import is_lost
from decentfn.comm.collectives.session import Board, Session
from decentfn.comm.collectives.sharded import (
    is_sharded,
    leave,
    local,
    own_shards,
    placed_like,
    places,
    require_parts,
    require_unwrapped,
    sharded,
    unsharded,
)
from decentfn.comm.collectives.world import World, end_waits
