"""Connection to the store where the processes of a run meet, bounded in time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from decentfn.core.formatting import brief_error
from decentfn.errors import ExchangeTimeout

_Made = TypeVar("_Made")

_SLACK_S = 3.0
"""Time for the connection's own error, which knows more, to come first."""


def store_of_run(timeout: timedelta) -> tuple[Store, int, int]:
    """Connect to the store of rank 0, or of torchrun; return it, this rank and the number of processes."""
    place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    try:
        return answered(lambda: next(rendezvous("env://", timeout=timeout)), timeout)
    except dist.DistStoreError as error:
        raise ExchangeTimeout(
            f"init(timeout={timeout}) with {place}: WORLD_SIZE={os.environ['WORLD_SIZE']}, and not as many processes came "
            f"({brief_error(error)}); start the others too, as torchrun does, or for one process alone unset RANK and "
            "WORLD_SIZE."
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ValueError(
                f"init() with {place}: address already in use: another run on this machine has this port; take another "
                "one, or start with `torchrun --standalone`, which takes a free one."
            ) from error
        raise ExchangeTimeout(
            f"init(timeout={timeout}) with {place}: the store of rank 0 does not answer ({brief_error(error)}); are both "
            "right, does rank 0 run, and is the port open?"
        ) from error


def store_of_environment(timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal():
        raise ValueError(
            f"init(join=True): MASTER_ADDR={host!r}, MASTER_PORT={port!r}; set both to the address of the run's store."
        )
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise ExchangeTimeout(
            f"init(join=True, timeout={timeout}): no store answers at {host}:{port}: {brief_error(error)}"
        ) from error


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
        try:
            socket.getaddrinfo(os.environ.get("MASTER_ADDR"), None)
        except OSError as error:
            raise ExchangeTimeout(
                f"init(timeout={timeout}) with MASTER_ADDR={os.environ.get('MASTER_ADDR')}: this machine finds no address for that "
                f"name ({brief_error(error)}); write the IP address of rank 0, or a name that every machine knows."
            ) from None
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ExchangeTimeout(
            f"init(timeout={timeout}): {place} accepts connections, but does not answer as a store does; is the port in "
            "use by another program, or a proxy?"
        ) from None


def unknown_interface(variable: str) -> str | None:
    """Return the first interface named by an environment variable that this machine lacks, and those that it has."""
    names = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get(variable, "").split(","):
        if name and name not in names:
            return f"no interface {name}; choose of: {', '.join(names)}"
    return None
