"""`df.survive`: the others go on without a lost worker, in place, and only gradients move their mean."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, gather_objects, use, world
from decentfn.elastic.liveness import Liveness
from decentfn.testing import on_ranks
from decentfn.topologies.resized import enlarged, in_place
from tests import chaos, losses
from tests.ranks import free_port, lose_patience
from tests.run import survivors
from tests.run.survivors import ALGORITHMS, F64, RATE, gradient, loss_fn, start_params

STEPS = 8


def leave(step):
    """End this rank as a dead process does: its connections and its port are closed."""
    step.survivor._liveness._port.close()
    world().hang_up()


def train(rank, name, leaves, built=ALGORITHMS):
    init, step = built[name](loss_fn, 4)
    step = df.survive(step, patience=timedelta(seconds=60))
    state, seen = init(start_params(rank, name)), []
    for t in range(STEPS):
        if leaves.get(rank) == t:
            leave(step)
            break
        state, _ = step(state, gradient(rank, t), t)
        weight = getattr(state.memory, "weight", torch.ones((), dtype=F64))
        seen.append((state.params.tensors[0].clone(), float(weight), world().num_workers))
    return seen


@pytest.mark.parametrize("name", ["gossip", "push-sum", "choco"])
def test_only_gradients_move_the_mean_of_those_that_are_left(name):
    seen = on_ranks(4, train, name, {1: 3})
    assert [its[-1][2] for its in seen] == [3, 4, 3, 3] and [len(its) for its in seen] == [STEPS, 3, STEPS, STEPS]
    left = (0, 2, 3)
    # The steps before the loss are whole, so the mean starts from there; push-sum's weights are then 1.
    expected = sum(seen[i][2][0] for i in left) / 3
    for t in range(3, STEPS):
        expected = expected - RATE * sum(gradient(i, t) for i in left) / 3
        mean = sum(seen[i][t][0] * seen[i][t][1] for i in left) / 3
        assert (mean - expected).abs().max() < 1e-14


def test_those_that_are_left_take_the_steps_of_their_own_run():
    seen = on_ranks(4, train, "gossip", {1: 3})
    x = [seen[i][2][0] for i in (0, 2, 3)]
    schedule = df.topology("one-peer-exp", 4).without([1]).topology
    for t in range(3, STEPS):
        w = df.mixing_matrix(schedule, t)
        x = [sum(w[a, b] * x[b] for b in range(3)) - RATE * gradient(i, t) for a, i in enumerate((0, 2, 3))]
        for mine, i in zip(x, (0, 2, 3), strict=True):
            torch.testing.assert_close(mine, seen[i][t][0], rtol=0, atol=1e-14)


MEMORIES = {
    "tracking": ALGORITHMS["tracking"],
    "momentum": lambda loss, n: df.momentum_tracking(loss, df.sgd(RATE), df.topology("base", n)),
    "choco": ALGORITHMS["choco"],
    "beer": lambda loss, n: df.beer(
        loss, df.sgd(RATE), df.topology("static-ring", n), compressor=df.compressors.top_k(0.5), gamma=0.3
    ),
    "diloco": lambda loss, n: df.diloco(loss, df.sgd(RATE), df.topology("complete", n), inner_steps=2),
    "demo": lambda loss, n: df.demo(
        loss, df.sgd(RATE), df.topology("complete", n), compressor=df.compressors.top_k(0.5), learning_rate=RATE
    ),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_the_invariant_of_the_memory_holds_among_those_that_are_left(name):
    def train_to_the_end(rank):
        init, step = MEMORIES[name](loss_fn, 4)
        step = df.survive(step)
        state = init(start_params(0 if name == "demo" else rank, name))
        for t in range(STEPS):
            if rank == 1 and t == 3:
                leave(step)
                break
            state, _ = step(state, gradient(rank, t), t)
        return state

    states = [on for rank, on in enumerate(on_ranks(4, train_to_the_end)) if rank != 1]
    fields = [state.memory._asdict() for state in states]

    def rows(field):
        return torch.stack([its[field].tensors[0] for its in fields])

    x = torch.stack([state.params.tensors[0] for state in states])
    sums = {"choco": {"public": "pull"}, "beer": {"h": "pull_x", "s": "pull_v"}}
    if name in sums:
        w = df.mixing_matrix(in_place(df.topology("static-ring", 4), [1]), 0)
        for public, pull in sums[name].items():
            torch.testing.assert_close(rows(pull), w @ rows(public) - rows(public), rtol=0, atol=1e-14)
        if name == "beer":
            torch.testing.assert_close(rows("v").mean(0), rows("m").mean(0), rtol=0, atol=1e-14)
    elif name == "diloco":
        assert (rows("phi") == rows("phi")[0]).all() and rows("b").abs().max() > 0
    elif name == "demo":
        assert (x == x[0]).all() and rows("momentum").abs().max() > 0
    else:
        own = rows("g" if name == "tracking" else "u").mean(0)
        torch.testing.assert_close(rows("y").mean(0), own, rtol=0, atol=1e-14)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_lowest_that_is_left_writes_the_log_on(at, when, tmp_path):
    def train(rank):
        init, step = losses.of_row("adapt_while_communicate", "base")(3)
        step = df.survive(losses.dying(step, at, when) if rank == 0 else step, patience=timedelta(seconds=60))
        state, log = init(losses.start(rank, False)), df.logs.JSONLines(tmp_path / "log.jsonl")
        for t in range(STEPS):
            try:
                state, _ = step(state, torch.ones(1, dtype=F64), t)
            except losses.Gone:
                leave(step)
                break
            line = {"rank": rank}
            log.write(line, step=t)
            line["rank"] = None  # a dict may be written to, and another lowest one writes what it was
            log.write({"again": t}, step=t)
        if world().hooks.changes:
            log.write({"result": rank})
        log.close()
        return log.path

    left = on_ranks(3, train)
    assert left[1] == left[2]
    said = df.logs.read(left[1])
    assert said[1::2] == [{"step": t, "again": t} for t in range(STEPS)] and said[-1] == {"result": 1}
    assert [line["step"] for line in said[:-1:2]] == [*range(STEPS)]
    writers = [line["rank"] for line in said[:-1:2]]
    assert writers == sorted(writers) and writers[at:] == [1] * (STEPS - at)
    assert writers[: max(0, at - 1)] == [0] * (at - 1)  # of the last step of worker 0, both have a line


def test_records_after_a_loss_are_of_those_that_are_left_by_their_own_numbers_and_of_the_same_start(tmp_path):
    def train(rank):
        init, step = losses.of_row("adapt_while_communicate", "base")(3)
        step = df.survive(losses.dying(step, 2, "before") if rank == 0 else step, patience=timedelta(seconds=60))
        state, log = init(losses.start(rank, False)), df.logs.JSONLines(tmp_path / "log.jsonl")
        for t in range(STEPS):
            try:
                state, metrics = step(state, torch.ones(1, dtype=F64), t)
            except losses.Gone:
                leave(step)
                break
            with suppress(df.errors.PeerLost):  # of a call that the loss meets
                log.record(state, metrics, t)
        log.close()

    on_ranks(3, train)
    lines = df.logs.read(tmp_path / "log.jsonl")
    workers = [line["workers"] for line in lines if line["step"] != 2]
    assert workers == [[0, 1, 2]] * 2 + [[1, 2]] * (STEPS - 3)
    assert len({line["started"] for line in lines}) == 1
    for line in lines:
        ends = {i for link in line["links"] for i in link[:2]} | {i for i, *_ in line["waited"]}
        assert ends <= set(line["workers"]) and line["links"]


class ForgottenSend:
    """A group of gloo, of whose sums the one at `t` never ends, as when gloo loses a send with its connection.

    `waited`: the seconds of the waits for it that have ended.
    """

    def __init__(self, group, t):
        self._group, self._left, self.waited = group, t, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def allreduce(self, tensors):
        work, self._left = self._group.allreduce(tensors), self._left - 1
        return self if self._left == -1 else work

    def wait(self, *timeout):
        seconds = timeout[0].total_seconds() if timeout else 60
        time.sleep(seconds)
        self.waited.append(seconds)
        raise RuntimeError("Operation timed out!")


@pytest.mark.parametrize("where", [{1}, {1, 2, 3}])
def test_a_worker_whose_wait_does_not_end_hears_that_others_call_the_roll(where):
    """Nor does it free the group, which would await the sum."""
    groups = []

    def train_on(rank):
        if rank in where:
            world().channels.group = ForgottenSend(world().channels.group, 3)
            groups.append(weakref.ref(world().channels.group))
        return train(rank, "gossip", {0: 3})

    seen = on_ranks(4, train_on)
    assert [its[-1][2] for its in seen[1:]] == [3, 3, 3] and len(seen[1]) == STEPS
    gc.collect()
    assert all(group() is not None for group in groups)


@pytest.mark.parametrize(
    ("n", "name", "at", "is_blind"), [(4, "gossip", 5, True), (4, "diloco", 3, True), (3, "diloco", 3, False)]
)
def test_in_a_later_generation_too_a_worker_whose_sum_is_forgotten_hears_of_a_loss(n, name, at, is_blind, monkeypatch):
    """By the others' notes where it reaches nobody, of `diloco` only by that; by itself where it is the last one."""
    monkeypatch.setattr(Liveness, "is_gone", lambda its, seat: not its.is_blind and its.probe(seat) == "gone")
    monkeypatch.setattr(Liveness, "is_blind", False, raising=False)

    def run(rank):
        init, step = ALGORITHMS[name](loss_fn, n)
        step = df.survive(losses.dying(step, at, "after") if rank == 2 else step, patience=timedelta(seconds=60))
        state, waited = init(start_params(rank, name)), []
        for t in range(STEPS):
            if (rank, t) == (1, 2):
                return leave(step)
            if (rank, t) == (n - 1 if is_blind else 0, at):
                step.survivor._liveness.is_blind = is_blind
                world().channels.group = group = ForgottenSend(world().channels.group, 0)
                waited = group.waited
            try:
                state, _ = step(state, gradient(rank, t), t)
            except losses.Gone:
                return leave(step)
        return world().num_workers, world().hooks.changes, waited

    assert [on for on in on_ranks(n, run) if on] == [(n - 2, 2, [])] * (n - 2)


