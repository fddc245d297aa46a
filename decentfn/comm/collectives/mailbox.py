"""Mailbox of a rank whose workers wait for nobody: what has arrived, and what still travels.

gloo's works do not tell whether a message is there (`is_completed()` is False until `wait`), so each neighbor has one
thread that receives and one that sends. A message is its sender's own step, its share of the sender's mass, and the
values, as bytes in a buffer that is made once. A receiver holds one message of each sender until it is taken, and another
one travels at most: then the sender keeps its mass. So memory is bounded, and a slow or stopped rank slows nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from decentfn.comm.collectives.channels import close
from decentfn.comm.collectives.failures import brief_reason
from decentfn.comm.collectives.membership import world
from decentfn.comm.collectives.outside import gather_objects
from decentfn.comm.collectives.world import World
from decentfn.core import log, require
from decentfn.core.buckets import Buckets, wide
from decentfn.timing.trace import LEAST_MASS
from decentfn.topologies import Topology

LEAST = torch.finfo(torch.float32).tiny
"""Less mass is none, after bad values, before mail has come."""
_FOREVER = timedelta(days=365)
_GOODBYE = -1
"""Step of a sender's last message."""
_FAREWELL = timedelta(seconds=2)


class _Letter:
    """Buffer of one message, and its parts."""

    def __init__(self, like: Sequence[Tensor], peer: int, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)  # its thread waits, and is woken alone
        sizes = [8, 8, *(-(-x.nbytes // 8) * 8 for x in like)]
        self.bytes, self.peer, self.is_full = torch.zeros(sum(sizes), dtype=torch.uint8), peer, False
        step, share, *values = self.bytes.split(sizes)
        self.step, self.share = step.view(torch.int64), share.view(torch.float64)
        self.values = [part[: x.nbytes].view(x.dtype) for part, x in zip(values, like, strict=True)]


class Mailbox:
    """Mail of one rank, on the schedule of one algorithm. Collective.

    Args:
        here: this rank's world, each rank one worker.
        topology: the schedule, whose round a rank uses by its own step.
        like: tensors `[D]` of the dtypes and sizes of a message's values.
        x: the first parameters.
    """

    def __init__(self, here: World, topology: Topology, like: Sequence[Tensor], x: Buckets) -> None:
        self.topology, self.rank = topology, here.identity.rank
        sources, destinations = _neighbors(topology, self.rank)
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._inbox: list[_Letter] = []  # full letters, as they arrived
        self._in = [_Letter(like, peer, lock) for peer in sources]
        self._out = {peer: _Letter(like, peer, lock) for peer in destinations}
        self._is_closed, self._lost = False, set[int]()  # the lost ranks
        self.sent_to, self.taken_from = dict.fromkeys(destinations, 0), dict.fromkeys(sources, 0)
        """Messages so far, by the other rank."""
        self.record = Record()
        self.owners = WeakSet([x])
        """Parameters that have the mail so far; only a state of theirs goes on."""
        self._patience = here.channels.longest_wait
        channels = here.channels.apart(here.channels.longest_wait)
        self._group: Any = channels.connected("mailbox", range(here.identity.size))
        both = [(self._receive, letter) for letter in self._in] + [(self._send, one) for one in self._out.values()]
        self._threads = [threading.Thread(target=run, args=(letter,), daemon=True) for run, letter in both]
        for thread in self._threads:
            thread.start()

    def take(
        self, step: int, own: Sequence[Tensor], counts: Mapping[int, int] | None = None, *, late: bool = False
    ) -> list[Tensor]:
        """Return `own`, parameters and weight, `with_mail` that has arrived; note it for own step `step`.

        With `counts`, wait for so many messages of each rank since the start, but for those of lost ranks.
        """
        self.owners.clear()  # until the step, or the settling, has a result
        sums, messages = list[Tensor](), list[tuple[int, int]]()
        mass = torch.zeros((), dtype=torch.float64)
        while True:
            if counts is not None:
                self._wait(lambda: bool(self._inbox) or self._has(counts))
            with self._changed:
                letters, self._inbox = self._inbox, []
            if letters and not sums:
                sums = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in own[:-1]]
            for letter in letters:
                share = letter.share[0].clone()
                for x, values, total_of_x in zip(own, letter.values, sums, strict=False):
                    total_of_x += share.to(total_of_x.dtype) * (values.to(total_of_x) - x)
                mass += share
                messages.append((letter.peer, int(letter.step)))
            with self._changed:
                for letter in letters:
                    self.taken_from[letter.peer] += 1
                    letter.is_full = False
                    letter.changed.notify()
            if counts is None:
                self.record.take(step, messages, late)
            elif self._has(counts):
                self.record.settle(messages)
            else:
                continue
            return with_mail(own, sums, mass)

    def offer(self, step: int, values: Sequence[Tensor], shares: Sequence[float], mass: float) -> list[float]:
        """Hand over a message with this share of `mass` in each slot of own step `step`; return those that went out, else 0.

        It stays if there is no receiver, if the last one to it still travels, or if less than `LEAST_MASS` would stay here.
        """
        went = []
        for peer, share in zip(self.topology.peers(step).destinations[self.rank], shares, strict=True):
            letter = self._out.get(peer)
            goes = letter is not None and mass - share >= LEAST_MASS and not (letter.is_full or peer in self._lost)
            if goes and letter is not None:
                letter.step.fill_(step)
                letter.share.fill_(share)
                for part, x in zip(letter.values, values, strict=True):
                    part.copy_(x)
                with self._changed:
                    letter.is_full = True
                    letter.changed.notify()
                mass -= share
                self.sent_to[peer] += 1
            went.append(goes)
        self.record.send(went)
        return [share * goes for share, goes in zip(shares, went, strict=True)]

    def _has(self, counts: Mapping[int, int]) -> bool:
        """Return True if so many messages of each rank were taken, and the own ones are with their receivers."""
        is_taken = all(self.taken_from[peer] >= count for peer, count in counts.items() if peer not in self._lost)
        return is_taken and not any(one.is_full and peer not in self._lost for peer, one in self._out.items())

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_there, self._patience.total_seconds()):
                raise TimeoutError(f"df.settle(state): mail of other ranks did not arrive within {self._patience}.")

    def close(self) -> None:
        """Say goodbye, and end the threads and connections."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for letter in (*self._in, *self._out.values()):
                letter.changed.notify()
        end = time.monotonic() + _FAREWELL.total_seconds() + 1
        for thread in self._threads[len(self._in) :]:
            thread.join(max(0.0, end - time.monotonic()))
        close([self._group])
        for thread in self._threads:
            thread.join(1.0)
        self._group = None

    def _receive(self, letter: _Letter) -> None:
        group = self._group
        while not self._is_closed:
            try:
                group.recv([letter.bytes], letter.peer, 0).wait(_FOREVER)
            except RuntimeError as error:
                return self._lose(letter, error)
            if int(letter.step) == _GOODBYE:
                return self._lose(letter, None)
            with self._changed:
                letter.is_full = True
                self._inbox.append(letter)
                self._changed.notify_all()
                letter.changed.wait_for(lambda: self._is_closed or not letter.is_full)

    def _send(self, letter: _Letter) -> None:
        group = self._group
        while True:
            with self._changed:
                letter.changed.wait_for(lambda: self._is_closed or letter.is_full)
                is_last = self._is_closed and not letter.is_full
            if is_last:
                letter.step.fill_(_GOODBYE)
            try:
                group.send([letter.bytes], letter.peer, 0).wait(_FAREWELL if self._is_closed else _FOREVER)
            except RuntimeError as error:
                return self._lose(letter, error)
            if is_last:
                return
            with self._changed:
                letter.is_full = False
                self._changed.notify_all()

    def _lose(self, letter: _Letter, error: RuntimeError | None) -> None:
        """Go on without a rank: its mass is gone, and so is what was in flight to it."""
        with self._changed:
            is_known = letter.peer in self._lost
            self._lost.add(letter.peer)
            self._changed.notify_all()
        if error is not None and not is_known and not self._is_closed:
            log.warning(
                f"rank {self.rank} goes on without rank {letter.peer}, whose connection has ended ({brief_reason(error)}): it waits for "
                "no mail of it, and sends it none; the mass of that rank is lost, and nothing else."
            )


def with_mail(own: Sequence[Tensor], sums: Sequence[Tensor], mass: Tensor) -> list[Tensor]:
    """Return parameters `[..., D]` and weight `[...]` with mail of `mass`.

    `sums` are its differences from the parameters times their mass, so equal values stay; there are none without mail.
    """
    if not sums:
        return [x.clone() for x in own]
    *z, w = own
    total = w + mass.to(w.device)
    divisor = total.clamp(min=LEAST)[..., None]
    return [*((x + s / divisor.to(s.dtype)).to(x.dtype) for x, s in zip(z, sums, strict=True)), total]


class Record:
    """Messages that a rank took and sent in each of its own steps, since the start or the last settling before them."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.begin(0)

    def begin(self, first: int) -> None:
        """Forget what was noted; the next step is the first."""
        self.first, self.is_settled = first, False
        self.gap: list[int] = []  # the first steps that were left out, from and to
        self.taken: list[list[tuple[int, int]]] = []
        self.late: list[int] = []
        self.sent: list[list[bool]] = []
        self.ended: list[float] = []

    def take(self, step: int, messages: list[tuple[int, int]], late: bool) -> None:
        """Note what was taken at the start of a step, or after its gradient."""
        if late:
            self.taken[-1] += messages
            self.late[-1] = len(messages)
            return
        if self.is_over:
            self.begin(step)
        if (due := self.first + len(self.sent)) < step:
            self.gap = self.gap or [due, step - 1]
        self.taken.append(messages)
        self.late.append(0)

    @property
    def is_over(self) -> bool:
        """Return True if nothing is in flight: no step was taken, or all were settled."""
        return self.is_settled or not self.sent

    def settle(self, messages: list[tuple[int, int]]) -> None:
        """Note what was taken after the last step; if no rank has taken one since the last settling, it was nothing."""
        if not self.is_settled:
            self.taken.append(messages)
        self.is_settled = True

    def send(self, went: Iterable[bool]) -> None:
        """Note what went out at the end of a step."""
        self.sent.append(list(went))
        self.ended.append(round(time.monotonic() - self._since, 6))


def open_mailbox(topology: Topology, like: Sequence[Tensor], x: Buckets) -> None:
    """Open this rank's mailbox for the steps of one algorithm from x, in place of an earlier one. Collective."""
    here = world()
    if here.size == 1:
        return
    if here.size != topology.num_workers:
        raise ValueError(
            f"init(params): {here.size} processes hold {topology.num_workers} workers, and one that waits for nobody is a process of its "
            f"own; start {topology.num_workers} processes, or simulate all workers in one."
        )
    if here.mailbox is not None:
        here.mailbox.close()
    here.mailbox = Mailbox(here, topology, like, x)


def require_mail(call: str, has: bool) -> None:
    """Raise ValueError unless parameters have the mail so far: it would be lost, and what was sent would be sent again."""
    rule = "mail is taken once, and that of this state is in the one that its step, df.settle(state), or a later init(params) has "
    way_out = "returned, and not in a copy; go on with that one, or go back on all ranks: init(params), df.checkpoint.restore."
    require(has, call, rule + way_out)


def counts(box: Mailbox, x: Buckets, here: World) -> dict[int, int]:
    """Return how many messages each rank has sent to this one. Collective: no rank takes a step meanwhile.

    If others have taken steps since the last settling, the record begins again, also where this rank has taken none.
    """
    told = [{str(peer): count for peer, count in box.sent_to.items()}, box.record.is_over] if x in box.owners else None
    sent = gather_objects(told, here)
    require_mail("settle(state)", None not in sent)
    if box.record.is_settled and not all(is_over for _, is_over in sent):
        box.record.begin(box.record.first + len(box.record.sent))
    return {peer: sent[peer][0].get(str(box.rank), 0) for peer in box.taken_from}


def _neighbors(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """Return the ranks that this one hears, and those that it tells, in any step."""
    if topology.period is None:  # drawn, so any may come
        others = [peer for peer in range(topology.num_workers) if peer != rank]
        return others, others
    rounds = [topology.peers(t) for t in (*range(topology.start), *(topology.cycle or ()))]
    hears = {peer for its in rounds for peer in its.sources[rank]}
    tells = {peer for its in rounds for peer in its.destinations[rank]}
    return sorted(hears - {-1}), sorted(tells - {-1})
