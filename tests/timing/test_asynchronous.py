"""Workers that wait for nobody: laws of their mass, and runs of ranks that the simulator repeats bit for bit."""

import random
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decentfn as df
from decentfn.core import trees
from decentfn.planning import Cluster, Link
from decentfn.testing import on_ranks
from decentfn.timing import Exchange, Trace, schedule_name
from decentfn.train.own_steps import memory_of
from tests.timing.skewed_labels import uncorrected_push
from tests.timing.traces import random_trace, replayed

N = 4
ONE_PEER = df.topology("one-peer-exp", N)
DIRECTED = df.topology("one-peer-exp-directed", N)


def loss_fn(params, batch):
    return sum(((p - batch) ** 2).sum() for p in params.values()) / 2


def nothing(params, batch):
    return 0.0 * sum(p.sum() for p in params.values())


def starts(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    return [{name: torch.randn(3, generator=draw, dtype=dtype) for name in "ab"} for _ in range(N)]


def batch(i, k):
    return torch.tensor(float(i) + 0.01 * k, dtype=torch.float64)


def mass(state):
    """Σ w z by leaf, float64, and Σ w."""
    w = memory_of(state).weight
    return [(w[:, None] * bucket.double()).sum(0) for bucket in state.params], w.sum()


def sums(values):
    return [torch.stack([value[name] for value in values]).double().sum(0) for name in values[0]]


def leaves(state, i):
    return [bucket[i] for bucket in state.params]


# -- laws ---------------------------------------------------------------------------------------------------------------


def conserves(topology, seed, events, dtype, make=df.asynchronous_gradient_push, compiled=None, **options):
    algorithm = make(nothing, df.sgd(0.1), topology, bucket_mb=1e-9, **options)
    trace = random_trace(algorithm.topology, events, seed, rates=[4, 2, 1, 1])
    own = starts(dtype)
    state = df.settle(replayed(algorithm, trace, own, batch, compiled=compiled), arrivals=trace)
    found, weight = mass(state)
    assert abs(float(weight) - N) < 1e-12
    near = {torch.float64: 1e-12, torch.float32: 3e-7 * events**0.5}[dtype]
    for total, expected in zip(found, sums(own), strict=True):
        torch.testing.assert_close(total, expected, atol=near, rtol=0)
    return state


@settings(max_examples=8)
@given(st.integers(0, 100), st.sampled_from([ONE_PEER, DIRECTED, df.topology("static-exp", N)]))
def test_mass_is_conserved_whatever_is_late(seed, topology):
    conserves(topology, seed, 60, torch.float64)


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mass_is_conserved_over_ten_thousand_events(dtype):
    """Traced, which is three times faster."""
    conserves(ONE_PEER, 0, 10_000, dtype, compiled="aot_eager")


@pytest.mark.parametrize(("slow", "gbit_per_s"), [(0.1, 10), (0.3, 10), (0.37, 0.001), (0.25, 1e99)])
@pytest.mark.parametrize(("topology", "first"), [(ONE_PEER, 0), (df.topology("static-exp", N), 5)])
def test_a_predicted_trace_runs_in_the_simulator_and_loses_no_mass(topology, first, slow, gbit_per_s):
    # If messages take no time, the last step of the slow one has taken some, and does not end.
    is_free = gbit_per_s > 10
    fast, link = (0.125, Link(gbit_per_s, latency_ms=0)) if is_free else (0.1, Link(gbit_per_s))
    clock = df.clock([fast, fast, fast, slow], Cluster(N, link))
    trace = clock.timeline(Exchange(topology, 1e4, is_awaited=False), 40, first=first).trace
    assert trace is not None and sum(len(left) for _, left in trace.settled)  # something is in flight at the end
    algorithm = df.asynchronous_gradient_push(nothing, df.sgd(0.1), topology)
    settled = df.settle(replayed(algorithm, trace, starts(), batch), arrivals=trace)
    assert float(mass(settled)[1]) == pytest.approx(N, abs=1e-12)
    for name, total in zip(starts()[0], sums(starts()), strict=True):
        torch.testing.assert_close(df.consensus_mean(settled)[name], total / N, atol=1e-12, rtol=0)


def test_a_trace_that_was_gathered_before_the_ranks_settled_cannot_be_settled():
    algorithm = df.asynchronous_gradient_push(loss_fn, df.adam(0.05), DIRECTED)
    trace = random_trace(algorithm.topology, 60, 5)
    before = replace(trace, taken=[its[:-1] for its in trace.taken])
    state = replayed(algorithm, before, starts(), batch)
    with pytest.raises(ValueError, match=r"settle.*lacks who took the mail in flight.*df.trace\(\) after df.settle"):
        df.settle(state, arrivals=before)


def test_what_a_narrow_wire_rounds_stays_with_the_sender():
    conserves(ONE_PEER, 1, 200, torch.float32, wire_dtype=torch.bfloat16)


def test_without_gradients_all_reach_the_mean():
    state = conserves(DIRECTED, 2, 600, torch.float64)
    for bucket, total in zip(state.params, sums(starts()), strict=True):
        torch.testing.assert_close(bucket, (total / N).expand_as(bucket), atol=1e-9, rtol=0)


def test_equal_workers_stay_equal_bit_for_bit():
    trace = random_trace(ONE_PEER, 100, 3)
    own = [starts()[0]] * N
    state = replayed(df.asynchronous_gradient_push(nothing, df.sgd(0.1), ONE_PEER), trace, own, batch)
    for name, value in state.params.tree().items():
        assert torch.equal(value, torch.stack([start[name] for start in own]))


def test_equal_clocks_and_instant_links_are_stochastic_gradient_push():
    """Bit for bit on numbers whose sums are exact; the order of a sum differs, as what is given away cannot wait."""
    whole = [{"a": torch.tensor([float(16 * i), 8.0], dtype=torch.float64)} for i in range(N)]

    def run(make, settled):
        init, step = make(loss_fn, df.sgd(0.5, momentum=0.5), ONE_PEER)
        state, step = df.stack(init(whole[0]), N), df.simulate(step, N)
        state = df.with_params(state, {"a": torch.stack([start["a"] for start in whole])})
        for t in range(8):
            state, _ = step(state, torch.arange(float(N), dtype=torch.float64) * 4, t)
        return (df.settle(state) if settled else state).params[0]

    assert torch.equal(run(df.asynchronous_gradient_push, True), run(df.stochastic_gradient_push, False))


def after_steps_of_a_clock(link, nbytes, steps, own):
    """Parameters after a run of equal workers, before it settles, and its trace."""
    trace = df.clock(0.1, Cluster(N, link)).timeline(Exchange(ONE_PEER, nbytes, is_awaited=False), steps).trace
    algorithm = df.asynchronous_gradient_push(loss_fn, df.sgd(0.1, momentum=0.5), ONE_PEER)
    return df.params(replayed(algorithm, trace, own, batch)), trace


def at_once(make, topology, steps, own):
    init, step = make(loss_fn, df.sgd(0.1, momentum=0.5), topology)
    state, step = df.stack(init(own[0]), N), df.simulate(step, N)
    state = df.with_params(state, {name: torch.stack([start[name] for start in own]) for name in own[0]})
    for t in range(steps):
        state, _ = step(state, torch.stack([batch(i, t) for i in range(N)]), t)
    return df.params(state)


def test_on_equal_clocks_a_message_without_a_time_is_taken_in_the_next_step_and_not_late():
    """Who ends at the same time is not heard before the next step, so the run is that of workers that step at once."""
    ours, trace = after_steps_of_a_clock(Link(10, latency_ms=0), 0, 12, starts())
    theirs = at_once(df.asynchronous_gradient_push, ONE_PEER, 12, starts())
    assert not any(map(any, trace.late)) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("latency_ms", [1, 99])
def test_on_equal_clocks_messages_that_travel_during_a_step_make_it_adapt_while_communicate(latency_ms):
    """x ← W x - η g(x), the round one step later: a message's mass is moved by the update of the step in which it arrives."""
    ours, trace = after_steps_of_a_clock(Link(10, latency_ms), 1, 12, starts())
    assert all(its == (0,) + (1,) * 11 for its in trace.late)
    theirs = at_once(df.adapt_while_communicate, df.topologies.later(1, ONE_PEER), 12, starts())
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_one_worker_replays_a_trace_and_is_its_optimizer():
    alone = df.topology("complete", 1)
    trace = df.clock(0.1, Cluster(1, Link(1))).timeline(Exchange(alone, 1, is_awaited=False), 20).trace
    state = replayed(df.asynchronous_gradient_push(loss_fn, df.sgd(0.1), alone), trace, starts()[:1], batch)
    x = {name: torch.nn.Parameter(value.clone()) for name, value in starts()[0].items()}
    optimizer = torch.optim.SGD(x.values(), 0.1)
    for k in range(20):
        optimizer.zero_grad()
        loss_fn(x, batch(0, k)).backward()
        optimizer.step()
    for name, value in df.params(state).items():
        torch.testing.assert_close(value[0], x[name].detach(), atol=1e-12, rtol=0)


@pytest.mark.thorough
def test_fast_workers_do_not_count_more():
    """Rates 4, 1, 1, 1: r_i w_i become equal, so the fixed point is near the plain mean; Σ r f has it at 1.29."""
    topology, rates = df.topology("random-matching", N), [4, 1, 1, 1]
    trace = random_trace(topology, 1500, 0, rates=rates, late=0.2, kept=0.0)
    optima = torch.tensor([0.0, 1.0, 5.0, 3.0], dtype=torch.float64)
    algorithm = df.asynchronous_gradient_push(loss_fn, df.sgd(0.01), topology)
    start = {"a": torch.full((1,), 2.25, dtype=torch.float64)}
    state = replayed(algorithm, trace, [start] * N, lambda i, k: optima[i])
    assert abs(float(df.consensus_mean(df.settle(state, arrivals=trace))["a"]) - 2.25) < 0.15


def test_the_step_size_by_mass_corrects_what_the_papers_would_leave():
    """One worker is four times faster than the others: Σ f has its optimum at 2.25, Σ r f at 1.29."""
    trace = (
        df.clock([0.1, 0.413, 0.387, 0.401], Cluster(N, Link(10)))  # they do not end at the same times
        .timeline(Exchange(ONE_PEER, 1e3, is_awaited=False), 400)
        .trace
    )
    assert trace is not None
    optima = torch.tensor([0.0, 1.0, 5.0, 3.0], dtype=torch.float64)
    start, ends = {"a": torch.full((1,), 2.25, dtype=torch.float64)}, []
    for make in (df.asynchronous_gradient_push, uncorrected_push):
        state = replayed(make(loss_fn, df.sgd(0.01), ONE_PEER), trace, [start] * N, lambda i, k: optima[i])
        ends.append(float(df.consensus_mean(df.settle(state, arrivals=trace))["a"]))
    assert ends == pytest.approx([2.05, 1.52], abs=0.02)


@pytest.mark.parametrize("make", [df.asynchronous_gradient_push, partial(df.asynchronous_diloco, inner_steps=2)])
def test_a_worker_whose_mass_was_dropped_is_finite_until_mail_comes(make):
    """Alone it hears nothing; `df.guard` would stop a run in which it is bad in every step."""
    init, step = df.guard(make(loss_fn, df.sgd(0.1), df.topology("complete", 1)), limit=5)
    state = init(starts()[0])
    bad = state.params[0].clone()
    bad[1] = float("nan")
    state = state._replace(params=df.kit.Buckets([bad, *state.params[1:]], state.params.plan))
    for t in range(8):
        state, metrics = step(state, batch(0, t), t)
        assert torch.isfinite(state.params[0]).all()
    assert metrics.guard.replaced == 1 and memory_of(state).weight == 0


@pytest.mark.parametrize("make", [df.asynchronous_gradient_push, partial(df.asynchronous_diloco, inner_steps=2)])
def test_resized_and_restored_workers_start_from_the_mean_by_mass(make, tmp_path):
    """Σ w z / Σ w, which is `df.consensus_mean`'s, also after a part of the mass has moved."""
    algorithm, more = (make(loss_fn, df.sgd(0.1), df.topology("one-peer-exp-directed", n)) for n in (N, 6))
    trace = random_trace(algorithm.topology, 60, 0, rates=[8, 2, 1, 1])
    state = df.settle(replayed(algorithm, trace, starts(), batch), arrivals=trace)
    assert float(memory_of(state).weight.std()) > 0.1
    df.checkpoint.save(tmp_path, state, 60)
    restored = df.checkpoint.restore(tmp_path, df.stack(more.init(starts()[0]), 6)).state
    for new in (df.resize(state, more), restored):
        torch.testing.assert_close(df.params(df.worker(new, 5)), df.consensus_mean(state), atol=1e-12, rtol=0)


# -- ranks, and their replay --------------------------------------------------------------------------------------------


def program(rank, topology, steps, pause, make, around):
    """A rank with gradients, and steps, of random length; rank 3 is slow at times."""
    draw, k = random.Random(rank), 0

    def wait():
        time.sleep(pause / 2 * (3 if rank == 3 and k // 20 % 2 else 1) * draw.random())

    @df.autograd
    def slow_loss(params, batch):
        wait()
        return loss_fn(params, batch)

    algorithm = make(slow_loss, df.adam(0.05), topology)
    step, state = around(algorithm.step), algorithm.init(starts()[rank])
    for k, one in df.data.until((batch(rank, k) for k in range(10**9)), steps=steps):  # noqa: B007
        state, _ = step(state, one, k)
        wait()
    ended = state
    settled = df.settle(state)
    trace = df.trace()
    return ended, settled, trace, df.consensus_mean(settled)


def assert_replayed(topology, steps, pause, make=df.asynchronous_gradient_push, around=df.donate):
    out = on_ranks(N, program, topology, steps, pause, make, around)
    trace = out[0][2]
    assert sum(trace.num_steps) in range(steps, steps + N)
    assert (
        sum(map(sum, trace.late)) or around is not df.donate
    )  # some came during a gradient, not while the others compile
    algorithm = make(loss_fn, df.adam(0.05), topology)
    state = replayed(algorithm, trace, starts(), batch)
    settled = df.settle(state, arrivals=trace)
    for i, (ended, its, *_) in enumerate(out):
        for got, one in ((state, ended), (settled, its)):
            assert all(map(torch.equal, leaves(got, i), one.params))
            assert torch.equal(memory_of(got).weight[i], memory_of(one).weight)
    assert abs(float(memory_of(settled).weight.sum()) - N) < 1e-12
    for name, value in df.consensus_mean(settled).items():
        torch.testing.assert_close(out[0][3][name], value, atol=1e-14, rtol=0)
    compiled = replayed(algorithm, trace, starts(), batch, compiled="aot_eager")
    for got, one in zip(compiled.params, state.params, strict=True):
        assert (got - one).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("topology", "every"), [(ONE_PEER, 1), pytest.param(df.topology("static-exp", N), 2, marks=pytest.mark.thorough)]
)
def test_a_run_of_ranks_is_replayed_bit_for_bit(topology, every):
    assert_replayed(topology, 120, 0.002, partial(df.asynchronous_gradient_push, every=every))


@pytest.mark.thorough
def test_compiled_ranks_are_replayed():
    """Traced ranks compute what eager ones do."""
    assert_replayed(ONE_PEER, 60, 0.002, around=lambda step: df.compile(step, backend="eager"))


@pytest.mark.thorough
def test_a_long_run_with_a_rank_that_is_slow_at_times_is_replayed_bit_for_bit():
    assert_replayed(ONE_PEER, 4 * 150, 0.004)


def test_parameters_without_mail_keep_their_bits():
    """Ranks take nothing then; in the simulator others have mail in the same level."""
    taken = [[[]] * 2, [[], [(0, 0)]], [[]] * 2, [[]] * 2]
    trace = Trace(schedule_name(ONE_PEER), N, taken, [[[i == 0], [False]] for i in range(N)], [[0.0] * 2] * N)
    minus = {name: -torch.zeros(3, dtype=torch.float64) for name in "ab"}
    state = replayed(df.asynchronous_gradient_push(nothing, df.sgd(0.1), ONE_PEER), trace, [minus] * N, batch)
    assert [bool(torch.signbit(x).all()) for x in state.params[0]] == [True, False, True, True]


# -- what is refused ----------------------------------------------------------------------------------------------------


def built(topology=ONE_PEER, loss=loss_fn, **options):
    return df.asynchronous_gradient_push(loss, df.sgd(0.1), topology, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: built(df.topology("complete", N)), "averages in groups"),
        (lambda: built(df.topologies.from_shifts("shift", [{1: 1.0}], N)), "self-weight of 0"),
        (lambda: built(every=0), "every=0"),
        (lambda: built(loss=df.dynamic_loss_scale(loss_fn, agree=True)), "agree=False"),
        (lambda: df.average_buffers(built()), "average_buffers.*asynchronous_gradient_push"),
        (lambda: df.survive(built().step), "survive.*asynchronous_gradient_push"),
        (
            lambda: df.settle(df.adapt_then_combine(loss_fn, df.sgd(0.1), ONE_PEER).init({"a": torch.ones(1)})),
            "own clocks",
        ),
        (lambda: df.sweep(df.simulate(built().step, N), 4), "sweep.*one run after the other"),
        (lambda: df.trace(), "no mailbox"),
        (lambda: df.data.until([], steps=3, seconds=2), "one of them"),
        (lambda: df.data.until([], seconds=0), "greater than 0"),
        (lambda: df.simulate(built(DIRECTED).step, N, arrivals=random_trace(ONE_PEER, 9, 0)), "digest"),
        (lambda: df.simulate(built().step, N, arrivals=3), "df.timing.Trace"),
        (
            lambda: df.simulate(
                df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", N)).step,
                N,
                arrivals=random_trace(ONE_PEER, 9, 0),
            ),
            "own clocks",
        ),
    ],
)
def test_what_cannot_hold_is_refused_with_a_reason(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_state_without_room_for_what_is_in_flight_is_refused():
    trace = random_trace(ONE_PEER, 80, 0, late=0.9)
    init, step = built()
    state = df.stack(init(starts()[0]), N)
    with pytest.raises(ValueError, match=rf"R={trace.room}.*arrivals=trace"):
        df.simulate(step, N, arrivals=trace)(state, torch.zeros(N), 0)


def test_a_settled_state_is_saved_restored_and_resized(tmp_path):
    trace = random_trace(ONE_PEER, 60, 4)
    algorithm = built()
    before = replayed(algorithm, trace, starts(), batch)
    state = df.settle(before, arrivals=trace)
    held = [{x.untyped_storage().data_ptr() for x in trees.leaves(its) if x.numel()} for its in (before, state)]
    assert not held[0] & held[1]  # a copy
    df.checkpoint.save(tmp_path, state, 1)
    again, _ = df.checkpoint.restore(tmp_path, df.stack(algorithm.init(starts()[1]), N, arrivals=trace))[:2]
    assert all(map(torch.equal, again.params, state.params)) and torch.equal(again.memory.weight, state.memory.weight)
    smaller = df.resize(state, built(df.topology("one-peer-exp", 2)))
    assert smaller.memory.weight.tolist() == [1.0, 1.0]


def test_the_page_runs():
    page = Path(df.__file__).parents[1] / "docs" / "asynchronous.md"
    exec("".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)), {})
