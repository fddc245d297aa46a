"""Profiling of steps: communication counters.

`torch.profiler` shows this library's ranges (`docs/profiling.md` lists them), which cost nothing without a profiler.
"""

from decentfn.comm.collectives import Communication, communication

__all__ = ["Communication", "communication"]
