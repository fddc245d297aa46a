"""Everything collective that is not a step: over a group of its own, and compared before anything is summed.

gloo's messages carry neither a name nor a size. One call that only some processes make would be paired with another, and
a larger message than expected aborts the process. So each collective begins with a header of a fixed size.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from decentfn.comm.collectives.membership import World, everyone, world
from decentfn.comm.collectives.reports import has_timed_out, told_outside, where_told
from decentfn.comm.collectives.steps import Note
from decentfn.core.context import context
from decentfn.core.formatting import brief_error
from decentfn.errors import CallMismatch, ExchangeTimeout, PeerLost, RunError

_TEXT = 232
_FORM = struct.Struct(f"<qqq{_TEXT}s")


@contextmanager
def calling(call: str, *, of_state: bool = False) -> Iterator[None]:
    """Name what this thread does with the other processes after the function that the user has called, the outermost.

    Args:
        call: the function, as the user types it.
        of_state: whether it reads a training state, so that all processes call it after the same step.
    """
    before = context.call
    context.call = before or (call, of_state)
    try:
        yield
    finally:
        context.call = before


class _Header(NamedTuple):
    nbytes: int
    exchanges: int
    """How many this process has made; -1: it does not matter."""
    t: int
    text: str

    def encoded(self) -> Tensor:
        text = self.text.encode()
        if len(text) > _TEXT:
            text = text[: _TEXT - 17] + b" " + hashlib.sha256(text).hexdigest()[:16].encode()
        return torch.frombuffer(bytearray(_FORM.pack(*self[:3], text)), dtype=torch.uint8)

    @classmethod
    def decoded(cls, x: Tensor) -> _Header:
        nbytes, exchanges, t, text = _FORM.unpack(x.numpy().tobytes())
        return cls(nbytes, exchanges, t, text.rstrip(b"\0").decode(errors="replace"))


@contextmanager
def met(
    here: World, what: str, x: Tensor | int, processes: range | None = None, group: Any = None
) -> Iterator[tuple[Any, list[int]]]:
    """Begin a collective outside steps: the group to make it over, and the bytes that each process brings.

    Args:
        here: the world.
        what: the kind of collective.
        x: what is sent, of the same shape and dtype everywhere; or how many bytes, where processes may differ.
        processes: some of the world's, by rank among all; None: all.
        group: the one that is used on a GPU; None: the world's.

    Raises:
        CallMismatch: on all of them, they are about to do different things; nothing has been sent.
        ExchangeTimeout, PeerLost: one does not come; also of what happens within.
    """
    processes = here.processes if processes is None else processes
    call, of_state = context.call or (what, False)
    steps = here.gossip.steps
    text = f"{call}: {what}" + ("" if isinstance(x, int) else f" of {list(x.shape)} {x.dtype}")
    exchanges = steps.calls if of_state and steps.is_whole else -1
    mine = _Header(x if isinstance(x, int) else x.nbytes, exchanges, steps.at, text).encoded()
    with here.all_processes.turn:
        steps.waits_since = time.monotonic()
        try:
            outside: Any = here.outside(processes)
            heard = [torch.empty_like(mine) for _ in processes]
            outside.allgather([heard], [mine]).wait()
            headers = [_Header.decoded(h) for h in heard]
            _require_same(here, processes, headers)
            on_gpu = isinstance(x, Tensor) and x.device.type != "cpu"
            yield (group or here.group) if on_gpu else outside, [header.nbytes for header in headers]
        except RunError:
            raise
        except RuntimeError as error:
            raise _failed(here, call, error) from error
        except (
            BaseException
        ) as error:  # as by Ctrl-C: what this process calls next would meet the rest of the others' call
            _end(here, call, error)
            raise
        finally:
            steps.waits_since = None


def _require_same(here: World, processes: range, headers: list[_Header]) -> None:
    texts = [header.text for header in headers]
    usual = max(texts, key=texts.count)
    first = texts.index(usual)
    rule = "all processes make the same calls, in the same order"
    for rank, header in zip(processes, headers, strict=True):
        if header.text != usual:
            said = f"process {processes[first]} calls {usual}, process {rank} calls {header.text}"
        elif differing := [
            other
            for other, its in zip(processes, headers, strict=True)
            if (other - rank) % here.processes_per_worker == 0 and -1 != its.exchanges != header.exchanges != -1
        ]:
            other = differing[0]
            its = headers[processes.index(other)]
            said = (
                f"{usual.split(': ')[0]}: process {rank} calls it after step t={header.t} and {header.exchanges} exchanges, process "
                f"{other} after step t={its.t} and {its.exchanges}"
            )
        else:
            continue
        me = here.all_processes.rank
        peer = processes[first] if rank == me else rank
        raise CallMismatch(f"{said}; {rule}.", process=me, peer=peer)


def _failed(here: World, call: str, error: RuntimeError) -> RunError:
    """The error for a call that another process did not come to."""
    steps = here.gossip.steps
    was_whole = steps.is_whole
    _end(here, call, error)
    named = named_error(here, call, error, told_outside(here))
    if was_whole and not steps.is_running:
        named.next_step = None if named.step is None else named.step + 1
    steps.cut_short = call, named
    return named


def _end(here: World, call: str, error: BaseException) -> None:
    """End the exchanges of this process: the others hear of it, and wait for this one no longer."""
    steps = here.gossip.steps
    steps.tell(None, timed_out=has_timed_out(error), outside=call)
    here.gossip.hang_up()
    steps.cut_short = call, error


def named_error(here: World, call: str, error: RuntimeError, notes: dict[int, Note] | None = None) -> RunError:
    """What PyTorch has raised as this library's error, which says what failed, and what other processes told of it."""
    gossip, notes = here.gossip, notes or {}
    silent = set(range(gossip.size)) - {gossip.rank} - notes.keys()
    gave_up = [rank for rank, note in sorted(notes.items()) if note.timed_out]
    blamed = silent or set(gave_up) or set(notes)
    # Of workers of several processes, those of other shards tell each other.
    peer = blamed.pop() if len(blamed) == 1 and here.processes_per_worker == 1 else None
    who = "a process" if peer is None else f"process {peer}"
    if has_timed_out(error):
        why = f"{who} is later than the timeout of df.init ({here.timeout})"
    elif gave_up:
        why = f"process {gossip.processes[gave_up[0]]} gave up waiting"
    else:
        why = f"{who} has died, or has left"
    step = gossip.steps.at if gossip.steps.calls else None
    after = "" if step is None else f" after step t={step}"
    return (ExchangeTimeout if has_timed_out(error) or gave_up else PeerLost)(
        f"{call} failed on process {here.all_processes.rank}{after}; {why}{where_told(here, notes)}: {error}",
        process=here.all_processes.rank,
        step=step,
        peer=peer,
    )


# -- what is made of it ----------------------------------------------------------------------------------------------


def compare_steps() -> None:
    """From here on compare `t` over the ranks in some of the operators' calls; collective."""
    here = world()
    if here.size > 1:
        here.steps.begin(fresh_board())


def fresh_board(among: World | None = None) -> PrefixStore:
    """A part of the store on which nothing is written yet, the same for all processes of gossip, or `among`; collective."""
    here = among or world()
    with calling("a new board"):
        return PrefixStore(f"decentfn {gather_objects(uuid4().hex, here)[0]}", here.store)


def process_mean(x: Tensor, among: World | None = None) -> Tensor:
    """The mean of `x` over all processes of gossip, or `among`, at once; `x` itself in one. Not for use inside a step."""
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
    """What every process passed, by rank, as JSON gives it back (tuples as lists). Not for use inside a step."""
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
