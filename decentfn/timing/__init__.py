"""Time: the clock of a run on given workers and links, and traces of workers on their own clocks."""

from decentfn.timing.clock import Clock, Exchange, Timeline, clock
from decentfn.timing.cluster import Cluster, Link, Links
from decentfn.timing.trace import Trace, schedule_name

__all__ = ["Clock", "Cluster", "Exchange", "Link", "Links", "Timeline", "Trace", "clock", "schedule_name"]
