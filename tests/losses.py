"""Losses, joins and resizes with every algorithm, schedule and wrapper, on ranks that are threads; processes: `tests.chaos`.

python -m tests.losses [schedules | wrappers | resizes] [K]        prints what is not right, and counts; each K-th case
"""

import itertools
import logging
import re
import sys
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import torch

import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, use, world
from decentfn.core import trees
from decentfn.elastic.generation import generation_of
from decentfn.elastic.joining import wait_for_run
from decentfn.testing import mean_is_preserved, on_ranks
from tests.contract import ROWS

F64 = torch.float64
SCHEDULES = ("one-peer-exp", "base", "ring", "static-ring", "static-exp", "complete", "random-matching", "star")
DIRECTED = ("one-peer-exp-directed",)
PUSH_SUM = ("stochastic_gradient_push", "push_diging")
MIXING_MOMENTUM = (
    "quasi_global_momentum",
    "decentlam",
    "slowmo",
    "noloco",
    "noloco, 8 bits",
    "gasloc",
    "factored_gossip_diloco",
    "stochastic_gradient_push, delayed",
)
"""Their momentum is what mixing has moved, and goes on without the lost worker's part; or messages are in flight."""
FINE = ("right", "refused", "not accepted", "newcomer refused")
AFTER = 30
"""Steps after the last change."""


class Gone(Exception):
    """A process that has died."""


def loss_fn(params, batch):
    return sum((leaf * batch).sum() for leaf in params.values())


def with_buffers(params, buffers, batch):
    return loss_fn(params, batch), ({"b": buffers["b"] + 1}, None)


def of_row(row, schedule, loss=loss_fn, topology=None):
    """`num_workers -> Algorithm` of a row of the contract on a schedule by name, or on this one."""
    algorithm, options = ROWS[row].algorithm, ROWS[row].hyperparameters
    return lambda n: algorithm(loss, df.sgd(0.01), topology or df.topology(schedule, n), **options)


def start(worker, equal):
    """Unequal starts, but where an algorithm refuses them."""
    draw = torch.Generator().manual_seed(0 if equal else worker)
    return {"w": torch.randn(6, 5, generator=draw, dtype=F64), "v": torch.randn(7, generator=draw, dtype=F64)}


WRAPPERS = {
    "none": lambda build: build,
    "guard": lambda build: lambda n: df.guard(build(n)),
    "ema": lambda build: lambda n: df.ema(build(n), 0.9),
    "guard, ema": lambda build: lambda n: df.ema(df.guard(build(n)), 0.9),
}
LOSSES = {
    "plain": lambda: loss_fn,
    "by autograd": lambda: df.autograd(loss_fn),
    "accumulated": lambda: df.accumulate(loss_fn),
    "scaled": lambda: df.dynamic_loss_scale(loss_fn),
}


def leave(step):
    """End this rank as a dead process does: its connections and its port are closed."""
    step.survivor._liveness._port.close()
    world().hang_up()


def dying(step, at, when):
    """The step, in which this rank dies: before it has sent anything, or when it has sent all."""

    def run(state, batch, t):
        if int(t) == at and when == "before":
            raise Gone
        result = step.run(state, batch, t)
        if int(t) == at:
            raise Gone
        return result

    return replace(step, run=run)


