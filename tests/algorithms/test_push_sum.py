"""Stochastic gradient push and push-DIGing against float64 loops written from their equations; mass is conserved."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.push_diging import push_diging
from decentfn.algorithms.stochastic_gradient_push import stochastic_gradient_push
from decentfn.core import trees
from decentfn.testing import on_ranks
from decentfn.topologies.lossy import arrivals
from tests.quadratics import (
    STEPS,
    Sgd,
    batch,
    build,
    flat,
    loss,
    problem,
    random_column_stochastic,
    random_symmetric,
    run,
    start,
    states,
    static_ring,
)

N = 6
LR = 0.1
schedules = pytest.mark.parametrize(
    "matrices",
    [random_column_stochastic(N, 1, seed=0), random_column_stochastic(N, 3, seed=1), random_symmetric(N, 3, seed=2)],
    ids=["static", "time-varying", "doubly stochastic"],
)


def stochastic_gradient_push_loop(p, matrices, rounds):
    x, w, zs = p.start, np.ones((N, 1)), [p.start]
    for t in range(STEPS):
        x = x - LR * p.gradients(x / w)
        for k in range(rounds):
            A = matrices[(rounds * t + k) % len(matrices)]
            x, w = A @ x, A @ w
        zs.append(x / w)
    return np.stack(zs)


def overlap_loop(p, matrices, delay):
    """Every message is put into a mailbox and opened `delay` steps later."""
    x, w, zs, mailbox = p.start.copy(), np.ones(N), [p.start], {}
    for t in range(STEPS):
        A = matrices[t % len(matrices)]
        x = x - LR * p.gradients(x / w[:, None])
        for j in range(N):
            for i in range(N):
                if i != j:
                    mailbox.setdefault(t + delay, []).append((i, A[i, j] * x[j], A[i, j] * w[j]))
        x, w = np.diag(A)[:, None] * x, np.diag(A) * w
        for i, share, weight in mailbox.pop(t, []):
            x[i] += share
            w[i] += weight
        zs.append(x / w[:, None])
    return np.stack(zs)


def push_diging_loop(p, matrices):
    u, v, x = p.start, np.ones((N, 1)), p.start
    g = p.gradients(x)
    y, xs = g, [x]
    for t in range(STEPS):
        A = matrices[t % len(matrices)]
        u, v = A @ (u - LR * y), A @ v
        x = u / v
        g_next = p.gradients(x)
        y, g = A @ y + g_next - g, g_next
        xs.append(x)
    return np.stack(xs)


@schedules
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_stochastic_gradient_push_follows_its_equation(matrices, rounds):
    p = problem(N)
    simulated = run(build(stochastic_gradient_push, p, matrices, LR, rounds=rounds), p)
    np.testing.assert_allclose(simulated, stochastic_gradient_push_loop(p, matrices, rounds), rtol=0, atol=1e-10)


@schedules
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_overlap_sgp_opens_its_messages_as_late_as_it_says(matrices, delay):
    p = problem(N)
    simulated = run(build(stochastic_gradient_push, p, matrices, LR, delay=delay), p)
    np.testing.assert_allclose(simulated, overlap_loop(p, matrices, delay), rtol=0, atol=1e-10)


@schedules
def test_push_diging_follows_its_equation(matrices):
    p = problem(N)
    np.testing.assert_allclose(
        run(build(push_diging, p, matrices, LR), p), push_diging_loop(p, matrices), rtol=0, atol=1e-10
    )


# -- what they promise ------------------------------------------------------------------------------------------------


def in_flight(history, matrices, t, delay):
    """Return the mass in flight before step t: (of x, of w)."""
    of_x, of_w = 0.0, 0.0
    for age, outbox in enumerate(history[t].memory.outboxes):
        sent_at = t - delay + age
        if sent_at >= 0:
            given_away = 1 - np.diag(matrices[sent_at % len(matrices)])
            # The weight rides at the end of the widest bucket, here the first, which holds the longer leaf: the tail.
            of_w += given_away @ outbox[0][:, -1].numpy()
            of_x += given_away @ torch.cat([outbox[1], outbox[0][:, :-1]], 1).numpy()
    return of_x, of_w


@given(
    n=st.integers(2, 7),
    period=st.integers(1, 3),
    delay=st.integers(0, 3),
    rounds=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_push_sum_conserves_mass(n, period, delay, rounds, seed):
    """Σ w = n with what is in flight, w > 0, and without gradients Σ x never changes."""
    matrices = random_column_stochastic(n, period, seed)
    p = problem(n, seed)
    algorithm = build(stochastic_gradient_push, p, matrices, 0.0, delay=delay, rounds=1 if delay else rounds)
    history = states(algorithm, p, steps=8)
    for t, state in enumerate(history):
        w = state.memory.weight.numpy()
        x_in_flight, w_in_flight = in_flight(history, matrices, t, delay)
        assert (w > 0).all()
        assert w.sum() + w_in_flight == pytest.approx(n, abs=1e-12)
        np.testing.assert_allclose(
            (w[:, None] * flat(state.params)).sum(0) + x_in_flight, p.start.sum(0), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_without_gradients_everyone_finds_the_mean_of_the_starts(delay):
    p = problem(N)
    matrices = random_column_stochastic(N, 2, seed=5)
    z = run(build(stochastic_gradient_push, p, matrices, 0.0, delay=delay), p, steps=300)[-1]
    np.testing.assert_allclose(z, np.tile(p.start.mean(0), (N, 1)), rtol=0, atol=1e-10)


@given(n=st.integers(2, 7), seed=st.integers(0, 999))
def test_push_digings_trackers_sum_to_the_gradients(n, seed):
    p = problem(n, seed)
    for state in states(build(push_diging, p, random_column_stochastic(n, 2, seed), LR), p, steps=6)[1:]:
        np.testing.assert_allclose(flat(state.memory.y).sum(0), flat(state.memory.g).sum(0), rtol=0, atol=1e-11)
        assert state.memory.weight.sum() == pytest.approx(n, abs=1e-12)


def test_on_a_regular_graph_the_weight_stays_one_and_push_sum_is_plain_gossip():
    p, W = problem(N), static_ring(N)
    pushed = states(build(stochastic_gradient_push, p, W, LR), p)
    np.testing.assert_allclose([s.memory.weight.numpy() for s in pushed], 1.0, rtol=0, atol=1e-14)
    np.testing.assert_allclose(
        flat(pushed[-1].params), run(build(adapt_then_combine, p, W, LR), p)[-1], rtol=0, atol=1e-12
    )
    tracked = run(build(gradient_tracking, p, W, LR, form="semi-atc"), p)
    np.testing.assert_allclose(run(build(push_diging, p, W, LR), p), tracked, rtol=0, atol=1e-12)


def test_a_narrow_wire_conserves_mass_too():
    """Σ w and Σ x stay what they were to float64 rounding although bfloat16 travels."""
    p, matrices = problem(N), random_column_stochastic(N, 2, seed=3)
    for delay in (0, 1):
        algorithm = build(stochastic_gradient_push, p, matrices, 0.0, delay=delay, wire_dtype=torch.bfloat16)
        history = states(algorithm, p, steps=20)
        w = history[-1].memory.weight.numpy()
        x_in_flight, w_in_flight = 0.0, 0.0
        if delay:
            wide = [
                s._replace(memory=s.memory._replace(outboxes=trees.map(torch.Tensor.double, s.memory.outboxes)))
                for s in history
            ]
            x_in_flight, w_in_flight = in_flight(wide, matrices, 20, delay)
        assert w.sum() + w_in_flight == pytest.approx(N, abs=1e-13)
        total = (w[:, None] * flat(history[-1].params)).sum(0) + x_in_flight
        np.testing.assert_allclose(total, p.start.sum(0), rtol=0, atol=1e-13)


def test_the_weight_rides_in_the_widest_bucket():
    algorithm = stochastic_gradient_push(
        lambda p, b: (p["a"] ** 2).sum().float() + (p["b"] ** 2).sum(), Sgd(LR), df.topology("one-peer-exp", 4), delay=1
    )
    state = algorithm.init({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2)})
    assert [(box.dtype, len(box)) for box in state.memory.outboxes[0]] == [(torch.float32, 3), (torch.bfloat16, 3)]
    assert state.memory.weight.dtype == torch.float32
    after, _ = df.simulate(algorithm.step, 4)(df.stack(state, 4), torch.zeros(4), 0)
    assert [b.dtype for b in after.params] == [torch.float32, torch.bfloat16]


# -- bounded staleness --------------------------------------------------------------------------------------------------


def bounded_staleness_loop(p, topology, delays, steps, least, most):
    """Every message is put into a mailbox and opened when its own delay is over; also what is left in it in the end."""
    x, w, zs, mailbox, used = p.start.copy(), np.ones(N), [p.start], {}, set()
    for t in range(steps):
        A = df.mixing_matrix(topology, t).numpy()
        x = x - LR * p.gradients(x / w[:, None])
        for i, j in zip(*np.nonzero(A), strict=True):
            if i != j:
                assert least <= (delay := delays[t, i, j]) <= most
                used.add(delay)
                mailbox.setdefault(t + delay, []).append((i, A[i, j] * x[j], A[i, j] * w[j]))
        x, w = np.diag(A)[:, None] * x, np.diag(A) * w
        for i, share, weight in mailbox.pop(t, []):
            x[i] += share
            w[i] += weight
        zs.append(x / w[:, None])
    assert used == set(range(least, most + 1))
    return np.stack(zs)


def delays_of(topology, least, most, seed, steps):
    """The delay of every message, by (step, receiver, sender): the one schedule of arrivals that has it."""
    found = {}
    for age in range(least, most + 1):
        arriving = arrivals(topology, age, least, most, seed)
        for t in range(steps + most):
            for i, j in (df.mixing_matrix(arriving, t) > 0).nonzero().tolist():
                if i != j:
                    assert (t - age, i, j) not in found, "a message arrives once"
                    found[t - age, i, j] = age
    return found


@pytest.mark.parametrize(("least", "most"), [(0, 2), (1, 3)])
def test_each_message_is_opened_when_its_own_delay_is_over(least, most):
    p, topology = (
        problem(N),
        df.topologies.from_matrices("given", random_column_stochastic(N, 2, 5), needs_push_sum=True),
    )
    delays = delays_of(topology, least, most, seed=7, steps=STEPS)
    options = {"delay": most, "least_delay": least, "seed": 7}
    algorithm = stochastic_gradient_push(loss, Sgd(LR), topology, bucket_mb=1e-9, **options)
    expected = bounded_staleness_loop(p, topology, delays, STEPS, least, most)
    np.testing.assert_allclose(run(algorithm, p), expected, rtol=0, atol=1e-10)


def mass_of(state, topology, t, most, seed):
    """Σ (x, w) of the workers and of what is in flight before step t."""
    w = state.memory.weight.numpy()
    mass, weight = (w[:, None] * flat(state.params)).sum(0), w.sum()
    for age, outbox in enumerate(reversed(state.memory.outboxes), 1):
        if t >= age:
            later = (arrivals(topology, a, 0, most, seed) for a in range(age, most + 1))
            to_come = sum(1 - df.mixing_matrix(one, t - age + a).diagonal() for a, one in enumerate(later, age)).numpy()
            weight += to_come @ outbox[0][:, -1].numpy()
            mass = mass + to_come @ torch.cat([outbox[1], outbox[0][:, :-1]], 1).numpy()
    return mass, weight


@pytest.mark.parametrize(
    ("steps", "lost"), [(60, False), (60, True), pytest.param(10_000, True, marks=pytest.mark.slow)]
)
def test_bounded_staleness_conserves_mass_and_finds_the_mean(steps, lost):
    """Also if messages are lost besides."""
    p, topology = problem(N), df.topology("static-exp", N)
    topology = df.topologies.lossy(topology, 0.2, both_ways=False) if lost else topology
    options = {"delay": 3, "least_delay": 0, "seed": 1}
    algorithm = stochastic_gradient_push(loss, Sgd(0.0), topology, bucket_mb=1e-9, **options)
    state, step = start(algorithm, p), df.simulate(algorithm.step, N)
    for t in range(1, steps + 1):
        state, _ = step(state, batch(p), t - 1)
        assert (state.memory.weight > 0).all()
        if t in (1, 2, 3, steps // 2, steps):
            mass, weight = mass_of(state, topology, t, 3, seed=1)
            assert weight == pytest.approx(N, abs=1e-12)
            np.testing.assert_allclose(mass, p.start.sum(0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(flat(state.params), np.tile(p.start.mean(0), (N, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.thorough)])
def test_ranks_draw_the_same_delays_as_the_simulator(backend):
    def algorithm():
        topology = df.topology("one-peer-exp-directed", 4)
        loss = lambda x, b: ((x - b) ** 2).sum()  # noqa: E731
        return stochastic_gradient_push(loss, df.sgd(0.1), topology, delay=2, least_delay=0)

    def train(step, state, batches):
        step = df.compile(step, donate=False, backend=backend) if backend else step
        for t, b in enumerate(batches):
            state, _ = step(state, b, t)
        return state.params[0]

    batches = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    init, step = algorithm()
    simulated = train(df.simulate(step, 4), df.stack(init(torch.zeros(3)), 4), batches)

    def on_this_rank(rank):
        init, step = algorithm()
        return train(step, init(torch.zeros(3)), batches[:, rank])

    torch.testing.assert_close(torch.stack(on_ranks(4, on_this_rank)), simulated)


# -- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"rounds": 0}, "rounds is a number of steps or parts, at least 1"),
        ({"delay": -1}, "delay is a number of steps or parts, at least 0"),
        ({"delay": 1, "rounds": 2}, "use rounds=1 with a delay"),
        ({"delay": 1, "least_delay": 2}, r"least_delay=2\): messages take from least_delay to delay=1"),
        ({"delay": 1.5}, "delay is an integer; found float"),
    ],
)
def test_rounds_and_delays_out_of_range_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        build(stochastic_gradient_push, problem(4), static_ring(4), **options)


@pytest.mark.parametrize("n", [5, 6])
def test_a_step_of_a_whole_period_of_base_is_the_exact_mean(n):
    p, topology = problem(n), df.topology("base", n)
    algorithm = stochastic_gradient_push(loss, Sgd(0.0), topology, rounds=topology.period)
    state, _ = df.simulate(algorithm.step, n)(start(algorithm, p), batch(p), 0)
    np.testing.assert_allclose(flat(state.params), np.tile(p.start.mean(0), (n, 1)), rtol=0, atol=1e-12)


def test_a_delay_needs_a_share_that_stays_at_home():
    with pytest.raises(ValueError, match="self-weight of 0.*delay=0"):
        stochastic_gradient_push(loss, Sgd(LR), df.topology("complete", 4), delay=1)


def test_averages_in_groups_can_be_late_where_a_share_stays_at_home():
    half = df.topologies.from_groups("half", [[df.topologies.Edge(range(4), 0.4)]], 4)
    p = problem(4)
    algorithm = stochastic_gradient_push(loss, Sgd(0.0), half, delay=1)
    state, step = start(algorithm, p), df.simulate(algorithm.step, 4)
    for t in range(200):
        state, _ = step(state, batch(p), t)
    np.testing.assert_allclose(flat(state.params), np.tile(p.start.mean(0), (4, 1)), rtol=0, atol=1e-10)
