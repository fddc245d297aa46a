"""A part of the store that is this generation's alone: what dead processes left there is never read."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.errors import ExchangeTimeout

_POLL_S = 0.005


def fresh_part(store: Store, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Return a part of `store` in which nothing is written yet, the same one on all ranks; collective.

    torchrun keeps its store when it starts the processes again, and neither its count of restarts nor the number of ranks
    tells generations apart: the count differs between nodes, and a change of nodes does not raise it. So rank 0 draws a name
    and tells it to who asks now. Every rank asks under a key that nobody has used before, so an answer is to itself; and it
    repeats the name where it asked, so that rank 0 knows whom it need not wait for.

    Raises:
        ExchangeTimeout: a rank did not come in time.
    """
    notes, name = PrefixStore("decentfn", store), uuid4().hex
    if rank == 0:
        _tell(name, notes, size, timeout)
    else:
        question = uuid4().hex
        notes.set(str(rank), question)
        try:
            name = notes.get(question).decode()
        except RuntimeError as error:
            raise _nobody(rank, "rank 0", 0, timeout) from error
        notes.set(str(rank), name)
    return PrefixStore(f"decentfn {name}", store)


def _tell(name: str, notes: Store, size: int, timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    waiting = [str(rank) for rank in range(1, size)]
    while waiting:
        if time.monotonic() > end:
            raise _nobody(0, f"ranks {', '.join(waiting)}", int(waiting[0]), timeout)
        time.sleep(_POLL_S)
        for rank in [rank for rank in waiting if notes.check([rank])]:
            said = notes.get(rank).decode()
            if said == name:
                waiting.remove(rank)
            else:
                notes.set(said, name)  # nobody reads the answer to a dead rank's question


def _nobody(rank: int, whom: str, peer: int, timeout: timedelta) -> ExchangeTimeout:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return ExchangeTimeout(
        f"init(timeout={timeout}): rank {rank} heard nothing of {whom} in the store at {place}; a process did not start, or "
        "was told of another store: where nodes come and go, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
        "its environment.",
        process=rank,
        peer=peer,
    )
