"""Losses, joins and resizes with every algorithm, schedule and wrapper, on ranks that are threads; processes: `tests.chaos`.

python -m tests.losses [FOLDER] [PROCESSES]        all cases; prints what is not right, and counts

FOLDER keeps a line per case, so that a run that was killed goes on where it was; about 100 minutes of one core.
"""

import faulthandler
import itertools
import logging
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch

import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, use, world
from decentfn.core import trees
from decentfn.elastic.generation import generation_of
from decentfn.elastic.joining import wait_for_run
from decentfn.testing import mean_is_preserved, on_ranks
from decentfn.topologies.registry import of_size
from tests.contract import ROWS

F64 = torch.float64
SCHEDULES = ("one-peer-exp", "base", "ring", "static-ring", "static-exp", "complete", "random-matching", "star")
DIRECTED = ("one-peer-exp-directed",)
OTHERS = tuple(name for name in of_size(4, 2) if name not in SCHEDULES + DIRECTED)
NODES = {"hierarchical": 2, "alternating-exp-ring": 2}
"""Workers per node of the families that ask for it."""
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
HANGS = 900
"""Seconds after which a case has hung, on a machine as busy as it may be."""


class Gone(Exception):
    """A process that has died."""


def loss_fn(params, batch):
    return sum((leaf * batch).sum() for leaf in params.values())


def with_buffers(params, buffers, batch):
    return loss_fn(params, batch), ({"b": buffers["b"] + 1}, None)


def of_row(row, schedule, loss=loss_fn, topology=None):
    """`num_workers -> Algorithm` of a row of the contract on a schedule by name, or on this one."""
    algorithm, options = ROWS[row].algorithm, ROWS[row].hyperparameters
    return lambda n: algorithm(loss, df.sgd(0.01), topology or on(schedule, n), **options)


def on(schedule, n):
    """The topology of this name; ValueError if there is none of this size."""
    nodes = {"local_world_size": NODES[schedule]} if schedule in NODES else {}
    return df.topology(schedule, n, **nodes)


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


def survived(build, n, deaths=None, *, local=1, equal=False, joins=None, batch=None, wrap=None, patience=60):
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
        step, newcomer = df.survive(step, patience=timedelta(seconds=patience)), None
        if rank == 0 and joins is not None:
            newcomer = threading.Thread(target=come, args=(world().channels.store,))
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
        total.append(x * (w.double().view(-1, 1) if weighs and w is not None else 1))
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
            if re.search("accepts no schedule in place of|waits? for nobody", str(error))
            else f"{type(error).__name__}: {error}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected = [seat for seat in range(n) if seat not in deaths] + ([n] if joins is not None else [])
    before = max([t for t, _ in deaths.values()] + [joins or 0])
    if failed and "cannot have" in str(failed[0]):
        return "newcomer refused"
    return "; ".join(faults(kept, failed, expected, row, before)) or "right"


EVENTS = (
    (4, {1: (3, "after")}, None),
    (4, {0: (2, "before"), 3: (9, "after")}, None),
    (5, {4: (6, "before")}, None),
    (3, {}, 2),
    (4, {2: (3, "after")}, 5),
)
"""Processes, losses, and the step from which on one may join: a loss early and late, two losses, a join, both."""

CHANGES = {
    "one less": lambda it: it.without([1]),
    "one more": lambda it: it.resized(it.num_workers + 1),
    "two less": lambda it: it.without([0, 2]),
}


def schedules():
    """Every algorithm on every schedule with each event; on those that are rarely used with two of them."""
    for (i, row), schedule in itertools.product(enumerate(ROWS), SCHEDULES + DIRECTED + OTHERS):
        events = EVENTS if schedule not in OTHERS else (EVENTS[i % 3], EVENTS[3 + i % 2])
        for n, deaths, joins in events:
            yield row, schedule, "none", "plain", n, 1, deaths, joins


@cache
def accepted(row):
    """A schedule that the algorithm accepts, and that stays one of its size after a loss."""
    for schedule in ("one-peer-exp", "static-ring", "random-matching", "complete", "chain", "binary-tree"):
        try:
            of_row(row, schedule)(4)
        except ValueError:
            continue
        return schedule
    raise ValueError(row)


def wrappers():
    """Every wrapper with a loss in the first, the second and a later step, and with a join.

    Six algorithms with all of it; the others with every pair of wrapper and loss function, and the rest in turn.
    """
    rest = [*itertools.product((1, 2), (0, 1, 5), ("before", "after"))]
    for i, row in enumerate(ROWS):
        its, pairs = accepted(row), [*itertools.product(WRAPPERS, LOSSES)]
        whole = row in (
            "adapt_while_communicate",
            "d2",
            "power_gossip",
            "choco_sgd",
            "gradient_tracking, atc",
            "all_reduce",
        )
        for k, (wrapper, loss) in enumerate(pairs):
            for local, t, when in rest if whole else [rest[(5 * k + i) % len(rest)]]:
                yield row, its, wrapper, loss, 4, local, {1: (t, when)}, None
            if whole or (i + k) % 4 == 0:
                yield row, its, wrapper, loss, 3, 1 + k % 2, {}, 2


