"""Allocations of PyTorch on the CPU."""

from collections.abc import Callable
from math import prod

from torch.profiler import ProfilerActivity, profile


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
