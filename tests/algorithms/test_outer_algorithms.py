"""SlowMo, DiLoCo, Streaming DiLoCo and NoLoCo against float64 loops written from their equations."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import decentfn as df
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.diloco import diloco
from decentfn.algorithms.noloco import noloco
from decentfn.algorithms.slowmo import slowmo
from decentfn.algorithms.streaming_diloco import streaming_diloco
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.optim.transforms import sgd
from decentfn.topologies.construct import idle
from tests.quadratics import (
    STEPS,
    Problem,
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
H = 4
LR = 0.1
algorithms = pytest.mark.parametrize("algorithm", [slowmo, diloco, streaming_diloco, noloco], ids=lambda f: f.__name__)
schedules = pytest.mark.parametrize(
    "matrices", [static_ring(N), random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"]
)


def decaying(t):
    """A learning rate that starts at 0.1 and falls, in float64; for numbers and tensors alike."""
    return 0.1 / (1 + 0.2 * (t.double() if isinstance(t, torch.Tensor) else t))


def from_one_start(p):
    return Problem(p.A, p.b, np.repeat(p.start[:1], len(p.start), axis=0))


def complete(n):
    return np.full((1, n, n), 1 / n)


def every(inner_steps, matrices):
    """The matrices one after another, each after `inner_steps - 1` identities."""
    rest = np.repeat(np.eye(matrices.shape[-1])[None], inner_steps - 1, 0)
    return np.concatenate([np.concatenate([rest, W[None]]) for W in matrices])


def agree(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# -- the equations ----------------------------------------------------------------------------------------------------


def slowmo_loop(p, matrices, alpha, beta, eta):
    x, x0, u, xs = p.start, p.start, np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        x = matrices[t % len(matrices)] @ (x - eta(t) * p.gradients(x))
        if (t + 1) % H == 0:
            x = np.repeat(x.mean(0)[None], len(x), 0)
            u = beta * u + (x0 - x) / eta(t)
            x = x0 = x0 - alpha * eta(t) * u
        xs.append(x)
    return np.stack(xs)


def diloco_loop(p, outer_lr, momentum):
    theta, phi, b, xs = p.start, p.start, np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            delta = phi - theta.mean(0)
            b = momentum * b + delta
            phi = phi - outer_lr * (delta + momentum * b)
            theta = phi
        xs.append(theta)
    return np.stack(xs)


def streaming_diloco_loop(p, num_fragments, delay, alpha, outer_lr, momentum, inner_steps=H, first=0):
    """The two leaves are a bucket each, of 2 and of 3 elements, and cut into equal parts."""
    parts = [np.array_split(np.arange(2), num_fragments), np.array_split(np.arange(2, 5), num_fragments)]
    fragments = [np.concatenate([leaf[f] for leaf in parts]) for f in range(num_fragments)]
    theta, phi, b, xs = p.start.copy(), p.start.copy(), np.zeros_like(p.start), [p.start]
    launched = {}
    for step in range(first + 1, STEPS + 1):
        theta = theta - LR * p.gradients(theta)
        for f, mine in enumerate(fragments):
            if step % inner_steps == (f + 1) * inner_steps // num_fragments % inner_steps:
                launched[step, f] = phi[:, mine] - theta[:, mine].mean(0)
            delta = launched.pop((step - delay, f), None)
            if delta is not None:
                b[:, mine] = momentum * b[:, mine] + delta
                phi[:, mine] -= outer_lr * (delta + momentum * b[:, mine])
                theta[:, mine] = (1 - alpha) * phi[:, mine] + alpha * theta[:, mine]
        xs.append(theta.copy())
    return np.stack(xs)


def noloco_loop(p, matrices, alpha, beta, gamma):
    theta, phi, b, xs = p.start, p.start, np.zeros_like(p.start), [p.start]
    rounds = 0
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            W = matrices[rounds % len(matrices)]
            rounds += 1
            b = alpha * b + beta * W @ (theta - phi) + gamma * (W @ phi - phi)
            theta = phi = phi + b
        xs.append(theta)
    return np.stack(xs)


@schedules
def test_slowmo_follows_its_equation(matrices):
    p = problem(N)
    built = build(slowmo, p, matrices, LR, inner_steps=H, alpha=0.9, beta=0.6, learning_rate=LR)
    agree(run(built, p), slowmo_loop(p, matrices, 0.9, 0.6, lambda t: LR))
    # A constant learning rate need not be named.
    agree(run(build(slowmo, p, matrices, LR, inner_steps=H, alpha=0.9, beta=0.6), p), run(built, p))


def test_slowmo_follows_a_learning_rate():
    p, matrices = problem(N), random_symmetric(N, 3, seed=1)
    topology = df.topologies.from_matrices("given", matrices)
    built = slowmo(loss, sgd(decaying), topology, inner_steps=H, alpha=0.9, beta=0.6, learning_rate=decaying)
    agree(run(built, p), slowmo_loop(p, matrices, 0.9, 0.6, decaying))


def test_slowmo_keeps_the_progress_of_a_round_in_which_the_rate_falls_to_0():
    """α = 1, β = 0: local SGD, averaged every H steps, at every learning rate."""
    p, rate = problem(N), df.schedules.piecewise_constant(LR, {H + 2: 0.0})
    built = slowmo(loss, sgd(rate), idle(N), inner_steps=H, alpha=1.0, beta=0.0, learning_rate=rate)
    x = p.start
    for t in range(2 * H):
        x = x - LR * (t < H + 2) * p.gradients(x)
        x = np.repeat(x.mean(0)[None], N, 0) if (t + 1) % H == 0 else x
    agree(run(built, p, steps=3 * H)[-1], x)


@schedules
def test_diloco_follows_its_equation_whatever_the_topology(matrices):
    p = problem(N)
    built = build(diloco, p, matrices, LR, inner_steps=H, outer_learning_rate=0.6, outer_momentum=0.8)
    agree(run(built, p), diloco_loop(p, 0.6, 0.8))


def test_the_outer_step_of_diloco_is_nesterov_of_torch():
    p = from_one_start(problem(N))
    phi = torch.tensor(p.start[0], requires_grad=True)
    outer = torch.optim.SGD([phi], lr=0.7, momentum=0.9, nesterov=True)
    xs = [p.start[0]]
    for _ in range(STEPS // H):
        theta = np.repeat(phi.detach().numpy()[None], N, 0)
        for _ in range(H):
            theta = theta - LR * p.gradients(theta)
        phi.grad = phi.detach() - torch.tensor(theta.mean(0))
        outer.step()
        xs.append(phi.detach().numpy().copy())
    agree(run(build(diloco, p, complete(N), LR, inner_steps=H), p)[::H].mean(1), np.stack(xs))


@pytest.mark.parametrize(
    ("num_fragments", "delay", "alpha"), [(1, 0, 0.0), (2, 1, 0.5), (3, 0, 0.25), (4, 3, 0.5), (2, 2, 0.0)]
)
def test_streaming_diloco_follows_its_equation(num_fragments, delay, alpha):
    p = problem(N)
    options = {"num_fragments": num_fragments, "delay": delay, "alpha": alpha}
    built = build(
        streaming_diloco,
        p,
        static_ring(N),
        LR,
        inner_steps=H,
        outer_learning_rate=0.6,
        outer_momentum=0.8,
        **options,
    )
    agree(run(built, p), streaming_diloco_loop(p, outer_lr=0.6, momentum=0.8, **options))


def test_streaming_diloco_takes_no_outer_step_that_was_not_launched():
    """From a start, or `df.with_params`, between a fragment's launch after 3 steps and its arrival after 7."""
    p, options = problem(N), {"inner_steps": 6, "num_fragments": 2, "delay": 4, "alpha": 0.25}
    built = build(streaming_diloco, p, static_ring(N), LR, outer_learning_rate=0.6, outer_momentum=0.8, **options)
    expected = streaming_diloco_loop(p, outer_lr=0.6, momentum=0.8, first=5, **options)
    step, fresh = df.simulate(built.step, N), start(built, p)
    for state in (fresh, df.with_params(states(built, p, steps=5)[-1], df.params(fresh))):
        for t, x in enumerate(expected[1:], 5):
            state, _ = step(state, batch(p), t)
            agree(flat(state.params), x)


