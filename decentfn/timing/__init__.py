"""Workers on their own clocks: the trace of a run, by which the simulator replays it."""

from decentfn.timing.replay import Offered, Replay, filled_up, shares_of
from decentfn.timing.trace import Trace, schedule_name

__all__ = ["Offered", "Replay", "Trace", "filled_up", "schedule_name", "shares_of"]
