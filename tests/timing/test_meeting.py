"""Where features of workers on their own clocks meet: what a user does by mistake is refused, and mass stays."""

import random
import threading
import time
from functools import partial

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.planning import Cluster, Link
from decentfn.testing import on_ranks
from decentfn.timing import Exchange, Trace, schedule_name
from decentfn.train.own_steps import memory_of
from tests.timing.test_asynchronous import ONE_PEER, N, batch, loss_fn, nothing, starts
from tests.timing.traces import random_trace, replayed

MAKE = [df.asynchronous_gradient_push, partial(df.asynchronous_diloco, inner_steps=2)]


def built(make, loss=loss_fn, **options):
    return make(loss, df.sgd(0.1), ONE_PEER, **options)


# -- mail is taken once -------------------------------------------------------------------------------------------------


def mistaken(rank, make, kind):
    """Ten steps; then the mistake, and the words of the error."""
    is_bad = []

    @df.autograd
    def loss(params, batch):
        if is_bad:
            raise KeyError("a bad file")
        return loss_fn(params, batch)

    init, step = built(make, loss)
    state = init(starts()[rank])
    for t in range(10):
        state, _ = step(state, batch(rank, t), t)
    used, t, at = state, 10, 10
    if kind.startswith("a copy from before"):
        used, before = trees.map(torch.clone, used), used
        state = df.settle(before) if kind.endswith("settling") else step(before, batch(rank, t), t)[0]
        at += kind.endswith("at the next step")
    elif kind == "a sibling":
        state, used = df.set_learning_rate(used, 0.2), df.with_params(used, df.params(used))  # either may go on, once
        state, _ = step(state, batch(rank, t), t)
    elif kind == "a step twice":
        state, _ = step(used, batch(rank, t), t)
    elif kind == "a settled state's forerunner":
        state = df.settle(used)
    elif kind == "init again":
        state, t = init(starts()[rank]), 0
    else:
        is_bad.append(True)
        with pytest.raises(KeyError, match="a bad file"):
            step(used, batch(rank, t), t)
        is_bad.clear()
    with pytest.raises((ValueError, RuntimeError)) as error:
        step(used, batch(rank, at), at)
    with pytest.raises(ValueError, match="mail is taken once"):
        df.settle(used)
    if kind != "a loss that raises":
        t += kind not in ("a settled state's forerunner", "a copy from before a settling", "init again")
        step(state, batch(rank, t), t)
    return str(error.value)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a step twice", "mail is taken once"),
        ("a settled state's forerunner", "mail is taken once"),
        ("a copy from before", "mail is taken once"),
        ("a copy from before, at the next step", "mail is taken once"),
        ("a copy from before a settling", "mail is taken once"),
        ("a sibling", "mail is taken once"),
        ("init again", "or a later init"),
        ("a loss that raises", "mail that it took is gone"),
    ],
)
def test_a_state_whose_mail_was_taken_is_not_used_again(make, kind, words):
    """The mass that it took would be lost."""
    assert all(words in error for error in on_ranks(N, mistaken, make, kind))


def teacher_and_student(rank, make, gossips, teacher_first, own_steps):
    """The parameters of 8 steps of gossip, and the mass of workers that take so many own steps before each of them."""
    init, step = gossips(loss_fn, df.sgd(0.1), ONE_PEER)
    own, teacher = built(make), init(starts()[0]) if teacher_first else None
    student, k = own.init(starts()[rank]), 0
    teacher = teacher or init(starts()[0])
    for t in range(8):
        for _ in range(own_steps(rank, t)):
            student, _ = own.step(student, batch(rank, k), k)
            k += 1
        teacher, _ = step(teacher, batch(rank, t), t)
        if t == 3:
            student = df.settle(student)
            df.check_replicas(teacher, [df.consensus_mean(student), df.consensus_distance(teacher)])
    x = {name: value.tolist() for name, value in df.params(teacher).items()}
    return x, float(memory_of(df.settle(student)).weight)


@pytest.mark.parametrize(
    ("make", "gossips", "teacher_first", "own_steps"),
    [
        (MAKE[0], df.adapt_while_communicate, False, lambda rank, t: 5 * (rank + 1) * (t % 4 == 0)),
        (MAKE[1], partial(df.diloco, inner_steps=2), True, lambda rank, t: rank + 1),
    ],
)
def test_workers_on_their_own_clocks_disturb_no_state_that_steps_together(make, gossips, teacher_first, own_steps):
    """Each rank takes another number of own steps: they are no calls that ranks would compare."""
    alone = on_ranks(N, teacher_and_student, make, gossips, teacher_first, lambda rank, t: 0)
    out = on_ranks(N, teacher_and_student, make, gossips, teacher_first, own_steps)
    assert [teacher for teacher, _ in out] == [expected for expected, _ in alone]
    assert sum(weight for _, weight in out) == pytest.approx(N, abs=1e-12)


