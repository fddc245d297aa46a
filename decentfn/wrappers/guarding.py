"""A guard against values that are infinite or NaN, around any algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import agree, describe
from decentfn.core import PyTree, checks_numbers, require, trees
from decentfn.core.buckets import Buckets, everywhere_within_worker, is_finite, known_finite
from decentfn.errors import NonFinite
from decentfn.kit.state import Guarded, Metrics, State, kind_of
from decentfn.kit.step import Algorithm, require_bare
from decentfn.kit.worker import finite_or
from decentfn.torch_private import functorch


@checks_numbers
def guard(algorithm: Algorithm, limit: int = 20) -> Algorithm:
    """Contain infinite and NaN values ("bad" values): workers do not send them, and neighbors repair a bad worker.

    * A worker with a bad gradient makes no update in that step; it mixes as usual, and applies its correction (D², `k_gt`,
      `led`, ...): corrections cancel over all workers, so the mean moves along the good gradients. Elements with a bad
      update (overflow, bad moments) are not updated; their moments stay, or restart if they were bad before.
    * Messages are checked before they are sent. If any value is bad, the message is flagged: each neighbor keeps the
      sender's weight for itself, and the sender takes the mix of its neighbors instead of its own value. A group mean
      is taken over the good members.
    * An element of the buffers or of the algorithm's memory that would become bad keeps its old value.

    `metrics.guard` counts, per worker, steps with a bad gradient, update or buffer (`skipped`), steps with bad messages
    (`replaced`), and current consecutive bad steps of both kinds (`in_a_row`). Without bad values the state is the same
    as without the guard. Also sent: one number per message and neighbor. docs/bad_values.md has the costs and limits.

    Args:
        algorithm: the result of any function of `decentfn.algorithms`, possibly with other wrappers.
        limit: consecutive bad steps of a worker, >= 1, after which `df.errors.NonFinite` is raised. On a GPU this is
            checked in every `limit`-th step, so that other steps do not wait for the GPU.

    Raises:
        ValueError: not an algorithm, or guarded already; `limit` is not an integer >= 1.
    """
    require_bare("guard", algorithm)
    require(limit >= 1, "guard", "a number of steps in a row, >= 1.", limit=limit)
    rule = "the algorithm is guarded already; guard it once."
    require(not algorithm.step.had("guard"), "guard(guard(algorithm))", rule)
    init, step = algorithm
    one = step.run

    def start(params: PyTree, buffers: PyTree = None) -> State:
        agree([describe("guard limit", limit)])
        state = init(params, buffers)
        zeros = [torch.zeros((), dtype=torch.int64, device=state.params[0].device) for _ in range(3)]
        return _with(state, Guarded(*zeros))

    def check(state: Any, batch: PyTree, t: Tensor) -> None:
        if getattr(getattr(state, "local", None), "guard", None) is None:
            raise ValueError(
                f"step(state, batch, t): the state is a {kind_of(state)} that is not guarded, but this step needs a "
                "guarded one; call the init that df.guard(...) returned with it."
            )
        if step.check is not None:
            step.check(_with(state, None), batch, t)

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        counts, old = state.local.guard, _with(state, None)
        assert counts is not None
        with gossip.guarded() as noted:
            new, metrics = one(old, batch, t)
        noted.updates.extend(
            (is_finite(after) | ~is_finite(before)).all()  # a mask of -inf is intended
            for before, after in zip(trees.leaves(old.buffers), trees.leaves(new.buffers), strict=True)
            if after.is_floating_point() or after.is_complex()
        )
        skipped, replaced = (_is_bad(checks, counts.skipped) for checks in noted)
        streak = (counts.in_a_row + 1) * (skipped | replaced)
        counts = Guarded(counts.skipped + skipped, counts.replaced + replaced, streak)
        return _with(_finite(new, old), counts), metrics._replace(guard=trees.map(torch.clone, counts))

    def watch(state: State, t: Tensor, overwrites: bool) -> None:
        assert state.local.guard is not None
        in_a_row = state.local.guard.in_a_row.view(-1)
        if functorch.has_no_value(in_a_row) or (in_a_row.device.type != "cpu" and int(t) % limit):
            return
        if int(in_a_row.max()) >= limit:
            error = _error(state.local.guard, int(t), limit, next_step=int(t) + 1 if overwrites else int(t))
            collectives.cut_short(int(t), error)
            raise error

    guarded = step.transformed("guard", run=run, check=check, watch=watch)
    return algorithm._replace(init=start, step=guarded)


def _with(state: State, counts: Guarded | None) -> State:
    return state._replace(local=state.local._replace(guard=counts))


def _is_bad(checks: Sequence[Tensor], like: Tensor) -> Tensor:
    good = torch.stack(list(checks)).all() if checks else torch.ones_like(like, dtype=torch.bool)
    return ~everywhere_within_worker(good, collectives.processes_per_worker())


def _finite(new: State, old: State) -> State:
    """Return the new state; bad elements keep their old value, and memory restarts if that is bad too."""
    if known_finite(trees.leaves((new.params, new.local.buffers, new.memory))):
        return new
    memory = new.memory
    first = memory.restart(new.params) if hasattr(memory, "restart") else memory

    def stays(new: PyTree, old: PyTree) -> PyTree:
        return trees.map(lambda n, o: finite_or(n, o, o), new, old)

    return State(
        Buckets(stays(list(new.params), list(old.params)), new.params.plan),
        new.local._replace(buffers=stays(new.local.buffers, old.local.buffers)),
        trees.map(lambda n, o, f: n if n is o else finite_or(n, o, f), memory, old.memory, first),  # `kit.rests`
    )


def _error(counts: Guarded, t: int, limit: int, next_step: int) -> NonFinite:
    skipped, replaced, in_a_row = (count.view(-1) for count in counts)
    row, here = int(in_a_row.argmax()), collectives.world()
    local = counts.in_a_row.shape[-1] if counts.in_a_row.dim() else 1  # without the runs of a sweep
    worker = here.workers(local)[row % local]
    return NonFinite(
        f"step(state, batch, t): worker {worker} has had infinite values or NaN in {int(in_a_row[row])} steps in a "
        f"row, the last at t={t} (df.guard(limit={limit})): in all {int(skipped[row])} steps with a bad gradient or "
        f"update, {int(replaced[row])} with bad messages. Look at its data and the learning rate; set parameters that "
        "no neighbor can repair with df.with_params.",
        worker=worker,
        process=here.rank,
        step=t,
        next_step=next_step,
    )
