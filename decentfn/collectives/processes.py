"""What the processes do together outside a step: gather, broadcast, begin to compare their steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from decentfn.collectives.membership import World, world
from decentfn.collectives.reports import has_timed_out
from decentfn.errors import ExchangeTimeout, PeerLost


def compare_steps() -> None:
    """From here on compare `t` over the ranks in some of the operators' calls; collective."""
    here = world()
    if here.size > 1:
        here.steps.begin(fresh_board())


def fresh_board() -> PrefixStore:
    """A part of the store on which nothing is written yet, the same for all of several processes; collective."""
    return PrefixStore(f"decentfn {gather_objects(uuid4().hex)[0]}", world().store)


def process_mean(x: Tensor) -> Tensor:
    """The mean of `x` over all processes, at once; `x` itself in one process. Not for use inside a step."""
    here = world()
    if here.size == 1:
        return x
    mean = (x / here.size).contiguous()
    assert here.group is not None
    with _named(here, "a mean over all processes"):
        here.group.allreduce([mean]).wait()
    return mean


def process_broadcast(x: Tensor) -> Tensor:
    """Process 0's `x`, bit for bit, a copy; shapes and dtypes must agree. Not for use inside a step."""
    here = world()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if here.size > 1 and copy.numel():
        assert here.group is not None
        # As bytes, since not every backend knows every dtype; a view, so it arrives in `copy`.
        with _named(here, "a broadcast from process 0"):
            here.group.broadcast(copy.view(-1).view(torch.uint8), 0).wait()
    return copy


def gather_objects(value: object) -> list[Any]:
    """What every process passed, by rank, as JSON gives it back (tuples as lists). Not for use inside a step."""
    told = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(heard.numpy().tobytes()) for heard in gather_bytes(told)]


def gather_bytes(told: Tensor) -> list[Tensor]:
    """What every process passed, by rank: uint8 vectors on the CPU, of any lengths. Not for use inside a step."""
    here = world()
    if here.size == 1:
        return [told]
    assert here.group is not None
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(here.size)]
    with _named(here, "gathering from all processes"):
        here.group.allgather([sizes], [torch.tensor([told.numel()])]).wait()
        padded = told.new_zeros(int(max(sizes)))
        padded[: told.numel()] = told
        heard = [torch.empty_like(padded) for _ in range(here.size)]
        here.group.allgather([heard], [padded]).wait()
    return [h[: int(n)] for h, n in zip(heard, sizes, strict=True)]


@contextmanager
def _named(here: World, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        timed_out = has_timed_out(error)
        why = (
            f"a process is later than the timeout of df.init ({here.timeout})"
            if timed_out
            else "a process has died, or has left"
        )
        raise (ExchangeTimeout if timed_out else PeerLost)(
            f"{what} failed on process {here.rank}; {why}: {error}", process=here.rank
        ) from error
