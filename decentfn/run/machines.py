"""Can the machines of a run work together? Asked in the store, before they connect to one another."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

import decentfn
from decentfn.errors import PlanMismatch

_GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"


def told(store: Store, what: str, rank: int, size: int, value: Any) -> list[Any]:
    """What every rank says of itself, by rank, as JSON gives it back; collective."""
    store.set(f"{what} {rank}", json.dumps(value))
    everyone = [json.loads(said) for said in store.multi_get([f"{what} {i}" for i in range(size)])]
    store.set(f"{what} heard {rank}", "")
    if rank == 0:  # its process may hold the store: if it left with an error first, the others would not hear which
        store.wait([f"{what} heard {i}" for i in range(size)])
    return everyone


def require_fit(store: Store, rank: int, size: int, backend: str | None) -> None:
    """All run the same versions, and gloo's network interfaces exist; collective.

    Raises:
        PlanMismatch: on all ranks, they run different versions.
        ValueError: on all ranks, one of them is told of an interface that its machine does not have.
    """
    uses_gloo = backend is None or "gloo" in backend
    everyone = told(store, "machine", rank, size, [_versions(), _wrong_interface() if uses_gloo else None])
    for name in everyone[0][0]:
        of_version: dict[str, list[int]] = {}
        for other, (versions, _) in enumerate(everyone):
            of_version.setdefault(versions.get(name, "unknown"), []).append(other)
        if len(of_version) > 1:
            found = ", ".join(f"{version} on {_ranks(ranks)}" for version, ranks in of_version.items())
            first, second, *_ = (ranks[0] for ranks in of_version.values())
            raise PlanMismatch(
                f"init(): the ranks run different versions of {name}: {found}; install the same everywhere.",
                process=rank,
                peer=first if rank != first else second,
            )
    for other, (_, wrong) in enumerate(everyone):
        if wrong is not None:
            name, there = wrong
            raise ValueError(
                f"init(): {_GLOO_INTERFACES} says {name!r} on rank {other}, and its machine has no such network interface, but "
                f"{', '.join(there)}; name the one between the machines, or unset {_GLOO_INTERFACES}."
            )


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    release = str(torch.__version__).partition("+")[0]  # builds for the CPU and for GPUs may meet
    return {"decentfn": decentfn.__version__, "torch": release, "Python": python}


def _wrong_interface() -> tuple[str, list[str]] | None:
    """The first name in the variable that is no interface of this machine, and those that are."""
    there = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in os.environ.get(_GLOO_INTERFACES, "").split(",") if name and name not in there]
    return (wrong[0], there) if wrong else None


def _ranks(ranks: Sequence[int]) -> str:
    """A few of them by number."""
    few = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {few}{' ...' if len(ranks) > 8 else ''}"
