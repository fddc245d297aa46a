"""A guard against values that are infinite or NaN, around any algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import agree, describe
from decentfn.core import trees
from decentfn.core.buckets import Buckets, everywhere_inside, is_finite
from decentfn.core.formatting import brief
from decentfn.core.numbers import checks_numbers
from decentfn.core.trees import PyTree
from decentfn.errors import NonFinite
from decentfn.kit.expected import kind_of
from decentfn.kit.state import Guarded, Metrics, State
from decentfn.kit.step import Algorithm, require_bare
from decentfn.kit.worker import finite_or
from decentfn.torch_private import functorch


@checks_numbers
def guard(algorithm: Algorithm, limit: int = 20) -> Algorithm:
    """The algorithm, in which no worker sends anything that is infinite or NaN, and one that has it is helped by its neighbours.

    * A bad gradient is no update for that worker in that step; it mixes as always. A bad update (of an overflow, or of bad
      moments) is none for those elements, whose moments stay, or start anew where they were bad before.
    * What a worker would send is looked at before it leaves. If anything in it is bad, nothing of it counts: a flag says so to
      the neighbours, each of whom keeps for itself the weight that it had for it, and the worker takes the mix of its neighbours
      in the place of its own. A mean over a group is that of its good members.
    * An element of the buffers, or of what the algorithm remembers, that would become bad stays as it was.

    `metrics.guard` counts the steps of each worker with a bad gradient, update or buffer (`skipped`), with bad messages (`replaced`),
    and how many either way came last `in_a_row`. With nothing bad the state is what it is without the guard.
    Sent beside: one number per message and neighbour. What it costs, and what it cannot mend, says docs/bad_values.md.

    Args:
        algorithm: from any function of `decentfn.algorithms`, perhaps within other wrappers.
        limit: after so many bad steps in a row of one worker `df.errors.NonFinite` is raised, >= 1. On a GPU this is looked at in
            every `limit`-th step, so that no other waits for the GPU.

    Raises:
        ValueError: no algorithm, or one that is guarded already; `limit` no integer >= 1.
    """
    require_bare("guard", algorithm)
    if limit < 1:
        raise ValueError(f"guard(limit={brief(limit)}): a number of steps in a row, >= 1.")
    if algorithm.step.is_guarded:
        raise ValueError("guard(guard(algorithm)): the algorithm is guarded already; guard it once.")
    init, step = algorithm
    one = step.run

    def start(params: PyTree, buffers: PyTree = None) -> State:
        agree([describe("guard limit", limit)])
        state = init(params, buffers)
        zeros = [torch.zeros((), dtype=torch.int64, device=state.params[0].device) for _ in range(3)]
        return _with(state, Guarded(*zeros))

    def check(state: Any, batch: PyTree, t: Tensor) -> None:
        if not _is_guarded(state):
            raise ValueError(
                f"step(state, batch, t): the state is a {kind_of(state)} that is not guarded, and this step takes one that is; call "
                "the init that df.guard(...) returned beside it."
            )
        if step.check is not None:
            step.check(_with(state, None), batch, t)

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        counts, old = state.local.guard, _with(state, None)
        assert counts is not None
        with gossip.guarded() as noted:
            new, metrics = one(old, batch, t)
        noted.skipped.extend(
            (is_finite(before) & ~is_finite(after)).any()  # a mask of -inf is meant
            for before, after in zip(trees.leaves(old.buffers), trees.leaves(new.buffers), strict=True)
            if after.is_floating_point() or after.is_complex()
        )
        counts = _counted(counts, noted)
        return _with(_finite(new, old), counts), metrics._replace(guard=trees.map(torch.clone, counts))

    def watch(state: State, t: Tensor, is_donated: bool) -> None:
        assert state.local.guard is not None
        in_a_row = state.local.guard.in_a_row.view(-1)
        if functorch.has_no_value(in_a_row) or (in_a_row.is_cuda and int(t) % limit):
            return
        if int(in_a_row.max()) >= limit:
            error = _error(state, int(t), limit)
            error.next_step = int(t) + is_donated
            collectives.cut_short(int(t), error)
            raise error

    guarded = replace(step, run=run, check=check, watch=watch, is_guarded=True)
    return algorithm._replace(init=start, step=guarded)


def _is_guarded(state: Any) -> bool:
    return getattr(getattr(state, "local", None), "guard", None) is not None


def _with(state: State, counts: Guarded | None) -> State:
    return state._replace(local=state.local._replace(guard=counts))


def _counted(counts: Guarded, noted: gossip.Noted) -> Guarded:
    skipped, replaced = _any(noted.skipped, counts.skipped), _any(noted.replaced, counts.skipped)
    bad = skipped | replaced
    streak = torch.where(bad, counts.in_a_row + 1, torch.zeros_like(counts.in_a_row))
    return Guarded(counts.skipped + skipped, counts.replaced + replaced, streak)


def _any(claims: Sequence[Tensor], like: Tensor) -> Tensor:
    if not claims:
        return torch.zeros_like(like, dtype=torch.bool)
    return ~everywhere_inside(~torch.stack(list(claims)).any(), collectives.processes_per_worker())


def _finite(new: State, old: State) -> State:
    """The new state; an element that would be infinite or NaN stays as it was, and where it was so before, memory starts anew."""
    memory = new.memory
    first = memory.restart(new.params) if hasattr(memory, "restart") else memory

    def stays(new: PyTree, old: PyTree) -> PyTree:
        return trees.map(lambda n, o: finite_or(n, o, o), new, old)

    return State(
        Buckets(stays(list(new.params), list(old.params)), new.params.plan),
        new.local._replace(buffers=stays(new.local.buffers, old.local.buffers)),
        trees.map(finite_or, memory, old.memory, first),
    )


def _error(state: State, t: int, limit: int) -> NonFinite:
    assert state.local.guard is not None
    skipped, replaced, in_a_row = (count.view(-1) for count in state.local.guard)
    row, here = int(in_a_row.argmax()), collectives.world()
    worker = here.workers(len(in_a_row))[row]
    return NonFinite(
        f"step(state, batch, t): worker {worker} has had infinite values or NaN in {int(in_a_row[row])} steps in a row, the last at "
        f"t={t} (df.guard(limit={limit})): in all {int(skipped[row])} steps with a bad gradient or update, {int(replaced[row])} with "
        "bad messages. Look at its data and the learning rate; parameters that no neighbour can mend are set by df.with_params.",
        worker=worker,
        process=here.rank,
        step=t,
    )
