"""Collectives between workers and their processes: the world, the operators of a step, and calls outside steps."""

from decentfn.comm.collectives.arrivals import Ring, addressed, offer, own_step, take, with_room, with_rows
from decentfn.comm.collectives.channels import Channels, close
from decentfn.comm.collectives.failures import is_peer_lost, outside_error
from decentfn.comm.collectives.identity import Identity
from decentfn.comm.collectives.lookup import Row, find_rounds, look_up, on_device, refuse_size, rests
from decentfn.comm.collectives.mailbox import LEAST, counts, open_mailbox, require_mail
from decentfn.comm.collectives.membership import (
    adopt_default_group,
    all_processes,
    kept_world,
    leave_default_group,
    processes_per_worker,
    replace_world,
    require_messages_from,
    require_workers_of,
    sends_outside_step,
    use,
    world,
)
from decentfn.comm.collectives.messages import Communication, Traffic, communication, cut_short, whole_step
from decentfn.comm.collectives.operators import Flight, after, exchange, group_mean, make_groups, wait
from decentfn.comm.collectives.outside import (
    calling,
    compare_steps,
    gather_bytes,
    gather_objects,
    met,
    process_broadcast,
    process_mean,
)
from decentfn.comm.collectives.session import Session
from decentfn.comm.collectives.world import Hooks, World