@pytest.mark.thorough
def test_what_waits_on_connections_of_its_own_ends_with_a_loss():
    """As a checkpoint's thread, which the next call awaits; of worker 0, whose neighbors in gloo's ring are 1 and 3."""
    done = threading.Event()

    def run(rank):
        init, step = ALGORITHMS["gossip"](loss_fn, 4)
        step, state, ended = df.survive(step), init(start_params(rank, "gossip")), []
        apart, timeout = world().apart(), world().channels.timeout
        gather_objects(None, apart)  # connects it

        def wait():
            with pytest.raises(df.errors.RunError):
                gather_objects(None, apart)
            ended.append(True)

        thread = threading.Thread(target=wait, daemon=True)
        for t in range(4):
            if (rank, t) == (2, 2):
                return leave(step)
            if (rank, t) == (0, 2):
                thread.start()
            state, _ = step(state, gradient(rank, t), t)
        if rank == 0:
            thread.join(60)
            done.set()
            assert ended
        assert done.wait(120)  # else a world that is released would end the wait
        return world().channels.timeout == timeout

    assert on_ranks(4, run) == [True, True, None, True]


class HalfWay(ForgottenSend):
    """A group whose messages never end once `ends` is False, as those that are half way when gloo loses their connection."""

    ends = True

    def _posted(self, post, *arguments):
        work = post(*arguments)
        return work if self.ends else self

    def __getattr__(self, name):
        found = getattr(self._group, name)
        return partial(self._posted, found) if name in ("send", "recv") else found


