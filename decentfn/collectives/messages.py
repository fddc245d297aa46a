"""What is on its way. A message that is lost inside a step ends no step: one's own payload takes its place, and the step goes on.

The state is then whole when the step is done, and `whole_step` raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from decentfn.collectives.membership import World, gathered, has_cpu_side
from decentfn.collectives.poster import Asked
from decentfn.collectives.reports import different_steps, has_timed_out, report
from decentfn.collectives.steps import Call, Loss
from decentfn.errors import StepMismatch
from decentfn.torch_private import lowering
from decentfn.torch_private.profiler import is_profiled, nothing, span

_sched_yield = getattr(os, "sched_yield", int)
_YIELDS = 5
"""How often a rank makes way after it posted, so that gloo's thread can tell the peers that they may send.

Where the ranks keep all cores busy, it would else come to that when the compute is over.
"""

_PATIENCE = timedelta(seconds=1)
"""So long each message that is left of a step which lost one is waited for: the connections are closed, so it has come or never will."""


class Part(NamedTuple):
    """A message from or to another process."""

    tensor: Tensor
    """What is sent, or where it is received."""
    own: Tensor | None
    """What is put in the place of a message that is lost; None where it is sent."""
    rank: int = -1
    """The other end; -1 where that is a group."""
    slot: int | None = None


class Flight:
    """What one call of an operator has on its way."""

    __slots__ = ("asked", "call", "here", "parts", "refused", "works")

    def __init__(self, here: World, call: Call, parts: list[Part]) -> None:
        self.here, self.call, self.parts = here, call, parts
        self.works: list[Any] = []
        self.asked: Asked | None = None
        """While the world's `poster` asks gloo for it."""
        self.refused: tuple[RuntimeError, Part | None] | None = None

    def ask(self, group: Any, tag: int, sends: int) -> None:
        """Ask the backend for all parts, of which the last so many are sends; what is received is first among `works`."""
        steps, on_cpu = self.here.steps, self.parts[0].tensor.device.type == "cpu"
        first = len(self.parts) - sends if on_cpu and self.here.sends_first else 0
        order, works = self.parts[first:] + self.parts[:first], self.works
        if steps.refused is None:  # else a message would arrive in the place of the one that was refused
            try:
                if on_cpu:
                    for x, own, rank, _ in order:
                        works.append((group.send if own is None else group.recv)([x], rank, tag))
                else:
                    works += dist.batch_isend_irecv([_operation(part, group, tag) for part in order])
            except RuntimeError as error:
                steps.refused = error, order[len(works)] if on_cpu else None
            self.works = works[len(order) - first :] + works[: len(order) - first]
        self.refused = steps.refused

    def settle(self) -> None:
        """Wait until gloo has been asked."""
        if self.asked is not None:
            self.asked.result()
            self.asked = None

    def land(self) -> bool:
        """Wait for all of it; whether it arrived. If not, each message is this worker's own payload.

        Raises:
            RunError: it did not arrive, and no step runs that could be finished first.
        """
        since = time.perf_counter()
        with span("wait", self.call.what, self.call.index) if is_profiled() else nothing:
            self.settle()
            if self.refused is not None:
                self.lose(*self.refused)
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
        """Put one's own payload in the place of what was to arrive."""
        for part in self.parts:
            if part.own is not None:
                part.tensor.copy_(part.own)


in_flight: dict[int, Flight] = {}
"""Address of a tensor that is being received -> what it waits for."""


def begin(here: World, what: str, t: Tensor, local: int) -> Call:
    """A call of an operator begins; where another rank made it at another step, all messages of this step are lost.

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


def post(here: World, call: Call, inbox: Tensor, receives: list[Part], sends: list[Part]) -> None:
    """Start to receive and to send."""
    if not receives and not sends:
        return
    flight, group, tag = Flight(here, call, receives + sends), here.group, here.steps.tag
    assert group is not None
    if here.steps.lost is not None:
        flight.cancel()
        return
    if inbox.device.type == "cpu" and not is_profiled():
        flight.asked = here.poster.submit(flight.ask, group, tag, len(sends))
    else:  # PyTorch shows what gloo does in this thread alone
        for earlier in list(in_flight.values()):
            if earlier.here is here:
                earlier.settle()
        with span("post", call.what, call.index) if is_profiled() else nothing:
            flight.ask(group, tag, len(sends))
    for counted in here.counters:
        counted.messages += len(sends)
        counted.bytes_sent += sum(part.tensor.nbytes for part in sends)
        counted.bytes_received += sum(part.tensor.nbytes for part in receives)
    track(inbox, flight)


def _operation(part: Part, group: Any, tag: int) -> dist.P2POp:
    """For NCCL, which takes all messages of a call together."""
    x, own, rank, _ = part
    return dist.P2POp(dist.isend if own is None else dist.irecv, x, group=group, tag=tag, group_peer=rank)


def reduce(here: World, call: Call, x: Tensor, own: Tensor | None, ranks: list[int]) -> Flight:
    """Start to add `x` up over the group; `own` is what takes the place of the sum where that is lost."""
    others = [rank for rank in ranks if rank != here.rank]
    flight = Flight(here, call, [Part(x, own, others[0] if len(others) == 1 else -1)])
    if others and x.numel():
        group = here.subgroup(tuple(ranks))
        if here.steps.lost is not None:
            flight.cancel()
            return flight
        different = None
        try:
            with span("post", call.what, call.index) if is_profiled() else nothing:
                different = _different(here, group, ranks, call, x)
                if different is None:
                    flight.works.append(group.allreduce([x]))
        except RuntimeError as error:
            flight.lose(error, flight.parts[0])
            flight.land()
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
    """Wait until all ranks of a group are in a step, once in each; the error where they are in different ones.

    A sum has no tag, and one that is larger elsewhere aborts the process.
    """
    if not here.steps.meets(group) or not has_cpu_side(group, x):
        return None
    mine = [call.step, call.number, x.nbytes]
    for rank, theirs in zip(ranks, gathered(group, len(ranks), mine), strict=True):
        if theirs != mine:
            return different_steps(here, call, call.step, rank, *theirs)
    return None


def track(tensor: Tensor, flight: Flight) -> None:
    """Let `complete(tensor)` wait for what was posted."""
    dropped = in_flight.get(tensor.data_ptr())
    if dropped is not None:
        # Nobody waits for it, and its memory was given out again, as it only sends: that goes on.
        dropped.settle()
        flight.settle()
        flight.refused = dropped.refused or flight.refused
        flight.works, flight.parts = dropped.works + flight.works, dropped.parts + flight.parts
    in_flight[tensor.data_ptr()] = flight
    if tensor.device.type == "cpu":
        for _ in range(_YIELDS):
            _sched_yield()
    if lowering.is_refused:
        complete(tensor)


def complete(x: Tensor) -> None:
    """Wait for `x`, if it is on its way."""
    if (flight := in_flight.pop(x.data_ptr(), None)) is not None:
        flight.land()
