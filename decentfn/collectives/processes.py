"""What the processes do together outside a step: gather, broadcast, begin to compare their steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from decentfn.collectives.membership import World, everyone, world
from decentfn.collectives.outside import calling, met
from decentfn.words import brief_error


def compare_steps() -> None:
    """From here on compare `t` over the ranks in some of the operators' calls; collective."""
    here = world()
    if here.size > 1:
        here.steps.begin(fresh_board())


def fresh_board(among: World | None = None) -> PrefixStore:
    """A part of the store on which nothing is written yet, the same for all of several processes; collective.

    Args:
        among: whose it is; None: gossip's.
    """
    here = among or world()
    with calling("a new board"):
        return PrefixStore(f"decentfn {gather_objects(uuid4().hex, here)[0]}", here.store)


def process_mean(x: Tensor, among: World | None = None) -> Tensor:
    """The mean of `x` over all processes, at once; `x` itself in one process. Not for use inside a step.

    Args:
        x: of the same shape and dtype on all.
        among: the processes; None: gossip's.
    """
    here = among or world()
    if here.size == 1:
        return x
    mean = (x / here.size).contiguous()
    with met(here, "a mean", mean) as (group, _):
        group.allreduce([mean]).wait()
    return mean


def process_broadcast(x: Tensor, among: World | None = None) -> Tensor:
    """Process 0's `x`, bit for bit, a copy; arguments as of `process_mean`. Not for use inside a step."""
    here = among or world()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if here.size > 1:
        with met(here, "a broadcast", copy) as (group, _):
            if copy.numel():
                # As bytes, since not every backend knows every dtype; a view, so it arrives in `copy`.
                group.broadcast(copy.view(-1).view(torch.uint8), 0).wait()
    return copy


def gather_objects(value: object, among: World | None = None) -> list[Any]:
    """What every process passed, by rank, as JSON gives it back (tuples as lists). Not for use inside a step.

    Args:
        value: what JSON holds.
        among: the processes; None: gossip's.
    """
    told = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(heard.numpy().tobytes()) for heard in gather_bytes(told, among)]


def gather_bytes(told: Tensor, among: World | None = None) -> list[Tensor]:
    """What every process passed, by rank: uint8 vectors on the CPU, of any lengths. Not for use inside a step."""
    here = among or world()
    if here.size == 1:
        return [told]
    with met(here, "a gathering", told.numel()) as (group, sizes):
        padded = told.new_zeros(max(sizes))
        padded[: told.numel()] = told
        heard = [torch.empty_like(padded) for _ in range(here.size)]
        group.allgather([heard], [padded]).wait()
    return [h[:n] for h, n in zip(heard, sizes, strict=True)]


def attempt(call: str, function: Callable[..., Any], *arguments: Any) -> tuple[list[dict[str, Any]], Exception | None]:
    """`function(*arguments)` on every process, and what became of it, so that nobody waits for one that fails. Collective.

    Returns:
        By rank its `call`, and the `value` as JSON gives it back, or the `error`'s text, `brief` with its type, and the `kinds` of
        error that it is; then this process's own error.
    """
    told: dict[str, Any] = {"call": call}
    own = None
    try:
        told["value"] = function(*arguments)
    except Exception as error:
        own = error
        kinds = [kind.__name__ for kind in type(error).__mro__]
        told |= {"error": str(error), "brief": brief_error(error), "kinds": kinds}
    with calling(call):
        return gather_objects(told, everyone()), own
