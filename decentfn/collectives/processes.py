"""What the processes do together outside a step: gather, broadcast, begin to compare their steps."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from decentfn.collectives.world import world


def compare_steps() -> None:
    """From here on compare `t` over the ranks in some of the operators' calls; collective."""
    here = world()
    if here.size > 1:
        assert here.group is not None
        # A name of its own each time: what an earlier run left in the store must not be read.
        name = gather_objects(uuid4().hex)[0]
        store = here.group.get_group_store()
        here.steps.begin(dist.PrefixStore(f"decentfn {name}", store))  # pyright: ignore


def process_mean(x: Tensor) -> Tensor:
    """The mean of `x` over all processes, at once; `x` itself in one process. Not for use inside a step."""
    here = world()
    if here.size == 1:
        return x
    mean = (x / here.size).contiguous()
    assert here.group is not None
    here.group.allreduce([mean]).wait()
    return mean


def process_broadcast(x: Tensor) -> Tensor:
    """Process 0's `x`, bit for bit, a copy; shapes and dtypes must agree. Not for use inside a step."""
    here = world()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if here.size > 1 and copy.numel():
        assert here.group is not None
        # As bytes, since not every backend knows every dtype; a view, so it arrives in `copy`.
        here.group.broadcast(copy.view(-1).view(torch.uint8), 0).wait()
    return copy


def gather_objects(value: object) -> list[Any]:
    """What every process passed, by rank (pickled); `[value]` in one process. Not for use inside a step."""
    here = world()
    if here.size == 1:
        return [value]
    gathered: list[Any] = [None] * here.size
    dist.all_gather_object(gathered, value, group=here.group)
    return gathered
