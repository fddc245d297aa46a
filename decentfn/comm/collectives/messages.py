"""Messages of a step. A step ends with all of them, or with an error that blocks further steps.

A lost message does not abort the step: the worker's own payload replaces it. So the state is complete when `whole_step`
raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from decentfn.comm.collectives.failures import has_timed_out, lost_message_error, step_mismatch
from decentfn.comm.collectives.identity import Identity
from decentfn.comm.collectives.membership import world
from decentfn.comm.collectives.session import TAGS, Call, Lost, Part, Session
from decentfn.comm.collectives.world import NO_HOOKS, World
from decentfn.core.context import context
from decentfn.topologies.rounds import Peers

_PATIENCE_S = 1.0
"""Timeout of all remaining messages after a loss: connections are closed, so they have arrived or never will."""
_NOT_SENT = "not sent, because an earlier message was lost"
_PATIENCE_OF_ALL_S = 5.0  # total timeout of the messages of a step that was cut short, in seconds

_alone = threading.RLock()
"""Turn of a process without others: the steps of its threads seed PyTorch's generators, of which there is one set."""
_abandoned: list[Call] = []  # calls whose memory may still be written to


# -- a step, complete or cut short -----------------------------------------------------------------------------------


@contextmanager
def whole_step(t: int, *, donated: bool = False, run: int = 0) -> Iterator[World]:
    """Context of a step at `t`: raises at the end if a message was lost, and drains the messages of a step that raises.

    Then the next step is refused: the other ranks would misread its messages. `donated`: it overwrites its state. `run`: the
    state's (`Plan.run`), not known where processes have changed. Threads of one process take turns; among ranks, whose
    messages need one order, a step beside that of another thread is refused.
    """
    here, outer = world(), context.step_world
    session, identity = here.session, here.identity
    is_alone = identity.size * identity.processes_per_worker == 1
    if is_alone:
        _alone.acquire()
    elif session.is_running and outer is None:
        raise RuntimeError(
            f"step(state, batch, t={t}): another thread of rank {here.rank} is in its step t={session.at}, and ranks exchange in one order "
            "of steps; take the steps of all states in one thread."
        )
    else:
        session.enter(t, 0 if here.hooks.changes else run)
    context.step_world = here
    try:
        if here.hooks is not NO_HOOKS:
            here.hooks.before_step(t)
        with record_function(f"decentfn::step {t}"):
            yield here
    except BaseException as error:
        if session.is_own_step or identity.size > 1 and session.calls != session.before:
            _drain(session, 0)
            session.cut(f"step t={t}", error)
        raise
    finally:
        context.step_world = outer
        session.leave()
        if is_alone:
            _alone.release()
    if session.in_flight:
        _drain(session, session.before)
    if session.lost is not None and identity.size > 1:
        named = lost_message_error(here, session.lost, next_step=t + 1 if donated else t)
        session.cut(f"step t={t}", named)
        raise named from session.lost.error
    if here.hooks is not NO_HOOKS:
        here.hooks.after_step(t)


def cut_short(t: int, error: BaseException) -> None:
    """Block later steps: the one at `t` sends its messages and raises `error`; a single process continues."""
    here = world()
    if here.size > 1:
        here.session.cut(f"step t={t}", error)


def _drain(session: Session, since: int) -> None:
    """Wait for calls in flight after call number `since`."""
    end, in_flight = time.monotonic() + _PATIENCE_OF_ALL_S, session.in_flight
    for number in [number for number in in_flight if number > since]:
        call = in_flight.pop(number)
        try:
            for work in call.works:
                work.wait(timedelta(seconds=max(0.01, end - time.monotonic())))
            call.inbox, call.parts, call.works = None, (), []
        except RuntimeError:
            _abandoned.append(call)


# -- messages ---------------------------------------------------------------------------------------------------------


def lose_message(here: World, call: Call, error: Exception, peer: int | None = None, slot: int | None = None) -> None:
    """Record a loss. The first ends this process's exchanges: notify the others and close the connections."""
    session, call.lost = here.session, str(error)
    lost = session.lost
    if lost is None:
        lost = Lost(call, error, peer, slot, time.monotonic() + _PATIENCE_S)
        session.lose(lost, timed_out=has_timed_out(error))
        here.hang_up()
    if not session.is_running:
        named = lost_message_error(here, lost)
        session.cut(f"step t={call.step}", named)
        raise named from error


