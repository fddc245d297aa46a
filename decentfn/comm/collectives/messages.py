"""In-flight messages. A lost message does not abort the step: the worker's own payload replaces it.

The state is then complete when the step is done, and `whole_step` raises.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from decentfn.comm.collectives.membership import World
from decentfn.comm.collectives.reports import different_steps, has_timed_out, report
from decentfn.comm.collectives.steps import Call, Loss, Part
from decentfn.errors import StepMismatch

_PATIENCE = timedelta(seconds=1)
"""How long each remaining message of a step that lost one is waited for: its connection is closed, so it has come or never will."""
_NOT_SENT = "not sent, because an earlier message was lost"


def lose(here: World, call: Call, error: Exception, peer: int | None = None, slot: int | None = None) -> None:
    """Note a loss. The first one ends the exchanges of this process: it tells the others, and closes its connections."""
    steps, call.lost = here.steps, str(error)
    if steps.lost is None:
        steps.lost = Loss(call, error, peer, slot)
        steps.tell(peer, timed_out=has_timed_out(error))
        here.hang_up()
    if not steps.is_inside:
        named = report(here, steps.lost)
        steps.cut_short = f"step t={call.step}", named
        raise named from error


def post(here: World, call: Call, receives: Sequence[Part], sends: Sequence[Part]) -> None:
    """Start to receive and to send. Receives come first: with sends first a link takes twice as long."""
    call.parts = [*receives, *sends]
    if not call.parts:
        return
    if here.steps.lost is not None:
        call.lost = _NOT_SENT
        return
    group, tag, index = here.group, here.steps.tag, 0
    assert group is not None
    with record_function(f"decentfn::post {call.what} {call.index}"):
        try:
            if call.inbox.device.type == "cpu":
                for index, (x, own, rank, _) in enumerate(call.parts):  # noqa: B007
                    call.works.append((group.send if own is None else group.recv)([x], rank, tag))  # pyright: ignore
            else:  # NCCL takes all messages of a call together
                operations = [
                    dist.P2POp(dist.isend if own is None else dist.irecv, x, group=group, tag=tag, group_peer=rank)
                    for x, own, rank, _ in call.parts
                ]
                call.works += dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            lose(here, call, error, *call.parts[index][2:])
    for counted in here.counters:
        counted.messages += len(sends)
        counted.bytes_sent += sum(part.tensor.nbytes for part in sends)
        counted.bytes_received += sum(part.tensor.nbytes for part in receives)


def reduce(here: World, call: Call, x: Tensor, own: Tensor | None, ranks: list[int]) -> None:
    """Start to add `x` up over the group; `own` replaces the sum if it is lost."""
    others, call.hears = [rank for rank in ranks if rank != here.rank], ranks
    call.parts = [Part(x, own, others[0] if len(others) == 1 else None)]
    if not others or not x.numel():
        return
    if here.steps.lost is not None:
        call.lost = _NOT_SENT
        return
    group = here.subgroup(tuple(ranks))
    try:
        with record_function(f"decentfn::post {call.what} {call.index}"):
            if (other := here.steps.find_other(group, ranks, [call.step, call.number, x.nbytes], x)) is not None:
                raise different_steps(here, call, call.step, *other)
            call.works.append(group.allreduce([x]))
    except StepMismatch as error:
        lose(here, call, error, error.peer)
    except RuntimeError as error:
        lose(here, call, error, call.parts[0].rank)
    else:
        share = round(2 * len(others) / len(ranks) * x.nbytes)
        for counted in here.counters:
            counted.bytes_sent += share
            counted.bytes_received += share


def land(here: World, call: Call) -> bool:
    """Wait for all of a call and return whether it arrived; if not, each message is this worker's own payload.

    Raises:
        RunError: it did not arrive, and no step runs that could be finished first.
    """
    since = time.perf_counter()
    with record_function(f"decentfn::wait {call.what} {call.index}"):
        one_by_one = len(call.works) == len(call.parts)  # else the backend has put them together
        for index, work in enumerate(call.works):
            try:
                if here.steps.lost is None:
                    work.wait()
                else:
                    work.wait(_PATIENCE)
            except RuntimeError as error:
                lose(here, call, error, *(call.parts[index][2:] if one_by_one else ()))
    waited = time.perf_counter() - since
    for counted in here.counters:
        counted.seconds_waited += waited
    if call.lost is None:
        call.arrived = time.time()
    else:
        for part in call.parts:
            if part.own is not None:
                part.tensor.copy_(part.own)
    call.parts, call.works = (), []
    return call.lost is None