def test_a_worker_whose_messages_were_half_way_hears_of_the_loss_and_does_not_wait_for_each():
    buckets = 7

    def train_on(rank):
        if rank == 1:
            world().channels.group = group = HalfWay(world().channels.group, STEPS)
        init, step = df.adapt_while_communicate(loss_fn, df.sgd(RATE), df.topology("base", 4), bucket_mb=64e-6)
        step = df.survive(step, patience=timedelta(seconds=60))
        state = init({"x": torch.zeros(64, dtype=F64), **{f"y{i}": torch.zeros(64) for i in range(buckets - 1)}})
        for t in range(STEPS):
            if rank == 0 and t == 3:
                return leave(step)
            if rank == 1:
                group.ends = t < 3
            state, _ = step(state, gradient(rank, t), t)
        return world().num_workers, group.waited if rank == 1 else []

    seen = on_ranks(4, train_on)[1:]
    # One wait of a second is for all messages; the first one's, for the timeout, goes on in a thread.
    first, *others = sorted(seen[0][1], reverse=True)
    assert [workers for workers, _ in seen] == [3] * 3
    assert first <= 1.0 and len(others) > buckets and max(others) <= 0.01, seen[0][1]


def test_a_call_after_a_loss_connects_to_nobody_who_is_lost_meanwhile():
    """It is the first one outside steps: gloo itself would wait for that process's address, until the timeout."""

    def run(rank):
        init, step = ALGORITHMS["gossip"](loss_fn, 4)
        step, state = df.survive(step, patience=timedelta(seconds=60)), init(start_params(rank, "gossip"))
        for t in range(5):
            if (rank, t) in ((1, 2), (2, 4)):
                return leave(step)
            if t == 4:
                lose_patience()
                with pytest.raises(df.errors.PeerLost, match="exited"):  # no ExchangeTimeout
                    df.consensus_mean(state)
                lose_patience(timedelta(seconds=60))
            state, _ = step(state, gradient(rank, t), t)
        return world().num_workers

    assert on_ranks(4, run) == [2, None, None, 2]


