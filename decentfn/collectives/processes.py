"""What the processes do together outside a step: gather, broadcast, begin to compare their steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from decentfn.collectives.membership import World, everyone, world
from decentfn.collectives.reports import has_timed_out
from decentfn.errors import ExchangeTimeout, PeerLost
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
    assert here.group is not None
    with naming(here, "a mean over all processes"):
        here.group.allreduce([mean]).wait()
    return mean


def process_broadcast(x: Tensor, among: World | None = None) -> Tensor:
    """Process 0's `x`, bit for bit, a copy; arguments as of `process_mean`. Not for use inside a step."""
    here = among or world()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if here.size > 1 and copy.numel():
        assert here.group is not None
        # As bytes, since not every backend knows every dtype; a view, so it arrives in `copy`.
        with naming(here, "a broadcast from process 0"):
            here.group.broadcast(copy.view(-1).view(torch.uint8), 0).wait()
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
    assert here.group is not None
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(here.size)]
    with naming(here, "gathering from all processes"):
        here.group.allgather([sizes], [torch.tensor([told.numel()])]).wait()
        padded = told.new_zeros(int(max(sizes)))
        padded[: told.numel()] = told
        heard = [torch.empty_like(padded) for _ in range(here.size)]
        here.group.allgather([heard], [padded]).wait()
    return [h[: int(n)] for h, n in zip(heard, sizes, strict=True)]


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
    return gather_objects(told, everyone()), own


@contextmanager
def naming(here: World, what: str) -> Iterator[None]:
    """Within, what PyTorch raises becomes this library's error, which says what failed."""
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
            f"{what} failed on process {here.whole.rank}; {why}: {error}", process=here.whole.rank
        ) from error