def send(here: World, call: Call, peers: Peers, x: Tensor, slots: int) -> None:
    """Start to send `x` `[L, (K,) D]` of the L workers here to their listeners, and to receive from their sources."""
    rank = here.identity.rank
    local, first = call.local, rank * call.local
    hears, tells = peers.sources[first : first + local], peers.destinations[first : first + local]
    call.hears = hears[0] if local == 1 else hears
    call.nbytes = x.shape[-1] * x.itemsize
    call.inbox = inbox = x.new_empty((local, slots, x.shape[-1]))
    x = x if x.dim() == 3 else x[:, None].expand(-1, slots, -1)
    receives: list[Part] = []
    sends: list[Part] = []
    # Both lists are ordered by (slot, receiving worker): the order in which one process meets another's messages.
    by_slot = zip(zip(*hears, strict=True), zip(*tells, strict=True), strict=True)
    for slot, (sources, listeners) in enumerate(by_slot if inbox.numel() else ()):
        for i, source in enumerate(sources):
            target = inbox[i, slot]
            if source < 0:
                target.zero_()
            elif source // local == rank:
                target.copy_(x[source - first, slot])
            else:
                receives.append(Part(target, x[i, slot], source // local, slot))
        for listener, i in sorted(zip(listeners, range(local), strict=True)):
            if listener >= 0 and listener // local != rank:
                sends.append(Part(x[i, slot], None, listener // local, slot))
    call.parts = [*receives, *sends]  # with sends first, a link takes twice as long
    if not call.parts:
        return
    if here.session.lost is not None:
        call.lost = _NOT_SENT
        return
    group, tag, index = here.channels.group, call.place % TAGS, 0
    assert group is not None
    with record_function(f"decentfn::post {call.what} {call.index}"):
        try:
            if call.inbox.device.type == "cpu":
                for index, (x, own, rank, _) in enumerate(call.parts):  # noqa: B007
                    call.works.append((group.send if own is None else group.recv)([x], rank, tag))  # pyright: ignore
            else:
                # NCCL takes all messages of a call together. Its stream waits for ours, which wrote the parameters.
                # The call holds the tensors until `land`, where ours waits for NCCL's: no memory is reused earlier.
                operations = [
                    dist.P2POp(dist.isend if own is None else dist.irecv, x, group=group, tag=tag, group_peer=rank)
                    for x, own, rank, _ in call.parts
                ]
                call.works += dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            lose_message(here, call, error, *call.parts[index][2:])
    for counted in here.counters:
        for part in sends:
            counted.add(here.identity, [part.rank], messages=1, bytes_sent=part.tensor.nbytes)
        for part in receives:
            counted.add(here.identity, [part.rank], bytes_received=part.tensor.nbytes)


def reduce(here: World, call: Call, x: Tensor, own: Tensor | None, ranks: list[int]) -> None:
    """Start to sum `x` over the group; `own` replaces the sum if it is lost."""
    others, call.hears = [rank for rank in ranks if rank != here.identity.rank], ranks
    call.parts = [Part(x, own, others[0] if len(others) == 1 else None)]
    if not others or not x.numel():
        return
    session = here.session
    if session.lost is not None:
        call.lost = _NOT_SENT
        return
    group = here.channels.subgroup(tuple(ranks))
    try:
        with record_function(f"decentfn::post {call.what} {call.index}"):
            numbers = [call.place, call.number, x.nbytes]
            other = session.board.other_on_board(group, ranks, numbers, x, session.is_running)
            if other is None:
                call.works.append(group.allreduce([x]))
    except RuntimeError as error:
        return lose_message(here, call, error, call.parts[0].rank)
    if other is not None:
        return lose_message(here, call, step_mismatch(here, call, call.place, *other), other[0])
    share, place = round(2 * len(others) / len(ranks) * x.nbytes), ranks.index(here.identity.rank)
    for counted in here.counters:  # gloo's ring leads backward
        counted.add(here.identity, [ranks[place - 1]], bytes_sent=share)
        counted.add(here.identity, [ranks[(place + 1) % len(ranks)]], bytes_received=share)


def land(here: World, call: Call) -> bool:
    """Wait for all of a call and return True if it arrived; if not, this worker's own payload replaces each message."""
    session, since, met = here.session, time.monotonic(), []
    on_gpu = bool(call.parts) and call.parts[0].tensor.device.type != "cpu"  # where only the stream waits
    with record_function(f"decentfn::wait {call.what} {call.index}"):
        one_by_one = len(call.works) == len(call.parts)  # else the backend has combined them
        for index, work in enumerate(call.works):
            try:
                if session.lost is not None:
                    work.wait(timedelta(seconds=max(0.01, session.lost.until - time.monotonic())))
                elif on_gpu:
                    work.wait()
                elif here.hooks is NO_HOOKS:
                    work.wait(here.channels.longest_wait)
                else:
                    here.hooks.await_work(work, here.channels.longest_wait)
            except RuntimeError as error:
                lose_message(here, call, error, *(call.parts[index][2:] if one_by_one else ()))
            if here.counters:
                peer, now = call.parts[index].rank if one_by_one else None, time.monotonic()
                others = call.hears if call.what == "group_mean" else [part.rank for part in call.parts]
                met = others if peer is None else [peer]
                for counted in here.counters:
                    counted.add(here.identity, met, seconds_waited=now - since)
                since = now
    if here.hooks is not NO_HOOKS:
        here.hooks.wait_on_gpu(call.works)
    waited = time.monotonic() - since
    for counted in here.counters:
        counted.add(here.identity, met, seconds_waited=waited)
    if call.lost is not None:
        for part in call.parts:
            if part.own is not None:
                part.tensor.copy_(part.own)
    call.parts, call.works = (), []
    return call.lost is None


# -- counters ---------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Traffic of one process."""

    messages: int = 0
    """Messages sent, one per bucket and neighbor; a mean over a group does not count."""
    bytes_sent: int = 0
    """Bytes sent in messages, plus 2(r-1)/r payloads for each mean over a group of r processes."""
    bytes_received: int = 0
    """Bytes received, counted in the same way."""
    seconds_waited: float = 0.0
    """Time that this process was blocked by a missing message: the communication that no computation hides.
    On a GPU the stream waits and the process does not, so it is about 0."""


@dataclass
class Communication(Traffic):
    """Traffic of one process with other workers inside steps; messages between its own workers are not counted.

    It is the sum of `between` and `inside`, the classes of links that a plan has. A group's mean is a ring's, as gloo's: from
    each rank to the one before.
    """

    between: Traffic = field(default_factory=Traffic, repr=False)
    """Part to and from other nodes: those of torchrun, which sets LOCAL_WORLD_SIZE."""
    inside: Traffic = field(default_factory=Traffic, repr=False)
    """Part to and from other workers of its node."""
    within_worker: Traffic = field(default_factory=Traffic, repr=False)
    """Traffic with the other processes of its worker, in addition; without PyTorch's own, such as the gathers of FSDP2."""
    peers: dict[int, Traffic] = field(default_factory=dict, repr=False)
    """Part to and from each rank; a mean is awaited from several, so whose part of the wait is unknown."""

    def add(self, here: Identity, ranks: Sequence[int], **numbers: float) -> None:
        """Add to the totals, to the class of this process's links to these ranks, and to the rank if it is one."""
        is_inside = all(map(here.is_inside, ranks))
        one = [self.peers.setdefault(ranks[0], Traffic())] if len(ranks) == 1 else []
        for traffic in (self, self.inside if is_inside else self.between, *one):
            for name, number in numbers.items():
                setattr(traffic, name, getattr(traffic, name) + number)


@contextmanager
def communication() -> Iterator[Communication]:
    """Count this process's traffic until the end of the block; the numbers can be read at any time.

    Enter it after `df.init()`, around unchanged steps, compiled or not; outside a block nothing is counted. Blocks can
    be nested. In one process (`df.simulate`) nothing is sent, and all counts are 0.

    >>> import decentfn as df
    >>> with df.profiling.communication() as counted:
    ...     pass  # state, metrics = step(state, batch, t)
    >>> counted
    Communication(messages=0, bytes_sent=0, bytes_received=0, seconds_waited=0.0)
    """
    here, counted = world(), Communication()
    here.counters.append(counted)
    try:
        yield counted
    finally:
        here.counters[:] = [other for other in here.counters if other is not counted]
