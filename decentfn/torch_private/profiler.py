"""Ranges that torch.profiler shows."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.profiler import record_function

is_profiled = getattr(torch.autograd, "_profiler_enabled", bool)
"""Whether a profiler runs in this thread; 30 ns, and no call of Python."""

nothing = nullcontext()
"""What stands in the place of a span where none does."""


def span(*words: object) -> record_function:
    """A range of this library's: `with span("wait", 2) if is_profiled() else nothing:`."""
    return record_function("decentfn::" + " ".join(map(str, words)))
