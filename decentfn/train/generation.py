"""A fresh namespace of the store for each generation of processes, so entries of dead processes are never read."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

from decentfn.errors import ExchangeTimeout

_POLL_S = 0.005


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