def survived(build, n, deaths=None, *, local=1, equal=False, joins=None, batch=None, wrap=None):
    """States of those that end, by seat, and the means of these workers before the change and at the end.

    `deaths`: rank -> (step, when); `joins`: a step, from which on rank 0 lets a process join.
    """
    deaths, kept, failed = deaths or {}, {}, []
    last = max([t for t, _ in deaths.values()] + [joins or 0])
    stacked = (lambda step: df.simulate(step, local)) if local > 1 else (lambda step: step)
    batch = batch or (lambda t: torch.zeros(1, dtype=F64))

    def made(seat, its_world_size):
        init, step = build(its_world_size * local)
        states = [init(start(seat * local + i, equal)) for i in range(local)]
        state = states[0] if local == 1 else trees.map(lambda *x: torch.stack(x), *states)
        return state, stacked(step)

    def given(t):
        one = batch(t)
        return one if local == 1 else one.expand(local, *one.shape).clone()

    def train(step, state, t, seat):
        end, seen = None if joins is not None else last + AFTER, {}
        until = time.monotonic() + 300
        while t != end:
            if time.monotonic() > until:
                raise TimeoutError("nobody has joined")
            seen[t] = state
            state, _ = step(state, given(t), t)
            if end is None and (n in generation_of(world()).members.seats or failed):
                end = max(t, last) + AFTER
            t += 1
            time.sleep(0.001 if joins is not None else 0)
        kept[seat] = seen | {t: state}

    def come(store):
        try:
            with use(wait_for_run(World(Channels(Identity.of(0, 1))), store, timedelta(seconds=60))):
                state, step = made(n, world().num_workers)
                step = df.survive(step)
                state, first = df.join(step, state, given(0))
                train(step, state, first, n)
        except BaseException as error:
            failed.append(error)

    def on_this_rank(rank):
        state, step = made(rank, n)
        if rank in deaths:
            step = dying(step, *deaths[rank])
        step, newcomer = df.survive(step, patience=timedelta(seconds=60)), None
        if rank == 0 and joins is not None:
            newcomer = threading.Thread(target=come, args=(world().store,))
            newcomer.start()
        try:
            train(step, state, 0, rank)
        except Gone:
            leave(step)
        if newcomer is not None:
            newcomer.join()

    on_ranks(n, on_this_rank)
    return kept, failed


def mean(states):
    """The mean of x over some processes' workers; of push-sum that of w z."""
    weights = [getattr(memory_of(state), "weight", None) for state in states]
    weighs = set(PUSH_SUM) & {type(memory_of(state)).__module__.rpartition(".")[2] for state in states}
    total = []
    for state, w in zip(states, weights, strict=True):
        x = torch.cat([b.double() for b in state.params], -1)
        x = x.view(-1, x.shape[-1])
        total.append(x * (w.double().view(-1, 1) if weighs else 1))
    return torch.cat(total).mean(0)


def memory_of(state):
    """The algorithm's memory, below those of wrappers."""
    memory = state.memory
    while hasattr(memory, "inner"):
        memory = memory.inner
    return memory


def spread(states, *, with_memory=False):
    """Disagreement of some processes' workers: in the parameters, or also in the memory that stays and moves them later."""

    def rows(state):
        its, n = memory_of(state), state.params[0].shape[:-1].numel()
        stays = [getattr(its, name) for name in getattr(its, "averaged", ())] if with_memory else []
        return torch.cat([leaf.double().reshape(n, -1) for leaf in trees.leaves([list(state.params), stays])], -1)

    x = torch.cat(list(map(rows, states)))
    return float((x - x.mean(0)).norm())


def faults(kept, failed, expected, row, before):
    """What is wrong with a run: an end, a mean that has moved without gradients, disagreement that has grown."""
    if failed:
        return [f"a newcomer failed: {type(failed[0]).__name__}: {failed[0]}"]
    if sorted(kept) != expected:
        return [f"{sorted(kept)} have ended, not {expected}"]
    ends = {max(its) for its in kept.values()}
    if len(ends) != 1:
        return [f"they have ended at different steps {ends}"]
    end = [its[max(its)] for its in kept.values()]
    wrong = []
    if not all(bool(torch.isfinite(b).all()) for state in end for b in state.params):
        wrong.append("not finite")
    firsts = [s for s in (before - 1, before, before + 1) if s >= 0 and all(s in its for its in kept.values())]
    if not firsts:  # a newcomer: from its first step on
        firsts = [max(min(its) for its in kept.values())]
    olds = [[its[s] for its in kept.values()] for s in firsts]
    if (mean_is_preserved in ROWS[row].laws or row.startswith(PUSH_SUM)) and row not in MIXING_MOMENTUM:
        moved = min(float((mean(old) - mean(end)).abs().max()) for old in olds)
        if moved > 1e-9:
            wrong.append(f"the mean has moved by {moved:.1e}")
    if not ROWS[row].starts_equal and row != "quasi_global_adam":
        could = max(spread(old, with_memory=True) for old in olds)
        if spread(end) > 3 * could + 1e-9:
            wrong.append(f"disagreement has grown from {could:.1e} to {spread(end):.1e}")
    elif row in ("all_reduce", "demo") and spread(end) > 1e-12:
        wrong.append("replicas differ")
    return wrong


