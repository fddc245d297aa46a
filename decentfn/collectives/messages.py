"""In-flight messages. A lost message does not abort the step: the worker's own payload replaces it.

The state is then complete when the step is done, and `whole_step` raises.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from decentfn.collectives.membership import World, gathered, has_cpu_side
from decentfn.collectives.reports import different_steps, has_timed_out, report
from decentfn.collectives.steps import Call, Loss
from decentfn.errors import StepMismatch
from decentfn.scalars import integer
from decentfn.torch_private.profiler import span

_PATIENCE = timedelta(seconds=1)
"""How long each remaining message of a step that lost one is waited for: its connection is closed, so it has come or never will."""


class Part(NamedTuple):
    """A message from or to another process."""

    tensor: Tensor
    """What is sent, or where it is received."""
    own: Tensor | None
    """What replaces a lost message; None where it is sent."""
    rank: int = -1
    """The other end; -1 where that is a group."""
    slot: int | None = None


class Flight:
    """What one call of an operator has in flight."""

    __slots__ = ("call", "here", "inbox", "parts", "works")

    def __init__(self, here: World, call: Call, inbox: Tensor, parts: list[Part]) -> None:
        self.here, self.call, self.inbox, self.parts = here, call, inbox, parts
        self.works: list[Any] = []

    def land(self) -> bool:
        """Wait for all of it and return whether it arrived; if not, each message is this worker's own payload.

        Raises:
            RunError: it did not arrive, and no step runs that could be finished first.
        """
        since = time.perf_counter()
        with span("wait", self.call.what, self.call.index):
            one_by_one = len(self.works) == len(self.parts)  # else the backend has put them together
            for index, work in enumerate(self.works):
                try:
                    if self.here.steps.lost is None:
                        work.wait()
                    else:
                        work.wait(_PATIENCE)
                except RuntimeError as error:
                    self.lose(error, self.parts[index] if one_by_one else None)
        waited = time.perf_counter() - since
        for counted in self.here.counters:
            counted.seconds_waited += waited
        if self.call.lost is None:
            self.call.arrived = time.time()
            return True
        self.substitute()
        return False

    def lose(self, error: RuntimeError, part: Part | None) -> None:
        """Note that a message of this call was lost."""
        where = (None, None) if part is None or part.rank < 0 else (part.rank, part.slot)
        lose(self.here, Loss(self.call, error, *where))

    def cancel(self) -> None:
        """Send nothing, since the connections are closed."""
        self.call.lost = "not sent, because an earlier message was lost"
        self.substitute()

    def substitute(self) -> None:
        """Put the worker's own payload in the place of what was to arrive."""
        for part in self.parts:
            if part.own is not None:
                part.tensor.copy_(part.own)


in_flight: dict[int, Flight] = {}
"""The flights that nobody has waited for yet, by number."""
_numbers = itertools.count()


def begin(here: World, what: str, t: Tensor, local: int) -> Call:
    """Begin a call of an operator; where another rank made it at another step, all messages of this step are lost.

    Raises:
        RunError: an earlier one has failed, or another rank is at another step, and no step runs.
    """
    if here.steps.lost is not None and not here.steps.is_inside:
        raise report(here, here.steps.lost)
    call, different = here.steps.call(what, t, local)
    if different is not None:
        rank, step = different
        lose(here, Loss(call, different_steps(here, call, call.step, rank, step), rank))
    return call


def lose(here: World, loss: Loss) -> None:
    """Note a loss. The first one ends the exchanges of this process: it tells the others, and closes its connections."""
    loss.call.lost = str(loss.error)
    if here.steps.lost is None:
        here.steps.lost = loss
        here.steps.tell(loss.peer, timed_out=has_timed_out(loss.error))
        here.hang_up()
    if not here.steps.is_inside:
        named = report(here, here.steps.lost)
        here.steps.cut_short = f"step t={loss.call.step}", named
        raise named from loss.error


def take_off(flight: Flight) -> Tensor:
    """Keep the flight until `land`; return its number, 0-d int64 on the CPU."""
    number = next(_numbers)
    in_flight[number] = flight
    return integer(number)


def land(number: Tensor) -> Tensor:
    """Wait for a flight and return its inbox."""
    flight = in_flight.pop(int(number))
    flight.land()
    return flight.inbox


def post(here: World, call: Call, inbox: Tensor, receives: list[Part], sends: list[Part]) -> Tensor:
    """Start to receive and to send; return the flight's number."""
    flight = Flight(here, call, inbox, receives + sends)
    if flight.parts:
        if here.steps.lost is not None:
            flight.cancel()
        else:
            with span("post", call.what, call.index):
                _ask(flight)
            for counted in here.counters:
                counted.messages += len(sends)
                counted.bytes_sent += sum(part.tensor.nbytes for part in sends)
                counted.bytes_received += sum(part.tensor.nbytes for part in receives)
    return take_off(flight)


def _ask(flight: Flight) -> None:
    """Ask the backend for all parts. Receives come first: with sends first a link takes twice as long."""
    group, tag = flight.here.group, flight.here.steps.tag
    assert group is not None
    index = 0
    try:
        if flight.parts[0].tensor.device.type == "cpu":
            for index, (x, own, rank, _) in enumerate(flight.parts):  # noqa: B007
                flight.works.append((group.send if own is None else group.recv)([x], rank, tag))  # pyright: ignore
        else:  # NCCL takes all messages of a call together
            flight.works += dist.batch_isend_irecv([_operation(part, group, tag) for part in flight.parts])
    except RuntimeError as error:
        flight.lose(error, flight.parts[index])


def _operation(part: Part, group: Any, tag: int) -> dist.P2POp:
    x, own, rank, _ = part
    return dist.P2POp(dist.isend if own is None else dist.irecv, x, group=group, tag=tag, group_peer=rank)


def reduce(here: World, call: Call, x: Tensor, own: Tensor | None, ranks: list[int]) -> Flight:
    """Start to add `x` up over the group; `own` replaces the sum if it is lost."""
    others = [rank for rank in ranks if rank != here.rank]
    flight = Flight(here, call, x, [Part(x, own, others[0] if len(others) == 1 else -1)])
    if others and x.numel():
        group = here.subgroup(tuple(ranks))
        if here.steps.lost is not None:
            flight.cancel()
            return flight
        different = None
        try:
            with span("post", call.what, call.index):
                different = _different(here, group, ranks, call, x)
                if different is None:
                    flight.works.append(group.allreduce([x]))
        except RuntimeError as error:
            flight.lose(error, flight.parts[0])
            flight.substitute()
        else:
            if different is not None:
                lose(here, Loss(call, different, different.peer))
                flight.cancel()
                return flight
            share = round(2 * len(others) / len(ranks) * x.nbytes)
            for counted in here.counters:
                counted.bytes_sent += share
                counted.bytes_received += share
    return flight


def _different(here: World, group: Any, ranks: Sequence[int], call: Call, x: Tensor) -> StepMismatch | None:
    """Wait until all ranks of a group are in a step, once in each; return the error if they are in different ones.

    A sum has no tag, and one that is larger elsewhere aborts the process.
    """
    if not here.steps.meets(group) or not has_cpu_side(group, x):
        return None
    mine = [call.step, call.number, x.nbytes]
    for rank, theirs in zip(ranks, gathered(group, len(ranks), mine), strict=True):
        if theirs != mine:
            return different_steps(here, call, call.step, rank, *theirs)
    return None
