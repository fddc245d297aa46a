"""Time: the clock of a run on given workers and links, and traces of workers on their own clocks."""

from decentfn.timing.clock import Clock, Exchange, Timeline, clock
from decentfn.timing.cluster import Cluster, Link, Links
from decentfn.timing.replay import LEAST_MASS, Offered, Replay, filled_up, shares_of
from decentfn.timing.trace import Trace, schedule_name

__all__ = [
    "LEAST_MASS",
    "Clock",
    "Cluster",
    "Exchange",
    "Link",
    "Links",
    "Offered",
    "Replay",
    "Timeline",
    "Trace",
    "clock",
    "filled_up",
    "schedule_name",
    "shares_of",
]
