"""Profiling of steps: communication counters, and their comparison with a plan.

`torch.profiler` shows this library's ranges (`docs/profiling.md` lists them), which cost nothing without a profiler.
"""

from __future__ import annotations

from decentfn.comm.collectives import Communication, Traffic, communication
from decentfn.core.arguments import at_least, checks_numbers
from decentfn.planning import Prediction

__all__ = ["Communication", "Traffic", "communication", "compare"]


@checks_numbers
def compare(planned: Prediction, counted: Communication, *, steps: int, seconds: float) -> str:
    """Return a table of a plan beside what a process measured in this many steps and seconds, per step.

    The plan's bytes between nodes are those of a whole node, in its busier direction; of several processes, add their counts.

    >>> import decentfn as df
    >>> four = df.planning.Cluster(4, df.planning.Link(gbit_per_s=1))
    >>> planned = df.plan(four, 10_000_000, compute_seconds=0.1).recommended
    >>> counted = df.profiling.Communication()  # of `with df.profiling.communication() as counted`
    >>> print(df.profiling.compare(planned, counted, steps=10, seconds=3.6))
    per step          planned  measured
    step ms             344.3       360
    of it waiting ms        -         0
    MB between nodes       40         0
    MB inside nodes         0         0
    """
    at_least("compare", "steps", steps, 1)
    busier = [max(c.bytes_sent, c.bytes_received) for c in (counted.between, counted.inside, counted.within_worker)]
    rows = {
        "step ms": (f"{planned.seconds * 1e3:.4g}", seconds * 1e3),
        "of it waiting ms": ("-", counted.seconds_waited * 1e3),
        "MB between nodes": (f"{planned.between / 1e6:.4g}", busier[0] / 1e6),
        "MB inside nodes": (f"{planned.inside / 1e6:.4g}", (busier[1] + busier[2]) / 1e6),
    }
    lines = [f"{name:16} {of_plan:>8} {of_run / steps:9.4g}" for name, (of_plan, of_run) in rows.items()]
    return "\n".join([f"{'per step':16} {'planned':>8} {'measured':>9}", *lines])
