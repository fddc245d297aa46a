"""Joining a run of `df.survive`: a new process waits at the store, and the others admit it between two steps.

A newcomer draws a seat that nobody has had, compiles its step alone, and leaves a note in the store. The first worker
looks for notes and adds to the sum of its step that somebody waits, so all hear it in the same step. Before the next
one they hold the roll call as after a loss (`roll_call`), whose decision includes the newcomers. These get the first
worker's state bit for bit, and all form the next generation.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

import decentfn
from decentfn.comm.collectives import Channels, World
from decentfn.comm.fingerprint import as_bytes
from decentfn.core import require, trees
from decentfn.elastic.connections import reported_as
from decentfn.elastic.generation import Generation, Members, generation_of
from decentfn.elastic.liveness import Liveness
from decentfn.elastic.roll_call import POLL_S, Decision, from_json
from decentfn.errors import ExchangeTimeout, PeerLost, PlanMismatch
from decentfn.kit.state import lines_of

_RUN = "decentfn run"
_LOOK_S = 10.0
"""Interval at which one that waits to join looks whether the run still exists; between two steps a process answers 512 looks."""


def open_run(here: World, state: Any) -> Store:
    """Return a part of the store for this run alone, and write where newcomers find it; collective."""
    bottom = here.channels.store
    while isinstance(bottom, PrefixStore):
        bottom = bottom.underlying_store
    if here.rank == 0:
        here.channels.store.set("run", uuid4().hex)
    name = here.channels.store.get("run").decode()
    run = PrefixStore(f"{_RUN} {name}", bottom)
    if here.rank == 0:
        run.set("agreed", json.dumps([lines_of(state), sorted(here.agreed)]))
        bottom.set(_RUN, json.dumps([name, here.size, versions(), here.device.type]))
    return run


def versions() -> dict[str, str]:
    """Return the versions that all processes of a run have in common."""
    release = str(torch.__version__).partition("+")[0]  # builds for the CPU and for GPUs may meet
    python = ".".join(platform.python_version_tuple()[:2])
    return {"decentfn": decentfn.__version__, "torch": release, "Python": python}


def wait_for_run(here: World, store: Store, timeout: timedelta) -> World:
    """Make a process alone one that waits to join the run in this store."""
    no_run = f"init(join=True, timeout={timeout}): no run with df.survive has begun a step at this address"
    with reported_as(ExchangeTimeout, no_run):
        name, size, theirs, device = json.loads(store.get(_RUN))
    for what, version in versions().items():
        if theirs[what] != version:
            raise PlanMismatch(
                f"init(join=True): the run has {what} {theirs[what]}, and this process {version}; install the same here."
            )
    rule = "the run is on GPUs, which only runs on the CPU support; start them all again."
    require(device == "cpu", "init(join=True)", rule)
    identity = replace(here.identity, num_workers=size, size_at_start=size)
    alone = Generation(here, Members(0, (), (0,)), 0, PrefixStore(f"{_RUN} {name}", store))
    here.become(channels=Channels(identity, None, timeout), hooks=alone)
    return here


# -- the newcomer -----------------------------------------------------------------------------------------------------


def require_same(here: World, run: Store, state: Any) -> None:
    """Raise PlanMismatch unless the run's states have the leaves of this one, and its workers made the same algorithm."""
    form, agreed = json.loads(run.get("agreed"))
    if form != lines_of(state):
        raise PlanMismatch(
            "join(step, state, batch): the run's states have other leaves, shapes or dtypes than this one; make it with the same "
            "model, algorithm and optimizer, for world.num_workers workers."
        )
    if other := sorted(here.agreed - set(agreed)):
        theirs = sorted(set(agreed) - here.agreed) or ["nothing"]
        raise PlanMismatch(
            f"join(step, state, batch): this process has {other[0]!r}, the run {theirs[0]!r}; every rank must build the same "
            "algorithm, model and topology."
        )


def new_seat(here: World, run: Store) -> int:
    """Return a seat that no process has had."""
    return here.identity.size_at_start + run.add("newcomers", 1) - 1


def await_admission(run: Store, seat: int, liveness: Liveness) -> tuple[Members, Decision]:
    """Leave a note that this seat waits, and wait until the others admit it; return the next generation, as they decided."""
    run.set(f"waiting {seat}", "")
    looked, missed = time.monotonic(), 0
    while not run.check([f"admitted {seat}"]):
        if run.check([f"refused {seat}"]):
            raise ValueError(f"join(step, state, batch): {run.get(f'refused {seat}').decode()}")
        liveness.clear()
        if time.monotonic() - looked > _LOOK_S:
            looked, missed = time.monotonic(), 0 if liveness.any_answers(range(seat)) else missed + 1
            if missed == 2:
                raise PeerLost(
                    "join(step, state, batch): no process of the run answers: it has ended, or is not reached from here; join "
                    "another run, or start one."
                )
        time.sleep(POLL_S)
    members, decision = json.loads(run.get(f"admitted {seat}"))
    return from_json(Members, members), from_json(Decision, decision)


# -- the others -------------------------------------------------------------------------------------------------------


def waiting(here: World, run: Store, liveness: Liveness) -> list[int]:
    """Return the seats that wait; refuse those that do not answer, or for whom the step has no schedule."""
    generation, first = generation_of(here), here.identity.size_at_start
    numbers = range(first, first + run.add("newcomers", 0))
    seats = [seat for seat in numbers if seat not in generation.members.seats and run.check([f"waiting {seat}"])]
    liveness.learn(seats)
    found: list[int] = []
    for seat in seats:
        if not liveness.reaches(seat):
            _refuse(run, seat, "the run's workers do not reach this process.")
        elif not generation.has_schedules(size := here.size + len(found) + 1):
            _refuse(run, seat, f"the run's steps were compiled for schedules that cannot have {size} workers.")
        else:
            found.append(seat)
    return found


def _refuse(run: Store, seat: int, why: str) -> None:
    run.set(f"refused {seat}", why)
    run.delete_key(f"waiting {seat}")


def admit(run: Store, members: Members, decision: Decision, newcomers: Sequence[int]) -> None:
    """Tell the newcomers of a decision, and of the next generation; each worker writes the same."""
    for seat in newcomers:
        run.set(f"admitted {seat}", json.dumps([members, decision]))
        run.delete_key(f"waiting {seat}")


def hand_over(here: World, state: Any, newcomers: Sequence[int]) -> Any:
    """Send the first worker's state to the newcomers, bit for bit; return it there, and elsewhere the state itself."""
    group, timeout = here.channels.group, here.channels.longest_wait
    own, seats = generation_of(here).seat, generation_of(here).members.seats
    if own == seats[0]:
        sent = [as_bytes(leaf) for leaf in trees.leaves(state) if isinstance(leaf, Tensor) and leaf.numel()]
        for work in [group.send([x], seats.index(seat), 0) for x in sent for seat in newcomers]:
            here.hooks.await_work(work, timeout)
    if own not in newcomers:
        return state

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            return leaf
        new = torch.empty(leaf.numel() * leaf.itemsize, dtype=torch.uint8)
        here.hooks.await_work(group.recv([new], 0, 0), timeout)
        return new.view(leaf.dtype).view(leaf.shape)

    return trees.map(received, state)