def test_streaming_diloco_applies_an_outer_gradient_once():
    """A second step in which it would arrive, without a launch in between, as after a jump of t, applies nothing."""
    p, options = problem(N), {"inner_steps": 6, "num_fragments": 2, "delay": 4}
    built = build(streaming_diloco, p, static_ring(N), LR, **options)
    *_, before, state = states(built, p, steps=7)
    again, _ = df.simulate(built.step, N)(trees.map(torch.clone, state), batch(p), 6)
    assert np.abs(flat(state.memory.phi) - flat(before.memory.phi)).max() > 0
    np.testing.assert_array_equal(flat(again.memory.phi), flat(state.memory.phi))


@schedules
def test_noloco_follows_its_equation(matrices):
    p = problem(N)
    built = build(noloco, p, matrices, LR, inner_steps=H, alpha=0.4, beta=0.6, gamma=0.7)
    agree(run(built, p), noloco_loop(p, matrices, 0.4, 0.6, 0.7))


def test_noloco_draws_a_new_matching_for_every_outer_step():
    p = problem(N)
    topology = df.topology("random-matching", num_workers=N, seed=3)
    matrices = np.stack([df.mixing_matrix(topology, k).numpy() for k in range(STEPS // H)])
    assert len({W.tobytes() for W in matrices}) > 3
    agree(run(noloco(loss, Sgd(LR), topology, inner_steps=H), p), noloco_loop(p, matrices, 0.5, 0.7, 0.7))


# -- what they reduce to ----------------------------------------------------------------------------------------------


@schedules
def test_slowmo_without_slow_momentum_is_gossip_pga(matrices):
    p = problem(N)
    pga = np.stack([complete(N)[0] if (t + 1) % H == 0 else matrices[t % len(matrices)] for t in range(H * 3)])
    expected = run(build(adapt_then_combine, p, pga, LR), p)
    agree(run(build(slowmo, p, matrices, LR, inner_steps=H, alpha=1.0, beta=0.0), p), expected)


def local_sgd(p, matrices=None):
    return run(build(adapt_then_combine, p, every(H, complete(N) if matrices is None else matrices), LR), p)


def test_slowmo_on_an_idle_topology_is_local_sgd_without_slow_momentum():
    p = problem(N)
    built = slowmo(loss, Sgd(LR), idle(N), inner_steps=H, beta=0.0)
    agree(run(built, p), local_sgd(p))


def test_diloco_with_a_plain_outer_step_is_the_combinator_counted_from_one():
    p = problem(N)
    plain = build(diloco, p, complete(N), LR, inner_steps=H, outer_learning_rate=1.0, outer_momentum=0.0)
    averaged = adapt_then_combine(loss, Sgd(LR), df.topologies.every(H, df.topology("complete", num_workers=N)))
    step, state = df.simulate(averaged.step, N), start(averaged, p)
    for t in range(STEPS):
        state, _ = step(state, batch(p), t + 1)
    agree(flat(state.params), run(plain, p)[-1])


@pytest.mark.parametrize("name", ["complete", "alternating-exp-ring", "one-peer-exp", "base", "random-matching"])
def test_averages_messages_and_draws_rest_alike(name):
    n = 8
    p, topology = (
        problem(n),
        df.topology(name, num_workers=n, **({"local_world_size": 2} if "alternating" in name else {})),
    )
    matrices = np.stack([df.mixing_matrix(topology, t).numpy() for t in range(STEPS)])
    agree(run(noloco(loss, Sgd(LR), topology, inner_steps=H), p), noloco_loop(p, matrices, 0.5, 0.7, 0.7))
    slow = slowmo(loss, Sgd(LR), topology, inner_steps=H, alpha=0.9, beta=0.6)
    agree(run(slow, p), slowmo_loop(p, matrices, 0.9, 0.6, lambda t: LR))


def test_diloco_with_a_plain_outer_step_is_local_sgd():
    p = problem(N)
    options = {"inner_steps": H, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    agree(run(build(diloco, p, static_ring(N), LR, **options), p), local_sgd(p))


def test_streaming_diloco_with_one_fragment_and_no_delay_is_diloco_to_the_bit():
    p = problem(N)
    expected = run(build(diloco, p, static_ring(N), LR, inner_steps=H), p)
    options = {"inner_steps": H, "num_fragments": 1, "delay": 0, "alpha": 0.0}
    np.testing.assert_array_equal(run(build(streaming_diloco, p, static_ring(N), LR, **options), p), expected)


@schedules
def test_noloco_with_a_plain_outer_step_is_local_sgd_on_the_topology(matrices):
    p = problem(N)
    options = {"inner_steps": H, "alpha": 0.0, "beta": 1.0, "gamma": 1.0}
    agree(run(build(noloco, p, matrices, LR, **options), p), local_sgd(p, matrices))


@pytest.mark.parametrize("algorithm", [diloco, noloco], ids=lambda f: f.__name__)
def test_one_inner_step_is_allowed(algorithm):
    p = problem(N)
    states(build(algorithm, p, static_ring(N), LR, inner_steps=1), p, steps=2)


# -- invariants -------------------------------------------------------------------------------------------------------

sizes = {"n": st.integers(2, 7), "seed": st.integers(0, 10_000), "inner_steps": st.integers(2, 5)}


@pytest.mark.parametrize("algorithm", [diloco, streaming_diloco, df.decoupled_diloco], ids=lambda f: f.__name__)
@example(n=2, seed=2050, inner_steps=2)
@given(**sizes)
def test_outer_parameters_are_the_same_on_all_workers(algorithm, n, seed, inner_steps):
    p = from_one_start(problem(n, seed))
    fragments = {"num_fragments": 2}
    options = {diloco: {}, streaming_diloco: fragments | {"delay": seed % 2}, df.decoupled_diloco: fragments}
    built = build(algorithm, p, static_ring(n), 0.01, inner_steps=inner_steps, **options[algorithm])
    for state in states(built, p, steps=2 * inner_steps + 1):
        for slow in (flat(state.memory.phi), flat(state.memory.b)):
            np.testing.assert_array_equal(slow, np.repeat(slow[:1], n, 0))


@given(**sizes)
def test_noloco_moves_the_mean_as_if_all_workers_met(n, seed, inner_steps):
    # Doubly stochastic: mean(b⁺) = α mean(b) + β mean(d), whatever the topology.
    p = problem(n, seed)
    built = build(noloco, p, random_symmetric(n, 2, seed), 0.01, inner_steps=inner_steps)
    history = states(built, p, steps=2 * inner_steps)
    for before, after in zip(history, history[1:], strict=False):
        moved = flat(after.memory.b) - 0.5 * flat(before.memory.b)
        if np.abs(flat(after.memory.b) - flat(before.memory.b)).max() > 0:
            theta = flat(before.params) - 0.01 * p.gradients(flat(before.params))
            agree(moved.mean(0), 0.7 * (theta - flat(before.memory.phi)).mean(0), atol=1e-12)


@given(**sizes)
def test_slowmo_keeps_the_mean_where_there_is_no_gradient(n, seed, inner_steps):
    p = problem(n, seed)
    still = Problem(np.zeros_like(p.A), np.zeros_like(p.b), p.start)
    simulated = run(build(slowmo, still, random_symmetric(n, 2, seed), inner_steps=inner_steps), still, steps=8)
    agree(simulated.mean(1), np.repeat(p.start.mean(0)[None], 9, 0), atol=1e-12)


# -- how they run -----------------------------------------------------------------------------------------------------


def options_of(algorithm):
    return {"inner_steps": H} | ({"num_fragments": 2, "delay": 2} if algorithm is streaming_diloco else {})


def steps_that_speak(monkeypatch, built, p, steps):
    """For each step the number of elements that leave worker 0, over all messages and averages."""
    sent = []
    exchange, group_mean = collectives.exchange, collectives.group_mean

    def spy_exchange(x, row, **options):
        sent[-1] += sum(peer >= 0 for peer in row.topology.peers(row.t).destinations[0]) * x.shape[-1]
        return exchange(x, row, **options)

    def spy_group_mean(x, row, **options):
        sent[-1] += (len(row.topology.peers(row.t).members[0]) > 1) * x.shape[-1]
        return group_mean(x, row, **options)

    monkeypatch.setattr(collectives, "exchange", spy_exchange)
    monkeypatch.setattr(collectives, "group_mean", spy_group_mean)
    step, state = df.simulate(built.step, len(p.start)), start(built, p)
    for t in range(steps):
        sent.append(0)
        state, _ = step(state, batch(p), t)
    return sent


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (diloco, [0, 0, 0, 5, 0, 0, 0, 5, 0, 0]),
        (noloco, [0, 0, 0, 10, 0, 0, 0, 10, 0, 0]),  # two neighbors
        (slowmo, [10, 10, 10, 5, 10, 10, 10, 5, 10, 10]),
        # Launched after 2, 4, 6, 8 steps: 1 + 2 elements of the leaves' 2 and 3, then 1 + 1; they travel one step later.
        (streaming_diloco, [0, 0, 3, 0, 2, 0, 3, 0, 2, 0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_travels_between_the_rounds(monkeypatch, algorithm, expected):
    p = problem(N)
    built = build(algorithm, p, static_ring(N), LR, **options_of(algorithm))
    assert steps_that_speak(monkeypatch, built, p, 10) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm",
    [noloco, *(pytest.param(f, marks=pytest.mark.slow) for f in (slowmo, diloco, streaming_diloco))],
    ids=lambda f: f.__name__,
)
def test_a_graph_for_rounds_and_one_for_the_steps_between_serve_the_whole_run(algorithm):
    """CI counts those of the others in `test_resting_steps`."""
    p, matrices = problem(N), random_symmetric(N, 3, seed=1)
    counter = CompileCounter()
    built = build(algorithm, p, matrices, LR, **options_of(algorithm))
    compiled = df.compile(df.simulate(built.step, N), backend=counter)
    state = start(built, p)
    for t in range(STEPS):
        state, _ = compiled(state, batch(p), t)
    assert counter.frame_count == 2
    agree(flat(state.params), run(built, p)[-1])


@algorithms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_the_state_stay(algorithm, dtype):
    built = algorithm(
        lambda x, b: (x.float() ** 2).sum(), sgd(0.1), df.topology("ring", num_workers=2), **options_of(algorithm)
    )
    state = df.stack(built.init(torch.ones(3, dtype=dtype)), 2)
    for t in range(H):
        new, _ = df.simulate(built.step, 2)(state, torch.zeros(2, 1), t)
        assert [leaf.dtype for leaf in trees.leaves(new)] == [leaf.dtype for leaf in trees.leaves(state)]
        state = new


@pytest.mark.parametrize("algorithm", [slowmo, diloco, streaming_diloco], ids=lambda f: f.__name__)
def test_a_narrow_wire_rounds_what_was_learned_and_not_the_parameters(algorithm):
    # Parameters of 100, of which bfloat16 resolves 0.5, and steps of about 0.01.
    p = problem(N)
    p = Problem(p.A, p.b + (p.A @ np.full(5, 100.0)), np.full_like(p.start, 100.0))
    exact, rounded = (
        build(algorithm, p, static_ring(N), 1e-3, wire_dtype=wire, **options_of(algorithm))
        for wire in (None, torch.bfloat16)
    )
    final, expected = states(rounded, p)[-1], states(exact, p)[-1]
    outer, exact = (flat(state.memory[0]) for state in (final, expected))
    assert np.abs(outer - exact).max() < 0.02 * np.abs(exact - 100).max()
    np.testing.assert_array_equal(outer, np.repeat(outer[:1], N, 0))


NO_MOMENTUM = {
    "diloco": {"outer_momentum": 0.0},
    "slowmo": {"beta": 0.0, "alpha": 0.7},
    "noloco": {"alpha": 0.0},
    "gasloc": {"outer_momentum": 0.0},
    "streaming_diloco": {"outer_momentum": 0.0, "num_fragments": 1, "alpha": 0.0},
    "decoupled_diloco": {"outer_momentum": 0.0, "num_fragments": 1},
}


@pytest.mark.parametrize("name", NO_MOMENTUM)
def test_what_16_bits_round_of_the_outer_parameters_is_no_progress(name):
    """After a round with a gradient they lie between two bfloat16 numbers, and rounds without one leave them there."""

    def loss(x, batch):
        return (batch * x.float()).sum()

    built = getattr(df, name)(loss, sgd(0.1), df.topology("complete", 2), inner_steps=2, **NO_MOMENTUM[name])
    state, step = df.stack(built.init(torch.linspace(1, 2, 7, dtype=torch.bfloat16)), 2), df.simulate(built.step, 2)
    found = []
    for t in range(8):
        state, _ = step(state, torch.full((2, 1), 0.37 * (t < 2)), t)
        found.append(state.memory[0][0].clone())
    assert (found[3] != found[3].bfloat16()).any()
    assert torch.equal(found[-1], found[3])


@algorithms
def test_preconditions_say_what_to_do(algorithm):
    p, name = problem(4), algorithm.__name__
    with pytest.raises(ValueError, match=rf"{name}\(inner_steps=0\)"):
        build(algorithm, p, static_ring(4), inner_steps=0)
    if algorithm in (slowmo, noloco):
        with pytest.raises(ValueError, match=rf"{name}.*column-stochastic.*stochastic_gradient_push"):
            build(algorithm, p, random_column_stochastic(4, 1, seed=0))


def test_hyperparameters_are_checked():
    p = problem(4)
    with pytest.raises(ValueError, match=r"slowmo\(beta=2\)"):
        build(slowmo, p, static_ring(4), beta=2)
    with pytest.raises(ValueError, match=r"diloco\(outer_learning_rate=0\)"):
        build(diloco, p, static_ring(4), outer_learning_rate=0)
    with pytest.raises(ValueError, match=r"num_fragments=5.*num_fragments <= inner_steps"):
        build(streaming_diloco, p, static_ring(4), inner_steps=4, num_fragments=5)
    with pytest.raises(ValueError, match=r"delay=4.*delay < inner_steps"):
        build(streaming_diloco, p, static_ring(4), inner_steps=4, delay=4)
