"""The store where the processes of a run meet: the connection, bounded in time, and a part for each generation."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from decentfn.core import brief_error, require
from decentfn.elastic.connections import reported_as
from decentfn.errors import ExchangeTimeout

_Made = TypeVar("_Made")

_AGENT = timedelta(minutes=2)
"""torchrun has its store before it has processes: one that does not answer this long has been killed."""
_SLACK_S = 3.0
"""Time for the connection's own error, which knows more, to come first."""
_POLL_S = 0.005


def store_of_run(timeout: timedelta) -> tuple[Store, int, int]:
    """Connect to the store of rank 0, or of torchrun; return it, this rank and the number of processes."""
    place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    of_agent = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    bound = min(timeout, _AGENT) if of_agent else timeout
    try:
        return answered(lambda: next(rendezvous("env://", timeout=bound)), bound)
    except dist.DistStoreError as error:
        raise ExchangeTimeout(
            f"init(timeout={timeout}) with {place}: WORLD_SIZE={os.environ['WORLD_SIZE']}, and not as many processes came "
            f"({brief_error(error)}); start the others too, as torchrun does, or for one process alone unset RANK and "
            "WORLD_SIZE."
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise
        raise ExchangeTimeout(
            f"init(timeout={timeout}) with {place}: the store of {'torchrun' if of_agent else 'rank 0'} does not answer "
            f"({brief_error(error)}); are both right, does {'it' if of_agent else 'rank 0'} run, and is the port open?"
        ) from error


def store_of_environment(timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    rule = f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}; set both to the address of the run's store."
    require(bool(host) and port.isdecimal(), "init(join=True)", rule)
    with reported_as(ExchangeTimeout, f"init(join=True, timeout={timeout}): no store answers at {host}:{port}"):
        return TCPStore(host, int(port), is_master=False, timeout=timeout)


def answered(connect: Callable[[], _Made], timeout: timedelta) -> _Made:
    """Return `connect()`, or raise ExchangeTimeout: PyTorch waits without end for a port that accepts and is silent."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="decentfn connection to the store", daemon=True).start()
    try:
        return made.result(min(timeout.total_seconds() + _SLACK_S, threading.TIMEOUT_MAX))
    except TimeoutError:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ExchangeTimeout(
            f"init(timeout={timeout}): nothing at {place} answers as a store does; does this machine know that name, and is "
            "the port in use by another program, or a proxy?"
        ) from None


def fresh_part(store: Store, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Return an empty part of `store`, the same one on all ranks; collective. Raises ExchangeTimeout if a rank is late.

    torchrun keeps its store when it restarts processes. Neither its restart count nor the number of ranks identifies a
    generation: the count differs between nodes, and a change of nodes does not raise it. So rank 0 draws a name and
    answers every request for it. Each rank asks under a fresh key, so the answer is its own, and confirms by writing
    the name where it asked, so rank 0 stops waiting for it.
    """
    notes, name = PrefixStore("decentfn", store), uuid4().hex
    if rank == 0:
        _answer(name, notes, size, timeout)
    else:
        question = uuid4().hex
        notes.set(str(rank), question)
        try:
            name = notes.get(question).decode()
        except RuntimeError as error:
            raise _no_answer(rank, "rank 0", 0, timeout) from error
        notes.set(str(rank), name)
    return PrefixStore(f"decentfn {name}", store)


def _answer(name: str, notes: Store, size: int, timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    waiting = [str(rank) for rank in range(1, size)]
    while waiting:
        if time.monotonic() > end:
            raise _no_answer(0, f"rank{'s' * (len(waiting) > 1)} {', '.join(waiting)}", int(waiting[0]), timeout)
        time.sleep(_POLL_S)
        for rank in [rank for rank in waiting if notes.check([rank])]:
            said = notes.get(rank).decode()
            if said == name:
                waiting.remove(rank)
            else:
                notes.set(said, name)  # the answer to a dead rank's question is never read


def _no_answer(rank: int, missing: str, peer: int, timeout: timedelta) -> ExchangeTimeout:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return ExchangeTimeout(
        f"init(timeout={timeout}): rank {rank} got no answer from {missing} in the store at {place}; a process did not "
        "start, or uses another store: where nodes come and go, start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment.",
        process=rank,
        peer=peer,
    )


def unknown_interface() -> str | None:
    """Return the first interface in GLOO_SOCKET_IFNAME that this machine lacks, and those that it has."""
    names = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in names:
            return f"no interface {name}; choose of: {', '.join(names)}"
    return None