def resizes():
    """Every algorithm on every schedule, from N workers to those of `without` and of `resized`; and in every wrapper."""
    for row, schedule, n in itertools.product(ROWS, SCHEDULES + DIRECTED + OTHERS, (4, 5)):
        for change in CHANGES:
            yield row, schedule, "none", "plain", n, change
    for row, wrapper, loss, change in itertools.product(ROWS, WRAPPERS, LOSSES, CHANGES):
        if (wrapper, loss) != ("none", "plain"):
            yield row, accepted(row), wrapper, loss, 4, change


def of_resize(case):
    """As `outcome`, of `df.resize` in the simulator: "refused" where the algorithm refuses the schedule in its place."""
    row, schedule, wrapper, loss, n, change = case
    equal, its = ROWS[row].starts_equal, LOSSES[loss]()
    try:
        old = WRAPPERS[wrapper](of_row(row, schedule, its))(n)
    except ValueError:
        return "not accepted"
    try:
        new = WRAPPERS[wrapper](of_row(row, schedule, its, CHANGES[change](old.topology).topology))(n)
    except ValueError:
        return "refused"
    states = [old.init(start(i, equal)) for i in range(n)]
    state, kept, zero = trees.map(lambda *x: torch.stack(x), *states), {}, torch.zeros(1, dtype=F64)
    zero = zero.expand(2, 1) if loss == "accumulated" else zero
    for t in range(5):
        state, _ = df.simulate(old.step, n)(state, zero.expand(n, *zero.shape).clone(), t)
    was = df.consensus_mean(state)
    state, m = df.resize(state, new), new.topology.num_workers
    kept[5] = state
    off = max(float((a - b).abs().max()) for a, b in zip(was.values(), df.consensus_mean(state).values(), strict=True))
    for t in range(5, 5 + AFTER):
        state, _ = df.simulate(new.step, m)(state, zero.expand(m, *zero.shape).clone(), t)
        kept[t + 1] = state
    return (
        "; ".join(faults({0: kept}, [], [0], row, 5) + [f"resize moved the mean by {off:.1e}"] * (off > 1e-12))
        or "right"
    )


def cases():
    """All cases by their text, shuffled: what is done of them at any time is a sample."""
    its = [(outcome, case) for make in (schedules, wrappers) for case in make()]
    its += [(of_resize, case) for case in resizes()]
    random.Random(0).shuffle(its)
    return {" ".join(map(str, case)): (of, case) for of, case in its}


def said(folder):
    """What has been said of each case in the records of a folder; "begun": nothing yet."""
    lines = [line for record in sorted(folder.iterdir()) for line in record.read_text().splitlines()]
    pairs = [line.rpartition("\t")[::2] for line in lines]
    ends = {case: what for case, what in pairs if what != "begun"}
    tried = Counter(case for case, what in pairs if what == "begun")
    return ends, {case for case, times in tried.items() if case not in ends and times > 1}


def work(folder, part, of):
    """Try each `of`-th case that has no end yet; one that hangs twice ends this process with its stacks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("decentfn").setLevel(logging.ERROR)
    ends, hung = said(folder)
    with open(folder / f"{part}.txt", "a", buffering=1) as record:
        for i, (text, (try_it, case)) in enumerate(cases().items()):
            if i % of != part or text in ends or text in hung:
                continue
            record.write(f"{text}\tbegun\n")
            faulthandler.dump_traceback_later(HANGS, exit=True)
            try:
                what = try_it(case)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
            faulthandler.cancel_dump_traceback_later()
            record.write(f"{text}\t{' '.join(what.split())}\n")


def main(folder=None, processes="2"):
    with tempfile.TemporaryDirectory() as temporary:
        path, many = Path(folder or temporary), int(processes)
        path.mkdir(parents=True, exist_ok=True)

        def until_done(part):
            code = "import sys; from tests.losses import *; work(Path(sys.argv[1]), *map(int, sys.argv[2:]))"
            command = [sys.executable, "-c", code, str(path), str(part), processes]
            for _ in range(20):  # a case that has hung is tried twice
                if not subprocess.run(command).returncode:
                    break

        threads = [threading.Thread(target=until_done, args=(part,)) for part in range(many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends, hung = said(path)
    wrong = {case: what for case, what in ends.items() if what not in FINE} | dict.fromkeys(hung, "hung")
    for case, what in wrong.items():
        print(case, what)
    kinds, missing = Counter(what for what in ends.values() if what in FINE), len(cases()) - len(ends) - len(hung)
    print(len(cases()), "cases:", dict(kinds), len(wrong), "wrong", missing, "not tried")
    return len(wrong) + missing


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
