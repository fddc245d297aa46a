"""Collectives outside steps, over a separate group: the processes compare their calls before anything is summed.

gloo's messages carry neither a name nor a size. A call made by only some processes would be paired with another call,
and a message larger than expected aborts the process. Each collective therefore begins with a header of fixed size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from decentfn.comm.collectives.failures import has_timed_out, outside_error
from decentfn.comm.collectives.membership import world
from decentfn.comm.collectives.session import Session
from decentfn.comm.collectives.world import World
from decentfn.core.context import context
from decentfn.errors import CallMismatch, RunError

_HEADER = 1024  # bytes of a header


@contextmanager
def calling(call: str, *, of_state: bool = False) -> Iterator[None]:
    """Label this thread's collectives with the user's call; `of_state`: all processes call it after the same step."""
    with context.having(call=context.call or (call, of_state)):
        yield


class _Header(NamedTuple):
    nbytes: int
    exchanges: int
    """Exchanges made by this process; -1: neither they nor its last step `t`, which may have rested, are compared."""
    t: int
    text: str


@contextmanager
def met(
    here: World, what: str, x: Tensor | int, processes: range | None = None, group: Any = None
) -> Iterator[tuple[Any, list[int]]]:
    """Begin a collective outside steps; yield its group, and the number of bytes from each process.

    `what` is its kind; `x` the tensor to send, of one shape and dtype everywhere, or its number of bytes; `group` the
    one to use on a GPU. Raises CallMismatch on all processes, before anything is sent, if their calls differ.
    """
    processes = here.identity.processes if processes is None else processes
    call, of_state = context.call or (what, False)
    session = here.gossip.session
    here.hooks.before_call(call)
    text = f"{call}: {what}" + ("" if isinstance(x, int) else f" of {list(x.shape)} {x.dtype}")
    exchanges = session.calls if of_state and session.is_whole and not session.is_own_step else -1
    header = json.dumps([x if isinstance(x, int) else x.nbytes, exchanges, session.at, text]).encode()
    assert len(header) <= _HEADER
    mine = torch.frombuffer(bytearray(header.ljust(_HEADER)), dtype=torch.uint8)
    channels = here.all_processes.channels
    with channels.turn:
        try:
            outside: Any = channels.outside(processes)
            heard = [torch.empty_like(mine) for _ in processes]
            here.hooks.await_work(outside.allgather([heard], [mine]))
            headers = [_Header(*json.loads(h.numpy().tobytes())) for h in heard]
            _require_same(here, processes, headers)
            on_gpu = isinstance(x, Tensor) and x.device.type != "cpu"
            yield (group or here.channels.group) if on_gpu else outside, [header.nbytes for header in headers]
            if on_gpu:
                here.hooks.wait_on_gpu(None)
        except RunError:
            raise
        except RuntimeError as error:
            session = here.gossip.session
            was_whole = session.is_whole
            _end(here, call, error)
            named = outside_error(here, call, error, listens=True)
            if was_whole and not session.is_running:
                named.next_step = None if named.step is None else named.step + 1
            session.cut(call, named)
            raise named from error
        except BaseException as error:  # such as Ctrl-C: the others would pair this call with this process's next one
            _end(here, call, error)
            raise


def _require_same(here: World, processes: range, headers: list[_Header]) -> None:
    if len({header[1:] for header in headers}) == 1:
        return
    texts, size = [header.text for header in headers], here.processes_per_worker
    usual = max(texts, key=texts.count)
    first, me = processes[texts.index(usual)], here.all_processes.rank
    for rank, header in zip(processes, headers, strict=True):
        others = [
            (other, its)
            for other, its in zip(processes, headers, strict=True)
            if (other - rank) % size == 0 and its[1:3] != header[1:3] and -1 not in (its.exchanges, header.exchanges)
        ]
        if header.text != usual:
            said = f"process {first} calls {usual}, process {rank} calls {header.text}"
        elif others:
            other, its = others[0]
            said = (
                f"{usual.split(': ')[0]}: process {rank} calls it after step t={header.t} and {header.exchanges} "
                f"exchanges, process {other} after step t={its.t} and {its.exchanges}"
            )
        else:
            continue
        peer = first if rank == me else rank
        raise CallMismatch(f"{said}; all processes make the same calls, in the same order.", process=me, peer=peer)


def _end(here: World, call: str, error: BaseException) -> None:
    """End the exchanges of this process and notify the others, which stop waiting for it."""
    session = here.gossip.session
    session.note_failure(None, timed_out=has_timed_out(error), outside=call)
    here.gossip.hang_up()
    session.cut(call, error)


# -- collectives built on it -----------------------------------------------------------------------------------------


def compare_steps() -> int:
    """Start to compare steps between ranks in some of the operators' calls; return the number of this start. Collective."""
    here = world()
    if here.identity.size > 1:
        with calling("a new board"):
            name = gather_objects(uuid4().hex, here)[0]
        here.become(session=Session(here.rank, PrefixStore(f"decentfn {name}", here.channels.store)))
        here.runs = here.runs % 2**12 + 1  # so that places are integers of 64 bits
    return here.runs


def process_mean(x: Tensor, among: World | None = None) -> Tensor:
    """Average `x` over all processes of gossip, or of `among`; `x` itself in one process. Not for use inside a step."""
    here = among or world()
    if here.identity.size == 1:
        return x
    mean = (x.to(torch.promote_types(x.dtype, torch.float32)) / here.identity.size).contiguous()
    with met(here, "a mean", mean) as (group, _):
        here.hooks.await_work(group.allreduce([mean]))
    return mean.to(x.dtype)


def process_broadcast(x: Tensor, among: World | None = None) -> Tensor:
    """Copy process 0's `x`, bit for bit; arguments as for `process_mean`. Not for use inside a step."""
    here = among or world()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if here.identity.size > 1:
        with met(here, "a broadcast", copy) as (group, _):
            if copy.numel():
                # As bytes, because not every backend supports every dtype; a view, so it arrives in `copy`.
                here.hooks.await_work(group.broadcast([copy.view(-1).view(torch.uint8)]))
    return copy


def gather_objects(value: object, among: World | None = None) -> list[Any]:
    """Gather every process's value, by rank, after a JSON round trip (tuples become lists). Not for use in a step."""
    text = json.dumps(value)
    if (among or world()).identity.size == 1:
        return [json.loads(text)]
    told = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [json.loads(heard.numpy().tobytes()) for heard in gather_bytes(told, among)]


def gather_bytes(told: Tensor, among: World | None = None) -> list[Tensor]:
    """Gather the uint8 vectors of several processes on the CPU, of any length, by rank. Not for use inside a step."""
    here = among or world()
    with met(here, "a gathering", told.numel()) as (group, sizes):
        padded = told.new_zeros(max(sizes))
        padded[: told.numel()] = told
        heard = [torch.empty_like(padded) for _ in range(here.identity.size)]
        here.hooks.await_work(group.allgather([heard], [padded]))
    return [h[:n] for h, n in zip(heard, sizes, strict=True)]
