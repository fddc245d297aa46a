"""What the workers say to each other: the operators, their two interpreters, and how they are compiled."""

from decentfn.collectives.lowering import compile_options
from decentfn.collectives.operators import exchange, group_mean, make_groups, wait, worker_index
from decentfn.collectives.world import World, use, world

__all__ = [
    "World",
    "compile_options",
    "exchange",
    "group_mean",
    "make_groups",
    "use",
    "wait",
    "worker_index",
    "world",
]
