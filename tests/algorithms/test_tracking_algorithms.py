"""Gradient tracking, EXTRA, exact diffusion and D² against float64 loops written from their equations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import decentfn as df
from decentfn.algorithms.d2 import d2
from decentfn.algorithms.exact_diffusion import exact_diffusion
from decentfn.algorithms.extra import extra
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.push_diging import push_diging
from decentfn.algorithms.relay_sgd import relay_sgd
from decentfn.algorithms.stochastic_gradient_push import stochastic_gradient_push
from decentfn.core import trees
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
LR = 0.1
small = st.integers(2, 7)
seeds = st.integers(0, 10_000)
forms = pytest.mark.parametrize("form", ["semi-atc", "awc", "atc"])
schedules = pytest.mark.parametrize(
    "matrices", [static_ring(N), random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"]
)


def lazy(matrices):
    return (np.eye(matrices.shape[-1]) + matrices) / 2


# -- the equations ----------------------------------------------------------------------------------------------------


def gradient_tracking_loop(p, matrices, form):
    x = p.start
    g = p.gradients(x)
    y, xs = g, [x]
    for t in range(STEPS):
        W = matrices[t % len(matrices)]
        x = W @ x - LR * y if form == "awc" else W @ (x - LR * y)
        g_next = p.gradients(x)
        y = W @ (y + g_next - g) if form == "atc" else W @ y + g_next - g
        g = g_next
        xs.append(x)
    return np.stack(xs)


def extra_loop(p, W):
    identity = np.eye(len(W))
    xs = [p.start, W @ p.start - LR * p.gradients(p.start)]
    for t in range(STEPS - 1):
        change = p.gradients(xs[t + 1]) - p.gradients(xs[t])
        xs.append((identity + W) @ xs[t + 1] - (identity + W) @ xs[t] / 2 - LR * change)
    return np.stack(xs)


def exact_diffusion_loop(p, W):
    xs, psi = [p.start], p.start
    for _ in range(STEPS):
        psi_next = xs[-1] - LR * p.gradients(xs[-1])
        phi = psi_next + xs[-1] - psi
        xs.append((np.eye(len(W)) + W) / 2 @ phi)
        psi = psi_next
    return np.stack(xs)


def d2_loop(p, matrices):
    xs = [p.start, matrices[0] @ (p.start - LR * p.gradients(p.start))]
    for t in range(1, STEPS):
        change = p.gradients(xs[t]) - p.gradients(xs[t - 1])
        xs.append(matrices[t % len(matrices)] @ (2 * xs[t] - xs[t - 1] - LR * change))
    return np.stack(xs)


@forms
@schedules
def test_gradient_tracking_follows_its_equation(form, matrices):
    p = problem(N)
    simulated = run(build(gradient_tracking, p, matrices, LR, form=form), p)
    np.testing.assert_allclose(simulated, gradient_tracking_loop(p, matrices, form), rtol=0, atol=1e-10)


def test_extra_follows_its_equation_from_unequal_starts():
    p, W = problem(N), random_symmetric(N, 1, seed=2)
    np.testing.assert_allclose(run(build(extra, p, W, LR), p), extra_loop(p, W[0]), rtol=0, atol=1e-10)


def test_exact_diffusion_follows_its_equation():
    p, W = problem(N), random_symmetric(N, 1, seed=3)
    np.testing.assert_allclose(
        run(build(exact_diffusion, p, W, LR), p), exact_diffusion_loop(p, W[0]), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    "matrices",
    [static_ring(N), np.concatenate([lazy(static_ring(N)), lazy(np.full((1, N, N), 1 / N))])],
    ids=["static", "time-varying"],
)
def test_d2_follows_its_equation(matrices):
    p = problem(N)
    np.testing.assert_allclose(run(build(d2, p, matrices, LR), p), d2_loop(p, matrices), rtol=0, atol=1e-10)


# -- what they promise ------------------------------------------------------------------------------------------------


@forms
@given(n=small, period=st.integers(1, 3), seed=seeds)
def test_the_mean_of_the_trackers_is_the_mean_of_the_gradients(form, n, period, seed):
    p = problem(n, seed)
    algorithm = build(gradient_tracking, p, random_symmetric(n, period, seed), LR, form=form)
    for state in states(algorithm, p, steps=6)[1:]:
        np.testing.assert_allclose(flat(state.memory.y).mean(0), flat(state.memory.g).mean(0), rtol=0, atol=1e-12)


def left_after(name, steps, **options):
    """The distance to the optimum, relative to the start, with momentum, curvature 1 and a minimum for each worker."""
    topology, minima = df.topology(name, 16), torch.arange(16.0, dtype=torch.float64)[:, None]
    init, step = gradient_tracking(
        lambda x, b: ((x - b) ** 2).sum() / 2, df.sgd(0.2, momentum=0.9), topology, **options
    )
    state, step = df.stack(init(torch.zeros(1, dtype=torch.float64)), 16), df.simulate(step, 16)
    for t in range(steps):
        state, _ = step(state, minima, t)
    return float((df.params(state) - minima.mean()).abs().max() / minima.mean())


@pytest.mark.parametrize("name", ["one-peer-exp", "one-peer-exp-directed", "ring", "random-matching"])
def test_gradient_tracking_as_it_comes_reaches_the_optimum_on_one_peer_schedules_with_momentum(name):
    assert left_after(name, 150) < 0.01


@pytest.mark.parametrize("form", ["semi-atc", "awc"])
def test_on_one_peer_rounds_with_momentum_the_overlapped_forms_diverge_as_their_page_says(form):
    assert left_after("one-peer-exp", 100, form=form) > 10


@given(n=small, seed=seeds)
def test_d2_on_the_lazy_matrix_is_exact_diffusion(n, seed):
    p, W = problem(n, seed), random_symmetric(n, 1, seed)
    np.testing.assert_allclose(
        run(build(d2, p, lazy(W), LR), p, 10), run(build(exact_diffusion, p, W, LR), p, 10), rtol=0, atol=1e-11
    )


@given(n=small, seed=seeds)
def test_extra_keeps_the_correction_summing_to_zero(n, seed):
    p = problem(n, seed)
    for state in states(build(extra, p, random_symmetric(n, 1, seed), LR), p, steps=5):
        np.testing.assert_allclose(flat(state.memory.p).sum(0), 0, rtol=0, atol=1e-12)


ALL = {
    **{f"gradient_tracking {form}": (gradient_tracking, {"form": form}) for form in ("semi-atc", "awc", "atc")},
    "extra": (extra, {}),
    "exact_diffusion": (exact_diffusion, {}),
    "d2": (d2, {}),
    "stochastic_gradient_push": (stochastic_gradient_push, {}),
    "stochastic_gradient_push delayed": (stochastic_gradient_push, {"delay": 1}),
    "push_diging": (push_diging, {}),
    "relay_sgd models": (relay_sgd, {}),
    "relay_sgd gradients": (relay_sgd, {"relay": "gradients"}),
}
all_methods = pytest.mark.parametrize(("function", "options"), ALL.values(), ids=ALL)


def path(n):
    """A chain: a tree, static, symmetric and with λ_min >= -1/3."""
    W = np.zeros((n, n))
    W[range(n - 1), range(1, n)] = W[range(1, n), range(n - 1)] = 1 / 3
    return (W + np.diag(1 - W.sum(1)))[None]


@all_methods
def test_one_worker_alone_takes_the_optimizers_steps(function, options):
    p = problem(1)
    xs = [p.start]
    for _ in range(5):
        xs.append(xs[-1] - LR * p.gradients(xs[-1]))
    np.testing.assert_allclose(run(build(function, p, np.eye(1)[None], LR, **options), p, 5), xs, rtol=0, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "options"),
    [
        pytest.param(
            *its, id=name, marks=[pytest.mark.slow] * (name not in ("gradient_tracking atc", "relay_sgd models"))
        )
        for name, its in ALL.items()
    ],
)
def test_a_step_leaves_its_input_alone_and_compiles_into_one_graph(function, options):
    """Donated, each is tried by the contract."""
    p, counter = problem(4, starts_equal=options.get("relay") == "gradients"), CompileCounter()
    algorithm = build(function, p, path(4), LR, **options)
    eager = df.simulate(algorithm.step, 4)
    compiled = df.compile(eager, backend=counter, donate=False)
    state = start(algorithm, p)
    before = [leaf.clone() for leaf in trees.leaves(state)]
    for t in range(4):
        expected = eager(state, batch(p), t)[0]
        state_after = compiled(state, batch(p), t)[0]
        for a, b in zip(trees.leaves(expected), trees.leaves(state_after), strict=True):
            assert torch.equal(a, b)
        if t == 0:
            assert all(torch.equal(a, b) for a, b in zip(before, trees.leaves(state), strict=True))
        state = state_after
    assert counter.frame_count == 1


@all_methods
def test_a_float32_state_stays_float32(function, options):
    p = Problem(*(numbers.astype(np.float32) for numbers in problem(4)))
    algorithm = build(function, p, path(4), LR, **options)
    state = start(algorithm, p)
    assert state.params[0].dtype == torch.float32
    after, _ = df.simulate(algorithm.step, 4)(state, batch(p), 3)
    assert [x.dtype for x in trees.leaves(after)] == [x.dtype for x in trees.leaves(state)]


# -- what they refuse -------------------------------------------------------------------------------------------------


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="semi-atc"):
        build(gradient_tracking, problem(4), static_ring(4), form="cta")


@pytest.mark.parametrize("function", [gradient_tracking, d2, extra, exact_diffusion])
def test_column_stochastic_schedules_are_refused(function):
    with pytest.raises(ValueError, match="column-stochastic only.*stochastic_gradient_push"):
        build(function, problem(4), random_column_stochastic(4, 1, seed=0))


@pytest.mark.parametrize("function", [extra, exact_diffusion])
def test_static_methods_refuse_schedules_and_directed_links(function):
    with pytest.raises(ValueError, match="has period 2.*gradient_tracking"):
        build(function, problem(4), random_symmetric(4, 2, seed=0))
    directed = (np.eye(4) + np.roll(np.eye(4), 1, 0))[None] / 2
    with pytest.raises(ValueError, match="transpose by 0.5.*static-ring"):
        build(function, problem(4), directed)


@pytest.mark.parametrize("n", [4, 8, 16, 48])
def test_d2_allows_its_spectral_bound_on_even_rings(n):
    build(d2, problem(n), static_ring(n))


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize(("above", "is_accepted"), [(0.002, True), (0.0, True), (-1e-6, False), (-0.002, False)])
def test_d2_accepts_a_graph_if_no_eigenvalue_lies_below_a_third(n, above, is_accepted):
    """An even ring with weight b for each neighbor has the smallest eigenvalue 1 - 4 b."""
    eye, b = np.eye(n), (4 / 3 - above) / 4
    W = ((1 - 2 * b) * eye + b * np.roll(eye, 1, 0) + b * np.roll(eye, -1, 0))[None]
    assert np.linalg.eigvalsh(W[0]).min() == pytest.approx(-1 / 3 + above)
    if is_accepted:
        build(d2, problem(n), W)
    else:
        with pytest.raises(ValueError, match="needs λ_min.*exact_diffusion"):
            build(d2, problem(n), W)


def test_d2_refuses_one_peer_schedules_which_diverge():
    with pytest.raises(ValueError, match="disagreement grows.*gradient_tracking"):
        d2(loss, Sgd(LR), df.topology("one-peer-exp", 8))


def test_d2_is_judged_on_two_thousand_workers():
    d2(loss, Sgd(LR), df.topology("static-ring", num_workers=2048))
