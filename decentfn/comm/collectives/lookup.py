"""Data of a step's round, looked up by operators at run time: peers, weights and numbers never enter a graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from decentfn.comm.collectives.membership import world
from decentfn.comm.collectives.world import World
from decentfn.core import BUFFERS, by_handle, context, number_on, of_step, operator
from decentfn.topologies import Topology


def refuse_size(here: World, local: int, workers: int, what: str) -> NoReturn:
    """Raise ValueError for a topology of more or fewer workers than exist, `local` per process; `what` is the call."""
    if (each := here.processes_per_worker) > 1:
        raise ValueError(
            f"{what}: the topology has num_workers={workers}, but {here.size * each} processes run, {each} for each worker; make it "
            f"with df.topology(name, world.num_workers), here {here.size}, or a multiple of that with df.simulate."
        )
    launched = os.environ.get("WORLD_SIZE", "")
    if here.size == 1 and launched not in ("", "1") and not dist.is_initialized():
        raise ValueError(
            f"{what}: the topology has num_workers={workers}, and this process is alone: {launched} processes were started "
            "(WORLD_SIZE), but they have no process group. Call df.init() first, before init(params)."
        )
    if workers % here.size:
        way_out = f"make the topology with num_workers={here.size}, or a multiple of it with df.simulate."
    else:
        way_out = f"or df.simulate(step, {workers // here.size}) so that workers x processes is the topology's size."
    raise ValueError(
        f"{what}: the topology has num_workers={workers}, but {here.size} process(es) hold {local} worker(s) each. "
        f"Start {workers} processes with torchrun, {way_out}"
    )


class Row(NamedTuple):
    """One worker's part of round `t`, on the device of its state."""

    topology: Topology
    t: Tensor  # 0-d int64 on the CPU
    facts: Tensor  # [5] float64; each is computed where it is read, as few steps read any
    weights: Tensor  # [K+1] float64, own weight first
    mean_weight: Tensor | None  # 0-d float64, weight of the mean over the worker's group; None without groups
    sources: Tensor  # [K] int64, the sender in each slot; -1: none
    given: Tensor  # [K] float64, weights of its messages at the receivers; W[j, i], while `weights` are W[i, j]

    is_active = property(lambda row: row.facts[0] > 0)  # 0-d bool, False if the schedule rests
    worker = property(lambda row: row.facts[1].to(torch.int64))  # 0-d, the worker's number
    group = property(lambda row: row.facts[_GROUP].to(torch.int64))  # 0-d, the number of its group
    group_size = property(lambda row: row.facts[3].to(torch.int64))  # 0-d
    are_pairs = property(lambda row: row.facts[4] > 0)  # 0-d bool: in each slot two hear each other, with one weight


_ROUNDS = 4096  # most rounds that a session keeps


class FoundRound(NamedTuple):
    """Round of a step, which `Session.rounds` keeps: it is found once, before the step or by its first operator."""

    topology: Topology  # the one that holds now in place of the one that the step was made for
    number: int  # step number
    keys: tuple[Tensor, Tensor]  # handle and t, which are kept so that no other tensors have their identities

    @classmethod
    def of(cls, here: World, handle: Tensor, t: Tensor) -> FoundRound:
        """Find round t of the schedule with this handle."""
        found, rounds = cls(here.hooks.schedule(by_handle(handle)), int(t), (handle, t)), here.session.rounds
        if len(rounds) > _ROUNDS:  # without a step that would begin with none
            rounds.clear()
        rounds[id(handle), id(t)] = found
        return found


def find_rounds(schedules: Sequence[Topology], t: Tensor, number: int) -> tuple[Topology, ...]:
    """Find the rounds of step t; return the schedules, of which `rests` is then True, if all rest in it."""
    here, is_active = context.step_world or world(), False
    here.session.rounds.clear()
    for one in schedules:
        topology = here.hooks.schedule(one)
        here.session.rounds[id(one.handle), id(t)] = FoundRound(topology, number, (one.handle, t))
        is_active = is_active or topology.is_active(number)
    return () if is_active else tuple(schedules)


def rests(*topologies: Topology) -> bool:
    """Return True if it was known before the step that these schedules rest in it: a constant of compiled code."""
    for one in topologies:
        for other in context.resting:
            if one is other:
                break
        else:
            return False
    return True


_FACTS, _GROUP = 5, 2
"""Number of facts at the front of a row of `Topology.rows`, and the place of the group among them."""


def look_up(token: Tensor, topology: Topology, t: Tensor) -> Row:
    """Look up this worker's part of round `t`; `token`, any tensor of its state, has the device and the worker axis."""
    k, row = topology.slots, _look_up(token, topology.handle, t, topology.slots, 0)
    facts, weights, mean, sources, given = row.split([_FACTS, k + 1, 1, k, k])
    return Row(topology, t, facts, weights, mean[0] if topology.has_groups else None, sources.to(torch.int64), given)


def _look_up_kernel(token: Tensor, handle: Tensor, t: Tensor, slots: int, workers: int) -> Tensor:
    here = context.step_world or world()
    found, identity = here.session.rounds.get((id(handle), id(t))) or FoundRound.of(here, handle, t), here.identity
    topology, number, _ = found
    if (workers or 1) * identity.size != topology.num_workers:
        refuse_size(here, workers or 1, topology.num_workers, "step(state, batch, t)")
    rows = topology.rows(number, token.device) if context.inputs is None else of_step(topology.rows, t, token.device)
    return (rows[identity.rank * workers : (identity.rank + 1) * workers] if workers else rows[identity.rank]).clone()


def _look_up_vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int | None]:
    token, handle, t, slots, workers = arguments
    if workers:  # over the runs of a sweep, which have the same rows
        return _look_up(token.select(in_dims[0], 0), handle, t, slots, workers), None
    return _look_up(token, handle, t, slots, info.batch_size), 0


_look_up = operator(
    # `workers`: 0 for one worker alone; L for the rows of the L workers here.
    "look_up(Tensor token, Tensor topology, Tensor t, int slots, int workers) -> Tensor",
    _look_up_kernel,
    lambda token, handle, t, slots, workers: token.new_empty(
        ((workers,) if workers else ()) + (_FACTS + 2 + 3 * slots,), dtype=torch.float64
    ),
    _look_up_vmap,
    BUFFERS,
)


on_device = operator(
    "step_number(Tensor token, Tensor t) -> Tensor",
    lambda token, t: of_step(number_on, t, token.device),
    lambda token, t: token.new_empty((), dtype=torch.int64),
    lambda info, in_dims, token, t: (on_device(token.select(in_dims[0], 0), t), None),
    BUFFERS,
)
"""Operator `(token, t)` -> t as 0-d int64 on the token's device."""
