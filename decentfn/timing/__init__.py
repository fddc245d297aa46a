"""Workers on their own clocks: the trace of a run, by which the simulator replays it."""

from decentfn.timing.trace import Trace, schedule_name

__all__ = ["Trace", "schedule_name"]
