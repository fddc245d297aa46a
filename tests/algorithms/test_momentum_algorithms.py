"""Quasi-global momentum, DecentLaM and momentum tracking against float64 loops written from their equations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import decentfn as df
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.decentlam import decentlam
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.momentum_tracking import momentum_tracking
from decentfn.algorithms.quasi_global_adam import quasi_global_adam
from decentfn.algorithms.quasi_global_momentum import quasi_global_momentum
from decentfn.core import trees
from decentfn.optim.transforms import sgd
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

pytestmark = pytest.mark.thorough

N = 6
LR = 0.1
SMALL_BETA = {decentlam: {"beta": 0.1}}
"""Hyperparameters accepted on time-varying schedules."""
algorithms = pytest.mark.parametrize(
    "algorithm", [quasi_global_momentum, quasi_global_adam, decentlam, momentum_tracking], ids=lambda f: f.__name__
)
schedules = pytest.mark.parametrize(
    "matrices", [static_ring(N), random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"]
)


def decaying(t):
    """A learning rate that starts at 0.1 and falls, in float64; for numbers and tensors alike."""
    return 0.1 / (1 + 0.2 * (t.double() if isinstance(t, torch.Tensor) else t))


def complete(n):
    return np.full((1, n, n), 1 / n)


def from_one_start(p):
    return Problem(p.A, p.b, np.repeat(p.start[:1], len(p.start), axis=0))


def agree(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# -- the equations ----------------------------------------------------------------------------------------------------


def quasi_global_momentum_loop(p, matrices, beta, mu, nesterov, eta):
    x, m, xs = p.start, np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        g = p.gradients(x)
        momentum = beta * m + g
        half = x - eta(t) * (g + beta * momentum if nesterov else momentum)
        x_next = matrices[t % len(matrices)] @ half
        m = mu * m + (1 - mu) * (x - x_next) / eta(t)
        x = x_next
        xs.append(x)
    return np.stack(xs)


def quasi_global_adam_loop(p, matrices, b1, b2, eps, weight):
    x, xs = p.start, [p.start]
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(STEPS):
        g = p.gradients(x)
        first = b1 * m + weight * g
        second = b2 * v + (1 - b2) * g**2
        denominator = np.sqrt(second) / np.sqrt(1 - b2 ** (t + 1)) + eps
        half = x - LR / (1 - b1 ** (t + 1)) * first / denominator
        x_next = matrices[t % len(matrices)] @ half
        moved = x - x_next
        d = moved / (np.linalg.norm(moved, axis=1, keepdims=True) + 1e-8)
        m = b1 * m + (1 - b1) * d
        v = b2 * v + (1 - b2) * d**2
        x = x_next
        xs.append(x)
    return np.stack(xs)


def decentlam_loop(p, matrices, beta, eta):
    x, m, xs = p.start, np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        direction = (x - matrices[t % len(matrices)] @ (x - eta(t) * p.gradients(x))) / eta(t)
        m = beta * m + direction
        x = x - eta(t) * m
        xs.append(x)
    return np.stack(xs)


def momentum_tracking_loop(p, matrices, beta):
    x, xs = p.start, [p.start]
    u, c = np.zeros_like(x), np.zeros_like(x)
    for t in range(STEPS):
        W = matrices[t % len(matrices)]
        u = beta * u + p.gradients(x)
        x, c = W @ x - LR * (u - c), W @ (c - u) + u
        xs.append(x)
    return np.stack(xs)


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy-ball", "nesterov"])
@schedules
def test_quasi_global_momentum_follows_its_equation(matrices, nesterov):
    p = problem(N)
    built = build(quasi_global_momentum, p, matrices, LR, beta=0.8, mu=0.7, nesterov=nesterov, learning_rate=LR)
    agree(run(built, p), quasi_global_momentum_loop(p, matrices, 0.8, 0.7, nesterov, lambda t: LR))


def with_rate(function, matrices, **options):
    topology = df.topologies.from_matrices("given", matrices)
    return function(loss, sgd(decaying), topology, learning_rate=decaying, **options)


def test_quasi_global_momentum_follows_a_learning_rate():
    p, matrices = problem(N), random_symmetric(N, 3, seed=1)
    expected = quasi_global_momentum_loop(p, matrices, 0.8, 0.7, True, decaying)
    agree(run(with_rate(quasi_global_momentum, matrices, beta=0.8, mu=0.7, nesterov=True), p), expected)


@pytest.mark.parametrize("weight", [1.0, 1 - 0.8], ids=["authors", "adam"])
@schedules
def test_quasi_global_adam_follows_its_equation(matrices, weight):
    p = problem(N)
    built = build(quasi_global_adam, p, matrices, LR, b1=0.8, b2=0.95, eps=1e-6, gradient_weight=weight)
    agree(run(built, p), quasi_global_adam_loop(p, matrices, 0.8, 0.95, 1e-6, weight))


@schedules
def test_decentlam_follows_its_equation(matrices):
    p = problem(N)
    # Momentum on a mixing matrix that changes need not be stable; 0.5 is, here.
    built = build(decentlam, p, matrices, LR, beta=0.5, learning_rate=LR)
    agree(run(built, p), decentlam_loop(p, matrices, 0.5, lambda t: LR))


def test_decentlam_follows_a_learning_rate():
    p, matrices = problem(N), static_ring(N)
    agree(run(with_rate(decentlam, matrices, beta=0.8), p), decentlam_loop(p, matrices, 0.8, decaying))


@schedules
def test_momentum_tracking_follows_its_equation(matrices):
    p = problem(N)
    agree(run(build(momentum_tracking, p, matrices, LR, beta=0.8), p), momentum_tracking_loop(p, matrices, 0.8))


# -- what they reduce to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [quasi_global_momentum, decentlam], ids=["quasi_global_momentum", "decentlam"])
@schedules
def test_without_momentum_it_is_adapt_then_combine_to_the_bit(algorithm, matrices):
    p = problem(N)
    expected = run(build(adapt_then_combine, p, matrices, LR), p)
    np.testing.assert_array_equal(run(build(algorithm, p, matrices, LR, beta=0.0), p), expected)


@pytest.mark.parametrize("algorithm", [quasi_global_momentum, decentlam], ids=["quasi_global_momentum", "decentlam"])
@settings(max_examples=8)
@given(eta=st.floats(1e-3, 1e3))
def test_a_constant_learning_rate_need_not_be_named(algorithm, eta):
    p, matrices = problem(4, seed=5), static_ring(4)
    named = run(build(algorithm, p, matrices, LR, beta=0.7, learning_rate=eta), p, steps=10)
    agree(run(build(algorithm, p, matrices, LR, beta=0.7), p, steps=10), named)


def test_quasi_global_momentum_on_everyone_is_one_worker_with_momentum():
    # x - x⁺ = η (βm + ḡ), so m⁺ = (μ + (1-μ)β) m + (1-μ) ḡ.
    p = from_one_start(problem(N))
    x, m, beta, mu = p.start[0], np.zeros(p.start.shape[1]), 0.8, 0.7
    xs = [x]
    for _ in range(STEPS):
        g = p.gradients(np.repeat(x[None], N, 0)).mean(0)
        x, m = x - LR * (beta * m + g), (mu + (1 - mu) * beta) * m + (1 - mu) * g
        xs.append(x)
    simulated = run(build(quasi_global_momentum, p, complete(N), LR, beta=beta, mu=mu), p)
    agree(simulated, np.repeat(np.stack(xs)[:, None], N, 1))


def large_batch_momentum(p, beta):
    """torch.optim.SGD with momentum on the mean of all losses."""
    x = torch.tensor(p.start[0], requires_grad=True)
    optimizer, xs = torch.optim.SGD([x], lr=LR, momentum=beta), [p.start[0]]
    for _ in range(STEPS):
        x.grad = torch.tensor(p.gradients(np.repeat(x.detach().numpy()[None], len(p.start), 0)).mean(0))
        optimizer.step()
        xs.append(x.detach().numpy().copy())
    return np.repeat(np.stack(xs)[:, None], len(p.start), 1)


def test_decentlam_on_everyone_is_large_batch_momentum():
    p = from_one_start(problem(N))
    agree(run(build(decentlam, p, complete(N), LR, beta=0.8), p), large_batch_momentum(p, 0.8))


def test_the_mean_of_momentum_tracking_takes_the_path_of_large_batch_momentum():
    # Where all Hessians are equal, the mean gradient is the gradient at the mean.
    p = from_one_start(problem(N))
    p = Problem(np.repeat(p.A[:1], N, 0), p.b, p.start)
    simulated = run(build(momentum_tracking, p, static_ring(N), LR, beta=0.8), p)
    agree(simulated.mean(1), large_batch_momentum(p, 0.8).mean(1))
    assert np.abs(simulated[-1] - simulated[-1].mean(0)).max() > 1e-6


@schedules
def test_momentum_tracking_without_momentum_is_gradient_tracking(matrices):
    p = problem(N)
    expected = run(build(gradient_tracking, p, matrices, LR, form="awc"), p)
    agree(run(build(momentum_tracking, p, matrices, LR, beta=0.0), p), expected, atol=1e-12)


def test_momentum_tracking_reaches_the_common_minimum_and_local_momentum_does_not():
    p = problem(N)
    A, b = p.A.reshape(-1, p.A.shape[-1]), p.b.reshape(-1)
    best = np.linalg.lstsq(A, b, rcond=None)[0]
    tracked = run(build(momentum_tracking, p, static_ring(N), LR, beta=0.5), p, steps=400)[-1]
    agree(tracked, np.repeat(best[None], N, 0), atol=1e-8)
    diffusion = run(build(adapt_then_combine, p, static_ring(N), LR), p, steps=400)[-1]
    assert np.abs(diffusion - best).max() > 1e-2


# -- invariants -------------------------------------------------------------------------------------------------------


@given(n=st.integers(2, 7), period=st.integers(1, 3), seed=st.integers(0, 10_000), beta=st.floats(0, 0.99))
def test_tracked_momentum_keeps_the_mean_of_momentum(n, period, seed, beta):
    p = problem(n, seed)
    built = build(momentum_tracking, p, random_symmetric(n, period, seed), 0.01, beta=beta)
    for state in states(built, p, steps=8):
        scale = 1 + np.abs(flat(state.memory.u)).max()
        agree(flat(state.memory.y).mean(0), flat(state.memory.u).mean(0), atol=1e-12 * scale)


@algorithms
@given(n=st.integers(2, 7), period=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_mixing_keeps_the_mean_where_there_is_no_gradient(algorithm, n, period, seed):
    p = problem(n, seed)
    still = Problem(np.zeros_like(p.A), np.zeros_like(p.b), p.start)
    built = build(algorithm, still, random_symmetric(n, period, seed), **SMALL_BETA.get(algorithm, {}))
    simulated = run(built, still, steps=8)
    scale = np.abs(simulated).max()
    agree(simulated[1].mean(0), p.start.mean(0), atol=1e-12 * scale)
    if algorithm is not quasi_global_adam:  # its momentum is normalized worker by worker
        agree(simulated[-1].mean(0), p.start.mean(0), atol=1e-12 * scale)


def test_a_learning_rate_of_zero_moves_no_momentum():
    p = from_one_start(problem(N))

    def warmup(t):
        return 0.05 * t

    for algorithm in (quasi_global_momentum, decentlam):
        built = algorithm(loss, sgd(warmup), df.topologies.from_matrices("ring", static_ring(N)), learning_rate=warmup)
        assert np.isfinite(run(built, p)).all()


# -- how they run -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@algorithms
def test_one_graph_serves_the_whole_run(algorithm):
    p, matrices = problem(N), random_symmetric(N, 3, seed=1)
    counter = CompileCounter()
    built = build(algorithm, p, matrices, LR, **SMALL_BETA.get(algorithm, {}))
    compiled = df.compile(df.simulate(built.step, N), backend=counter)
    state = start(built, p)
    for t in range(STEPS):
        state, _ = compiled(state, batch(p), t)
    assert counter.frame_count == 1
    agree(flat(state.params), run(built, p)[-1])


@algorithms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_the_state_stay(algorithm, dtype):
    built = algorithm(lambda x, b: (x.float() ** 2).sum(), sgd(0.1), df.topology("ring", num_workers=2))
    state = df.stack(built.init(torch.ones(3, dtype=dtype)), 2)
    new, _ = df.simulate(built.step, 2)(state, torch.zeros(2, 1), 0)
    assert [leaf.dtype for leaf in trees.leaves(new)] == [leaf.dtype for leaf in trees.leaves(state)]


@algorithms
def test_preconditions_say_what_to_do(algorithm):
    p = problem(4)
    with pytest.raises(ValueError, match=rf"{algorithm.__name__}.*column-stochastic.*stochastic_gradient_push"):
        build(algorithm, p, random_column_stochastic(4, 1, seed=0))
    name = "b1" if algorithm is quasi_global_adam else "beta"
    with pytest.raises(ValueError, match=rf"{algorithm.__name__}\({name}=1.5\)"):
        build(algorithm, p, static_ring(4), **{name: 1.5})


def test_rates_are_checked():
    topology = df.topology("ring", num_workers=4)
    with pytest.raises(ValueError, match=r"quasi_global_momentum\(mu=-0.1\)"):
        quasi_global_momentum(loss, Sgd(LR), topology, mu=-0.1)
    with pytest.raises(ValueError, match=r"decentlam\(learning_rate=0\)"):
        decentlam(loss, Sgd(LR), topology, learning_rate=0)
    with pytest.raises(ValueError, match=r"quasi_global_adam\(.*b2=1"):
        quasi_global_adam(loss, Sgd(LR), topology, b2=1)


@pytest.mark.parametrize(
    "name", ["one-peer-exp", "one-peer-exp-directed", "static-exp", "shift-one", "random-matching"]
)
def test_decentlam_refuses_schedules_on_which_momentum_makes_disagreement_grow(name):
    topology = df.topology(name, 16)
    with pytest.raises(
        ValueError, match=rf"decentlam\(beta=0.9\): on '{name}' disagreement grows.*quasi_global_momentum"
    ):
        decentlam(loss, Sgd(LR), topology)
    decentlam(loss, Sgd(LR), topology, beta=0.1)


@pytest.mark.parametrize("name", ["static-ring", "hypercube", "ring", "double-binary-tree", "complete"])
def test_decentlam_accepts_schedules_on_which_disagreement_shrinks(name):
    decentlam(loss, Sgd(LR), df.topology(name, 16))


@pytest.mark.parametrize(
    "name", ["one-peer-exp", "one-peer-exp-directed", "static-exp", "ring", "shift-one", "p-peer-exp"]
)
@pytest.mark.parametrize("beta", [0.5, 0.8, 0.99])
def test_decentlam_refuses_what_its_recursion_without_gradients_refuses(name, beta):
    """By the eigenvalues of one period: (x, m) -> (W x - β m, β m + x - W x), off the consensus."""
    topology, eye, mean = df.topology(name, 16), np.eye(16), np.full((16, 16), 1 / 16)
    product = np.eye(32)
    for t in range(topology.period):
        W = df.mixing_matrix(topology, t).numpy() - mean
        product = np.block([[W, -beta * eye], [eye - mean - W, beta * eye]]) @ product
    rate = np.abs(np.linalg.eigvals(product)).max() ** (1 / topology.period)
    try:
        decentlam(loss, Sgd(LR), topology, beta=beta)
    except ValueError:
        assert rate > 1.0001
    else:
        assert rate < 1.001