@pytest.mark.parametrize(
    ("local", "when"),
    [
        (1, "before"),
        *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in ((2, "before"), (1, "after"), (2, "after"))),
    ],
)
def test_a_process_may_die_within_the_first_step(local, when):
    # Who dies before it is connected gives no sign, so the others may wait for all of their patience.
    kept, failed = losses.survived(losses.of_row("d2", "static-ring"), 3, {1: (0, when)}, local=local, patience=15)
    assert losses.faults(kept, failed, [0, 2], "d2", 0) == []


@pytest.mark.parametrize(
    "row", ["d2", *(pytest.param(row, marks=pytest.mark.thorough) for row in ("a2cid2", "power_gossip"))]
)
@pytest.mark.parametrize("joins", [pytest.param(None, marks=pytest.mark.thorough), 5])
def test_the_mean_of_those_that_are_left_is_kept_on_a_schedule_that_suits(row, joins):
    kept, failed = losses.survived(losses.of_row(row, "one-peer-exp"), 4, {1: (3, "after")}, joins=joins)
    assert losses.faults(kept, failed, [0, 2, 3] + [4] * bool(joins), row, 3) == []


def test_after_a_join_momentum_that_is_left_of_an_old_disagreement_moves_the_parameters_as_the_equation_says():
    """QGM without gradients: a ring of three agrees at once, in x but not in m, which a ring of four mixes no better than x."""
    kept, failed = losses.survived(losses.of_row("quasi_global_momentum", "static-ring"), 3, joins=2)
    assert not failed and sorted(kept) == [0, 1, 2, 3]
    first, end, W = min(kept[3]), max(kept[3]), df.mixing_matrix(df.topology("static-ring", 4), 0)

    def at(t, what=lambda state: state.params):
        return torch.stack([torch.cat(list(what(kept[seat][t]))) for seat in range(4)])

    x, m = at(first), at(first, lambda state: state.memory.m)
    assert (x - x.mean(0)).norm() < 1e-14 < (m - m.mean(0)).norm()
    for t in range(first, end):
        new = W @ (x - 0.9**2 * m)
        x, m = new, 0.9 * m + 0.1 * (x - new)
        assert (at(t + 1) - x).abs().max() < 1e-14
    # Per step the eigenvalues 1/3 and -1/3 of W shrink (x, m) by the largest eigenvalue of this recursion.
    rate = max(
        abs(torch.linalg.eigvals(torch.tensor([[w, -0.81 * w], [0.1 * (1 - w), 0.9 + 0.081 * w]]))).max()
        for w in (1 / 3, -1 / 3)
    )
    assert rate < 0.91 and losses.spread([kept[seat][end] for seat in range(4)]) < rate ** (end - first)