def outcome(case):
    """ "refused", "right", or what is wrong."""
    row, schedule, wrapper, loss, n, local, deaths, joins = case
    equal = ROWS[row].starts_equal
    build = WRAPPERS[wrapper](of_row(row, schedule, LOSSES[loss]()))
    batch = (lambda t: torch.zeros(2, 1, dtype=F64)) if loss == "accumulated" else None
    try:
        build(n * local)
    except ValueError:
        return "not accepted"
    try:
        kept, failed = survived(build, n, deaths, local=local, equal=equal, joins=joins, batch=batch)
    except ValueError as error:
        return (
            "refused"
            if re.search("accepts no schedule in place of|wait for nobody", str(error))
            else f"{type(error).__name__}: {error}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected = [seat for seat in range(n) if seat not in deaths] + ([n] if joins is not None else [])
    before = max([t for t, _ in deaths.values()] + [joins or 0])
    if failed and "cannot have" in str(failed[0]):
        return "newcomer refused"
    return "; ".join(faults(kept, failed, expected, row, before)) or "right"


def schedules():
    """Every algorithm on every schedule: a loss early and late, two losses, a join."""
    for row, schedule in itertools.product(ROWS, SCHEDULES + DIRECTED):
        for n, deaths, joins in (
            (4, {1: (3, "after")}, None),
            (4, {0: (2, "before"), 3: (9, "after")}, None),
            (5, {4: (6, "before")}, None),
            (3, {}, 2),
            (4, {2: (3, "after")}, 5),
        ):
            yield row, schedule, "none", "plain", n, 1, deaths, joins


def wrappers():
    """Every wrapper with a loss in the first, the second and a later step."""
    for row in ("adapt_while_communicate", "d2", "power_gossip", "choco_sgd", "gradient_tracking, atc", "all_reduce"):
        its = "static-ring" if row == "choco_sgd" else "one-peer-exp"
        for wrapper, loss, local, t, when in itertools.product(
            WRAPPERS, LOSSES, (1, 2), (0, 1, 5), ("before", "after")
        ):
            yield row, its, wrapper, loss, 4, local, {1: (t, when)}, None


def resizes():
    """Every algorithm on every schedule, from N workers to those of `without` and of `resized`."""
    for row, schedule, n in itertools.product(ROWS, SCHEDULES + DIRECTED, (4, 5)):
        for change in (
            lambda it: it.without([1]),
            lambda it: it.resized(it.num_workers + 1),
            lambda it: it.without([0, 2]),
        ):
            yield row, schedule, n, change


def of_resize(case):
    """As `outcome`, of `df.resize` in the simulator: "refused" where the algorithm refuses the schedule in its place."""
    row, schedule, n, change = case
    build, equal = of_row(row, schedule), ROWS[row].starts_equal
    try:
        old = build(n)
    except ValueError:
        return "not accepted"
    try:
        new = of_row(row, schedule, topology=change(old.topology).topology)(n)
    except ValueError:
        return "refused"
    states = [old.init(start(i, equal)) for i in range(n)]
    state, kept, zero = trees.map(lambda *x: torch.stack(x), *states), {}, torch.zeros(1, dtype=F64)
    for t in range(5):
        state, _ = df.simulate(old.step, n)(state, zero.expand(n, 1).clone(), t)
    was = df.consensus_mean(state)
    state, m = df.resize(state, new), new.topology.num_workers
    kept[5] = state
    off = max(float((a - b).abs().max()) for a, b in zip(was.values(), df.consensus_mean(state).values(), strict=True))
    for t in range(5, 5 + AFTER):
        state, _ = df.simulate(new.step, m)(state, zero.expand(m, 1).clone(), t)
        kept[t + 1] = state
    return (
        "; ".join(faults({0: kept}, [], [0], row, 5) + [f"resize moved the mean by {off:.1e}"] * (off > 1e-12))
        or "right"
    )


def main(what="schedules", part="1"):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("decentfn").setLevel(logging.ERROR)
    counts = Counter()
    cases = list({"schedules": schedules, "wrappers": wrappers, "resizes": resizes}[what]())[:: int(part)]
    for case in cases:
        said = of_resize(case) if what == "resizes" else outcome(case)
        kind = said if said in FINE else "wrong"
        counts[kind] += 1
        if kind != "right" and kind != "not accepted":
            print(*case, said, flush=True)
    print(len(cases), dict(counts))
    return counts["wrong"]


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
