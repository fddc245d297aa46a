"""What a call costs, counted: allocations of PyTorch on the CPU, elements written, calls of Python functions."""

import gc
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import decentfn


def peak_of(function: Callable[[], object]) -> int:
    """Bytes that are allocated at most at one time while `function` runs, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    now = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def elements_of(function: Callable[[], object], *names: str) -> int:
    """Elements that these operators of PyTorch write while `function` runs, such as "aten::copy_", by every operator inside."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        function()
    events = [event for event in profiled.events() if event.name in names]
    return sum(prod(shape) for event in events for shape in event.input_shapes[:1])


def calls_of(function: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Names of the Python functions that are called while `function` runs: the library's, and all."""
    own, calls, library = list[str](), list[str](), str(Path(decentfn.__file__).parent)

    def note(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code.co_name)
            if frame.f_code.co_filename.startswith(library):
                own.append(frame.f_code.co_name)

    gc.collect()
    gc.disable()  # or what it finalizes would be counted
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return own, calls