@pytest.mark.parametrize(
    "name",
    [
        *("d2", "choco_sgd"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("a2cid2", "power_gossip", "decentlam", "extra", "gasloc")
        ),
    ],
)
@pytest.mark.parametrize("sizes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_algorithm_goes_on_with_a_schedule_that_it_accepts(name, sizes):
    """Whoever is lost, and for whomever joins; on every schedule on which it can be built, of 5 or 6 workers in turn."""
    grid = zip(losses.SCHEDULES, itertools.cycle((6, 5)), strict=False)
    for schedule, n in grid if sizes == 1 else itertools.product(losses.SCHEDULES, (5, 6)):
        try:
            built = losses.of_row(name, schedule)(n)
        except ValueError:
            continue
        for lost in ([0], [1, 3], range(2, n), range(1, n)):
            losses.of_row(name, schedule, topology=in_place(built.step.topology, lost))(n)
        losses.of_row(name, schedule, topology=enlarged(built.step.topology, n + 1))(n)


def test_torchrun_with_several_processes_per_agent_is_told_that_they_end_together(monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for local, said in (("1", 0), ("4", 1)):
        caplog.clear()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        df.survive(ALGORITHMS["gossip"](loss_fn, 4).step)
        assert len([text for text in caplog.messages if "ends them all" in text]) == said


def test_one_worker_is_left_of_four():
    assert on_ranks(4, train, "gossip", {0: 2, 1: 4, 2: 4})[3][-1][2] == 1


def test_another_step_of_the_run_is_refused_once_a_worker_is_lost():
    """Its tracker holds the lost worker's gradient: it would go on to another minimum, in silence."""

    def train_two(rank):
        (init, step), (init_other, other) = (ALGORITHMS[name](loss_fn, 4) for name in ("gossip", "tracking"))
        step = df.survive(step)
        state, second = init(start_params(rank, "gossip")), init_other(start_params(rank, "tracking"))
        for t in range(4):
            if rank == 3 and t == 2:
                leave(step)
                return None
            state, _ = step(state, gradient(rank, t), t)
            if t < 2:
                second, _ = other(second, gradient(rank, t), t)
        with pytest.raises(ValueError, match="only the step of df.survive goes on"):
            other(second, gradient(rank, 2), 2)
        return int(step(state, gradient(rank, 4), 4)[0].params.taken_at)

    assert on_ranks(4, train_two) == [4, 4, 4, None]


def test_what_cannot_be_survived_is_refused():
    init, step = ALGORITHMS["gossip"](loss_fn, 4)
    for call in (lambda: df.survive(df.donate(step)), lambda: df.survive(df.compile(step)), lambda: df.survive(1)):
        with pytest.raises(ValueError, match=r"survive\("):
            call()
    with pytest.raises(ValueError, match=r"survive\(patience="):
        df.survive(step, patience=timedelta(0))
    several = World(Channels(replace(Identity.of(0, 2), processes_per_worker=2)))
    on_gpus = World(Channels(Identity.of(0, 2, torch.device("cuda"))))
    for here, kind in ((several, "workers of 2 processes"), (on_gpus, "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0")):
        with use(here), pytest.raises(ValueError, match=kind):
            df.survive(step)
    with pytest.raises(ValueError, match="another step of this run survives already"):
        on_ranks(4, lambda rank: [train(rank, "gossip", {}) for _ in range(2)])
    each = df.gasloc(loss_fn, df.sgd(RATE), df.topology("base", 4), inner_steps=[1, 2, 3, 4], outer_momentum=0.5)
    with use(World(Channels(Identity.of(0, 4)))), pytest.raises(ValueError, match="accepts no schedule in place of"):
        df.survive(each.step)
    relay = {"relay": lambda loss, n: df.relay_sgd(loss, df.sgd(RATE), df.topology("chain", n))}
    with pytest.raises(ValueError, match="accepts no schedule in place of"):
        on_ranks(4, train, "relay", {}, relay)


# -- processes that are killed ------------------------------------------------------------------------------------------


def assert_survived(lines, *, graphs):
    last = [its[-1] for its in lines]
    assert [its.get("end") for its in last] == ["done", None, "done", None]
    assert [its[-2]["workers"] for its in (lines[0], lines[2])] == [2, 2]
    assert survivors.error_of_mean(lines) < 1e-14
    for its in lines:
        assert {line["graphs"] for line in its if "graphs" in line} == {graphs}
        gaps = [
            b["at"] - a["at"]
            for a, b in zip(its, its[1:], strict=False)
            if b.get("generation", 0) > a.get("generation", 0)
        ]
        assert all(gap < survivors.WAITED_S for gap in gaps), gaps


@pytest.mark.thorough
def test_processes_are_killed_or_stopped_and_the_others_go_on(tmp_path):
    """Between steps, or within the first or second step, compiled and simulated."""
    stopped = {"stops": [2, 5], "signals": [(2, "the others", signal.SIGCONT)], "patience": 10}
    early = [
        {"algorithm": name, "local": local, "backend": backend, "within": [1, t]}
        for name, local, backend, t in (("d2", 2, None, 0), ("gossip", 2, "eager", 0), ("push-sum", 1, None, 1))
    ]
    killed, compiled, woken, *others = survivors.results(
        tmp_path,
        [
            {"algorithm": "push-sum", "dies": {3: 4, 1: 8}},
            {"algorithm": "tracking", "backend": "eager", "dies": {3: 4, 1: 8}},
            {"algorithm": "gossip"} | stopped,
            *early,
        ],
    )
    assert_survived(killed, graphs=0)
    assert_survived(compiled, graphs=1)
    assert [its[-1]["end"] for its in woken] == ["done", "done", "LeftBehind", "done"]
    assert woken[0][-2]["workers"] == 3 and survivors.error_of_mean(woken) < 1e-14
    for job, lines in zip(early, others, strict=True):
        assert [its[-1].get("end") if its else None for its in lines] == ["done", None, "done", "done"], job
        assert survivors.error_of_mean(lines) < 1e-14 and lines[0][-2]["workers"] == 3


@pytest.mark.thorough
def test_a_short_chaos_has_no_bad_end(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "KINDS", ("exception in the loss", "two at once"))
    for name, seconds in (("TIMEOUT", 60), ("PATIENCE", 20), ("LATEST", 65)):  # a busy machine
        monkeypatch.setattr(chaos, name, seconds)
    assert chaos.main(1, tmp_path / "chaos") == []


@pytest.mark.thorough
@pytest.mark.parametrize("cases", [losses.schedules, losses.wrappers])
def test_no_combination_loses_the_mean_of_those_that_are_left(cases):
    """A few of those of `python -m tests.losses`."""
    some = list(cases())[:: 310 if cases is losses.schedules else 210]
    assert {str(case): said for case in some if (said := losses.outcome(case)) not in losses.FINE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_every_kind_of_algorithm_goes_from_four_to_three_to_two_workers(backend, tmp_path):
    jobs = [{"algorithm": name, "backend": backend, "dies": {3: 4, 1: 8}} for name in ALGORITHMS]
    for lines in survivors.results(tmp_path, jobs):
        assert_survived(lines, graphs=int(backend is not None))


RANK = """
import json, os, sys
from tests.run import survivors
survivors.main(json.loads(sys.argv[1]), int(os.environ["RANK"]))
"""


@pytest.mark.slow
def test_an_agent_of_torchrun_is_killed_and_the_other_agents_workers_go_on(tmp_path):
    port = free_port()
    spec = survivors.DEFAULTS | {
        "algorithm": "gossip",
        "folder": str(tmp_path),
        "pause": 0.1,
        "steps": 100,
        "timeout": 60,
    }
    (tmp_path / "rank.py").write_text(RANK)
    agents = []
    for node in range(2):
        torchrun = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "0", "--node-rank", str(node)]
        place = ["--master-addr", "127.0.0.1", "--master-port", str(port), str(tmp_path / "rank.py"), json.dumps(spec)]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *place]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        agents.append(subprocess.Popen(command, env=environment))
    try:
        until(lambda: min(map(len, survivors.said(tmp_path, 4))) > 3)
        agents[1].kill()  # its workers end by themselves
        until(lambda: all("end" in its[-1] for its in survivors.said(tmp_path, 2)))
    finally:
        for agent in agents:  # the first would wait for the other
            agent.kill()
            agent.wait()
    lines = survivors.said(tmp_path, 4)
    assert [its[-1]["end"] for its in lines[:2]] == ["done"] * 2 and [its[-2]["workers"] for its in lines[:2]] == [2, 2]
    assert survivors.error_of_mean(lines) < 1e-14


def until(is_so):
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.2)