def test_a_replayed_state_is_settled_by_its_trace_at_its_end():
    """Without it, what was taken is in the ring still, and would be taken again."""
    algorithm, trace = built(df.asynchronous_gradient_push, nothing), random_trace(ONE_PEER, 80, 0)
    with pytest.raises(ValueError, match=r"pass arrivals=trace"):
        df.settle(replayed(algorithm, trace, starts(), batch))
    state, step = (
        df.stack(algorithm.init(starts()[0]), N, arrivals=trace),
        df.simulate(algorithm.step, N, arrivals=trace),
    )
    for level in range(len(trace.levels) // 2):
        state, _ = step(state, torch.zeros(N, dtype=torch.float64), level)
    with pytest.raises(ValueError, match=rf"level {level} of {len(trace.levels)}"):
        df.settle(state, arrivals=trace)


def run_with_gap(rank, make, settles):
    init, step = built(make)
    state = init(starts()[rank])
    for t in (0, 1, 2, 6, 7, 8):
        state = df.settle(state) if t == 6 and settles else state
        t += 3 * (t > 2 and rank == 0 and not settles)
        state, _ = step(state, batch(rank, t), t)
    state = df.settle(state)
    try:
        return df.trace().first
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*rounds of the schedule are left out")
@pytest.mark.parametrize("make", MAKE)
def test_a_worker_that_left_out_steps_is_named_before_there_is_a_trace(make):
    """Settled in between, as the error says, the rest is a trace."""
    said = on_ranks(N, run_with_gap, make, False)
    assert len({*said}) == 1 and "worker 0 left out its own steps t=[3, 8] (from, to)" in said[0]
    assert on_ranks(N, run_with_gap, make, True) == [(6,) * N] * N


def test_a_replay_that_leaves_out_levels_is_refused_with_the_worker_and_step():
    algorithm, trace = built(df.asynchronous_gradient_push, nothing), random_trace(ONE_PEER, 80, 0)
    state = df.stack(algorithm.init(starts()[0]), N, arrivals=trace)
    step, zeros = df.simulate(algorithm.step, N, arrivals=trace), torch.zeros(N, dtype=torch.float64)
    state, _ = step(state, zeros, 0)
    i, s = trace.levels[1][0]
    with pytest.raises(ValueError, match=rf"worker {i}'s own step {s} is in level 1; go on with t=1"):
        step(state, zeros, 2)
    step(state, zeros, 1)


@pytest.mark.parametrize("make", MAKE)
def test_a_replay_goes_on_from_a_copy_at_its_level_and_begins_at_no_other(make):
    """Who begins later would take mail that nobody has sent, of zeros."""
    algorithm = built(make)
    trace = random_trace(algorithm.topology, 80, 0)
    step = df.donate(df.simulate(algorithm.step, N, arrivals=trace))
    batches = torch.stack([batch(i, 0) for i in range(N)])
    fresh = df.stack(algorithm.init(starts()[0]), N, arrivals=trace)
    state = trees.map(torch.clone, fresh)
    for level in range(7):
        state, _ = step(state, batches, level)
    for wrong, level in ((fresh, 7), (state, 0), (state, 6), (state, 8)):
        with pytest.raises(
            ValueError, match=rf"t={level}\): the messages in flight in the state are not those of level {level} "
        ):
            step(trees.map(torch.clone, wrong), batches, level)
    copy = trees.map(torch.clone, state)
    for one in (state, copy):
        step(one, batches, 7)
    assert all(map(torch.equal, state.params, copy.params))


def test_a_replay_does_not_go_on_from_a_plain_simulation():
    """There all messages were taken in the next step; what the trace says of them is not so."""
    algorithm, sent = built(df.asynchronous_gradient_push), [[[(i, k) != (0, 2)] for k in range(4)] for i in range(N)]
    heard = [[(ONE_PEER.peers(k).sources[i][0], k) for k in range(3)] for i in range(N)]
    taken = [[[], *([(j, k)] if sent[j][k][0] else [] for j, k in its)] for its in heard]
    trace = Trace(schedule_name(ONE_PEER), N, taken, sent, [[0.0] * 4] * N)
    assert trace.room == 1  # as a state has that replays nothing
    plain, step = df.simulate(algorithm.step, N), df.simulate(algorithm.step, N, arrivals=trace)
    state, batches = df.stack(algorithm.init(starts()[0]), N, arrivals=trace), torch.zeros(N, dtype=torch.float64)
    state, _ = step(state, batches, 0)
    for t in (1, 2):
        state, _ = plain(state, batches, t)
    with pytest.raises(ValueError, match=r"t=3\): the messages in flight in the state are not those of level 3 "):
        step(state, batches, 3)


def test_a_state_with_more_room_than_a_trace_needs_replays_it_alike():
    algorithm, trace = built(df.asynchronous_gradient_push), random_trace(ONE_PEER, 80, 0)
    wider = max((random_trace(ONE_PEER, 80, seed, late=0.9) for seed in range(3)), key=lambda trace: trace.room)
    ends = []
    for room in (trace, wider):
        state, step = (
            df.stack(algorithm.init(starts()[0]), N, arrivals=room),
            df.simulate(algorithm.step, N, arrivals=trace),
        )
        for level in range(len(trace.levels)):
            state, _ = step(state, torch.stack([batch(i, level) for i in range(N)]), level)
        ends.append(df.settle(state, arrivals=trace))
    assert wider.room > trace.room
    assert float(memory_of(ends[1]).weight.sum()) == pytest.approx(N, abs=1e-12)
    assert all(map(torch.equal, ends[0].params, ends[1].params))


def test_a_settled_replay_is_settled_once_and_another_trace_begins_at_level_0():
    algorithm, trace = built(df.asynchronous_gradient_push), random_trace(ONE_PEER, 80, 0)
    state = df.settle(replayed(algorithm, trace, starts(), batch), arrivals=trace)
    with pytest.raises(
        ValueError, match=r"settle\(state, arrivals=trace\): the messages in flight in the state are not those"
    ):
        df.settle(state, arrivals=trace)
    step = df.simulate(algorithm.step, N, arrivals=trace)
    for level in range(len(trace.levels)):
        state, _ = step(state, torch.stack([batch(i, level) for i in range(N)]), level)
    state = df.settle(state, arrivals=trace)
    assert float(memory_of(state).weight.sum()) == pytest.approx(N, abs=1e-12)


# -- the clock ----------------------------------------------------------------------------------------------------------


def test_outages_that_overlap_count_once():
    def ends(*outages):
        clock = df.clock(1.0, Cluster(1, Link(1)), outages=outages)
        return clock.timeline(Exchange(df.topology("complete", 1), 1), 8).end

    for seed in range(20):
        draw = random.Random(seed)
        several = [(0, since := draw.uniform(0, 5), since + draw.uniform(0, 3)) for _ in range(4)]
        points = sorted({x for _, *its in several for x in its})
        apart = [  # the same times, in pieces that do not overlap
            (0, a, b) for a, b in zip(points, points[1:], strict=False) if any(s <= a and b <= u for _, s, u in several)
        ]
        torch.testing.assert_close(ends(*several), ends(*apart), atol=1e-12, rtol=0)


@pytest.mark.parametrize("budget", [{"steps": 0, "seconds": 1}, {"samples": 0}, {}])
def test_a_budget_of_zero_is_not_left_out(budget):
    with pytest.raises(ValueError, match="until"):
        df.data.until([], **budget)


# -- checkpoints of settled states, and traces after them ---------------------------------------------------------------


def after_a_restart(rank, folder, make, first, meeting):
    """The first part of a run, which is saved; or the second one, whose t goes on from each worker's own.

    All take a step before the others have used up the budget: they meet in their first.
    """
    met = []

    @df.autograd
    def loss(params, batch):
        if not met:
            met.append(meeting.wait(60))
        time.sleep(0.002 * (1 + rank) * random.random())
        return loss_fn(params, batch)

    init, step = df.guard(df.ema(make(loss, df.adam(0.05), ONE_PEER), 0.9))
    state, step, start = init(starts()[rank]), df.donate(step), 0
    if not first:
        state, _, extra, *_ = df.checkpoint.restore(folder, state)
        start = extra["t"] + 1
    for t, one in df.data.until((batch(rank, k) for k in range(start, 10**9)), steps=60, start=start):
        state, _ = step(state, one, t)
    settled = df.settle(state)
    if first:
        df.checkpoint.save(folder, settled, 1, extra={"t": t})
    return settled, df.trace(), df.consensus_mean(df.ema_state(settled))


def settled_again(rank, make):
    init, step = built(make)
    state, traces = init(starts()[rank]), []
    for t in range(6):
        state, _ = step(state, batch(rank, t), t)
    for first, end in ((6, 6), (6, 6), (6, 10)):
        for t in range(first, end if rank else first):
            state, _ = step(state, batch(rank, t), t)
        state = df.settle(state)
        traces.append(df.trace())
    return *traces, float(memory_of(state).weight)


@pytest.mark.parametrize("make", MAKE)
def test_the_trace_of_the_last_steps_stays_when_settled_ranks_settle_again(make):
    """After steps of the others it is another one, in which worker 0 has none."""
    first, again, last, weights = zip(*on_ranks(N, settled_again, make), strict=True)
    assert first[0].num_steps == (6,) * N and set(first) == set(again) == {first[0]}
    assert last[0].num_steps == (0, *[4] * (N - 1)) and last[0].first == (6,) * N
    assert sum(weights) == pytest.approx(N, abs=1e-12)


def going_back(rank, folder, settles):
    init, step = built(df.asynchronous_gradient_push)
    state = init(starts()[rank])
    df.checkpoint.save(folder, state, 0)
    for _ in range(2):
        for t in range(5):
            state, _ = step(state, batch(rank, t), t)
        state = df.checkpoint.restore(folder, df.settle(state) if settles else state).state
    return float(memory_of(state).weight)


def test_settled_ranks_go_back_to_their_checkpoint_and_no_others(tmp_path):
    """What is in flight is of the steps that are left: with it the mass would not be N."""
    assert sum(on_ranks(N, going_back, tmp_path / "settled", True)) == pytest.approx(N, abs=1e-12)
    with pytest.raises(ValueError, match=r"mail is taken once.*or go back on all ranks: init"):
        on_ranks(N, going_back, tmp_path / "flying", False)


def saved_in_flight(rank, folder):
    init, step = built(df.asynchronous_gradient_push)
    state = init(starts()[rank])
    df.checkpoint.save(folder, state, 0)
    for t in range(2):
        state, _ = step(state, batch(rank, t), t)
    df.checkpoint.save(folder, state, 1)


def test_ranks_do_not_save_a_state_without_the_mail_in_flight(tmp_path):
    with pytest.raises(ValueError, match=r"save\(state, step\): mail is in flight.*df\.settle"):
        on_ranks(N, saved_in_flight, tmp_path)


@pytest.mark.parametrize("make", MAKE)
def test_the_second_part_of_a_run_of_ranks_is_replayed_from_its_checkpoint(make, tmp_path):
    """Ranks have no room for messages in flight in their states, and the simulator has."""
    meeting = threading.Barrier(N)
    on_ranks(N, after_a_restart, tmp_path, make, True, meeting)
    out = on_ranks(N, after_a_restart, tmp_path, make, False, meeting)
    trace = out[0][1]
    assert min(trace.first) > 0
    init, step = df.guard(df.ema(make(loss_fn, df.adam(0.05), ONE_PEER), 0.9))
    fresh = df.stack(init(starts()[0]), N, arrivals=trace)
    state, step = df.checkpoint.restore(tmp_path, fresh).state, df.simulate(step, N, arrivals=trace)
    own = list(trace.first)
    for level, events in enumerate(trace.levels):
        for i, k in events:
            own[i] = k
        state, _ = step(state, torch.stack([batch(i, k) for i, k in enumerate(own)]), level)
    flying = state
    state = df.settle(state, arrivals=trace)
    for i, (settled, *_) in enumerate(out):
        assert all(torch.equal(x[i], its) for x, its in zip(state.params, settled.params, strict=True))
    torch.testing.assert_close(df.consensus_mean(df.ema_state(state)), out[0][2], atol=1e-14, rtol=0)
    df.checkpoint.save(tmp_path / "simulated", state, 2)

    def restored(rank, n, folder):
        init, step = df.guard(df.ema(make(loss_fn, df.adam(0.05), df.topology("one-peer-exp-directed", n)), 0.9))
        state = df.checkpoint.restore(folder, init(starts()[0])).state
        for t in range(10):
            state, _ = step(state, batch(rank, t), t)
        return df.settle(state)

    for n in (2, 3):
        weights = [memory_of(its).weight for its in on_ranks(n, restored, n, tmp_path / "simulated")]
        assert float(sum(weights)) == pytest.approx(n, abs=1e-12)
    df.checkpoint.save(tmp_path / "flying", flying, 2)
    others = random_trace(step.topology, 80, 0, late=0.9)  # which need more room
    with pytest.raises(ValueError, match=r"messages are in flight.*df\.settle"):
        df.checkpoint.restore(tmp_path / "flying", df.stack(init(starts()[0]), N, arrivals=others))
