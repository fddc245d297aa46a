"""K-GT, LED and NIDS, and SPARTA, against float64 loops written from their equations, and what they promise."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.compressors.sparse import spread as draw_places
from tests.algorithms.test_error_feedback import largest
from tests.quadratics import Sgd, build, flat, loss, problem, random_symmetric, run, start, states, static_ring

N, K, LR, STEPS = 6, 4, 0.05, 40
RING = static_ring(N)


def agree(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def optimum(p):
    A, b = p.A.reshape(-1, 5), p.b.reshape(-1)
    return np.linalg.lstsq(A, b, rcond=None)[0]


# -- the equations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrices", [RING, random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"])
def test_k_gt_follows_its_equation(matrices):
    p = problem(N)
    x = phi = p.start
    c, xs = np.zeros_like(x), [x]
    for t in range(STEPS):
        x = x - LR * (p.gradients(x) + c)
        if (t + 1) % K == 0:
            W = matrices[t // K % len(matrices)]
            z = (phi - x) / (K * LR)
            c, phi = c - z + W @ z, W @ (phi - K * 0.9 * LR * z)
            x = phi
        xs.append(x)
    agree(run(build(df.k_gt, p, matrices, LR, inner_steps=K, outer_learning_rate=0.9), p, STEPS), np.stack(xs))


@pytest.mark.parametrize("beta", [None, 0.1])
def test_led_follows_its_equation(beta):
    p, x = problem(N), problem(N).start
    y, xs = np.zeros_like(x), [x]
    for t in range(STEPS):
        x = x - LR * p.gradients(x) - (beta or 1 / K) * y
        if (t + 1) % K == 0:
            phi, x = x, RING[0] @ x
            y = y + phi - x
        xs.append(x)
    agree(run(build(df.led, p, RING, LR, inner_steps=K, beta=beta), p, STEPS), np.stack(xs))


def test_nids_follows_its_equation():
    p, mixing = problem(N), (np.eye(N) + RING[0]) / 2
    before, g = p.start, p.gradients(p.start)
    x = before - LR * g
    xs = [before, x]
    for _ in range(STEPS - 1):
        g_new = p.gradients(x)
        x, before, g = mixing @ (2 * x - before - LR * (g_new - g)), x, g_new
        xs.append(x)
    agree(run(build(df.nids, p, RING, LR), p, STEPS), np.stack(xs))


# -- what they reduce to, and where they end --------------------------------------------------------------------------


def test_k_gt_with_one_step_is_gradient_tracking():
    p = problem(N)
    expected = run(build(df.gradient_tracking, p, RING, LR, form="semi-atc"), p, STEPS)
    agree(run(build(df.k_gt, p, RING, LR, inner_steps=1), p, STEPS), expected, 1e-13)


def test_led_with_one_step_is_d2_and_on_a_lazy_graph_exact_diffusion():
    p, ring = problem(N), df.topology("static-ring", N)
    for topology, other, mixes_on in (
        (df.topologies.lazy(ring), df.exact_diffusion, ring),
        (df.topologies.lazy(ring), df.d2, df.topologies.lazy(ring)),
    ):
        led = df.led(loss, Sgd(LR), topology, inner_steps=1)
        agree(run(led, p, STEPS), run(other(loss, Sgd(LR), mixes_on), p, STEPS), 1e-12)


def test_nids_is_exact_diffusion_after_a_step_alone():
    p = problem(N)
    ahead = p._replace(start=p.start - LR * p.gradients(p.start))
    found, expected = (run(build(f, q, RING, LR), q, STEPS) for f, q in ((df.nids, p), (df.exact_diffusion, ahead)))
    agree(found[1:], expected[:-1], 1e-12)


EXACT = {
    "k_gt": (df.k_gt, {"inner_steps": K}, K),
    "led": (df.led, {"inner_steps": K}, K),
    "nids": (df.nids, {}, 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*EXACT, "diloco"])
def test_the_end_is_the_optimum_on_unequal_quadratics_at_a_constant_rate(name):
    """Local SGD ends at a distance."""
    plain = {"inner_steps": K, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    p, (algorithm, options, _) = problem(N), (EXACT | {"diloco": (df.diloco, plain, K)})[name]
    built = build(algorithm, p, RING, 0.1, **options)
    step, state = df.simulate(built.step, N), start(built, p)
    data = torch.tensor(p.A), torch.tensor(p.b)
    for t in range(900):
        state, _ = step(state, data, t)
    away = np.abs(flat(state.params) - optimum(p)).max()
    assert away > 1e-3 if name == "diloco" else away < 1e-10


@pytest.mark.parametrize("name", EXACT)
def test_the_corrections_cancel_in_every_step(name):
    p, (algorithm, options, _) = problem(N), EXACT[name]
    for state in states(build(algorithm, p, RING, LR, **options), p, STEPS):
        correction = flat(state.memory.y if name == "led" else state.memory.c)
        agree(correction.mean(0), 0.0, 1e-13)
    assert np.abs(correction).max() > 1e-3


@pytest.mark.parametrize("name", [*EXACT, "exact_diffusion", "d2"])
def test_a_worker_with_a_bad_gradient_applies_its_correction_so_the_mean_moves_along_the_good_gradients(name):
    """Corrections cancel over all workers, so one that left its own out would move the mean by it."""
    p, (algorithm, options, _) = problem(N), EXACT.get(name, (getattr(df, name, None), {}, 1))
    guarded = df.guard(build(algorithm, p, RING, LR, **options))
    state, step = start(guarded, p), df.simulate(guarded.step, N)
    for t in range(STEPS):
        is_bad = np.random.default_rng(t).random(N) < 0.3
        x, A = flat(state.params), np.where(is_bad[:, None, None], np.nan, p.A)
        state, _ = step(state, (torch.tensor(A), torch.tensor(p.b)), t)
        residuals = np.einsum("nij,nj->ni", p.A, x) - p.b
        good = np.einsum("nij,ni->nj", p.A, residuals)[~is_bad].sum(0) / N
        agree(flat(state.params).mean(0), x.mean(0) - LR * good, 1e-13)
        correction = flat(state.memory.y if name == "led" else state.memory.c)
        agree(correction.mean(0), 0.0, 1e-13)
    assert np.abs(correction).max() > 1e-3 and int(state.local.guard.skipped.sum()) > STEPS


@pytest.mark.thorough
def test_nids_converges_at_one_rate_on_every_graph_where_exact_diffusion_does():
    """The largest stable rate, below 2/L, is one for all W: here 1.8/L on a ring, a chain and the complete graph."""
    p = problem(N)
    largest = max(np.linalg.eigvalsh(a.T @ a).max() for a in p.A)
    for name in ("static-ring", "chain", "complete"):
        end = run(df.nids(loss, Sgd(1.8 / largest), df.topology(name, N)), p, 600)[-1]
        assert np.abs(end - optimum(p)).max() < 0.5, name


def test_led_refuses_a_graph_on_which_disagreement_grows():
    away = df.topologies.from_matrices("away", [[[0.1, 0.9], [0.9, 0.1]]])
    with pytest.raises(ValueError, match=r"led\(inner_steps=2, beta=0\.5\).*'away'.*lazy\(topology\)"):
        df.led(loss, Sgd(LR), away, inner_steps=2)
    df.led(loss, Sgd(LR), df.topologies.lazy(away), inner_steps=2)


@pytest.mark.parametrize("bad", [{"inner_steps": 0}, {"outer_learning_rate": 0.0}])
def test_k_gt_refuses_bad_numbers(bad):
    with pytest.raises(ValueError, match=r"k_gt\("):
        build(df.k_gt, problem(N), RING, **bad)


def test_k_gt_refuses_a_schedule_that_rests_since_its_correction_would_be_of_more_than_k_steps():
    ring = df.topology("static-ring", N)
    for rests in (df.topologies.every(3, ring), df.topologies.until(80, ring, df.topologies.every(2, ring))):
        with pytest.raises(ValueError, match=r"k_gt\(topology=.*every\(.*larger inner_steps"):
            df.k_gt(loss, Sgd(LR), rests)


# -- SPARTA -----------------------------------------------------------------------------------------------------------


def test_sparta_of_all_parameters_is_adapt_then_combine():
    p = problem(N)
    expected = run(build(df.adapt_then_combine, p, RING, LR), p, STEPS)
    agree(run(build(df.sparta, p, RING, LR, fraction=1.0), p, STEPS), expected, 1e-13)


def places(t, fraction, seed):
    """Of the two buckets: the last 3 elements, then the first 2."""
    counts = [(size, max(1, round(fraction * size))) for size in (3, 2)]
    tail, head = (draw_places(seed, t, i, count, size, torch.tensor(0)) for i, (size, count) in enumerate(counts))
    return np.concatenate([head.numpy(), 2 + tail.numpy()])


@pytest.mark.parametrize("matrices", [RING, random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"])
def test_sparta_follows_its_equation(matrices):
    p = problem(N)
    x, xs = p.start.copy(), [p.start]
    for t in range(STEPS):
        x = x - LR * p.gradients(x)
        k = places(t, 0.6, 3)
        x[:, k] = matrices[t % len(matrices)] @ x[:, k]
        xs.append(x.copy())
    agree(run(build(df.sparta, p, matrices, LR, fraction=0.6, seed=3), p, STEPS), np.stack(xs))


@pytest.mark.parametrize("compressor", [None, df.compressors.top_k(k=1)], ids=["plain", "compressed"])
def test_diloco_with_sparta_follows_its_equation(compressor):
    p = problem(N, starts_equal=True)
    theta, phi, b, e, xs = p.start.copy(), p.start, 0.0, np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        k = places(t, 0.6, 3)
        theta[:, k] = theta[:, k].mean(0)
        if (t + 1) % K == 0:
            q = e + phi - theta
            if compressor is not None:
                e, q = q, largest(q)
                e = e - q
            b = 0.8 * b + q.mean(0)
            phi = phi - 0.6 * (q.mean(0) + 0.8 * b)
            theta = phi.copy()
        xs.append(theta.copy())
    options = {"inner_steps": K, "outer_learning_rate": 0.6, "outer_momentum": 0.8, "fraction": 0.6, "seed": 3}
    found = run(build(df.diloco, p, RING, LR, compressor=compressor, **options), p, STEPS)
    agree(found, np.stack(xs))
    apart = [np.ptp(x, 0) for x in found[1:]]
    assert all((apart[t][places(t, 0.6, 3)] < 1e-12).all() for t in range(STEPS))
    assert np.abs(run(build(df.diloco, p, RING, LR, **options | {"fraction": 0.0}), p, STEPS) - found).max() > 1e-3


def test_diloco_with_sparta_of_all_parameters_never_lets_the_workers_drift():
    """The outer step then sees the progress of a single worker with the mean gradient."""
    p = problem(N, starts_equal=True)
    found = run(build(df.diloco, p, RING, LR, inner_steps=K, fraction=1.0), p, STEPS)
    agree(found, np.repeat(found[:, :1], N, 1), 1e-13)


def spread(fraction, steps, dim=4000):
    draw = torch.Generator().manual_seed(0)
    init, step = df.sparta(
        lambda x, b: 0.0 * x.sum(), df.sgd(0.1), df.topology("complete", N), fraction=fraction, bucket_mb=0.01
    )
    starts = torch.randn(N, dim, generator=draw, dtype=torch.float64)
    state = df.stack(init(starts[0]), N)
    state = df.with_params(state, starts)
    step, found = df.simulate(step, N), [starts]
    for t in range(steps):
        state, _ = step(state, torch.zeros(N, 1), t)
        found.append(df.params(state).clone())
    return torch.stack(found).numpy()


def test_a_random_share_of_the_disagreement_vanishes_in_each_step_of_sparta_and_the_mean_stays():
    xs = spread(0.1, 20)
    agree(xs.mean(1), np.tile(xs[0].mean(0), (21, 1)), 1e-12)
    apart = (xs - xs.mean(1, keepdims=True)) ** 2
    assert (apart[-1].sum() / apart[0].sum()) ** (1 / 20) == pytest.approx(0.9, abs=0.01)
    hit = (np.ptp(xs[1], 0) < 1e-12).sum()
    assert hit == 400  # no place is drawn twice, and all workers draw the same


def test_sparta_sends_its_fraction_and_draws_other_places_in_every_step(monkeypatch):
    from decentfn.comm import collectives

    sent, mean = [], collectives.group_mean
    monkeypatch.setattr(
        collectives, "group_mean", lambda x, row, **options: sent.append(x.shape[-1]) or mean(x, row, **options)
    )
    xs = spread(0.005, 2)
    assert sum(sent) == 2 * 20
    places = [set(np.flatnonzero((xs[t + 1] != xs[t]).any(0))) for t in range(2)]
    assert places[0] != places[1] and all(len(p) == 20 for p in places)


@pytest.mark.parametrize("bad", [-0.1, 1.5])
def test_diloco_refuses_a_fraction_outside(bad):
    with pytest.raises(ValueError, match=r"diloco\(fraction=.*\[0, 1\]"):
        df.diloco(loss, df.sgd(0.1), df.topology("complete", N), fraction=bad)


@pytest.mark.parametrize("bad", [0.0, 1.5])
def test_sparta_refuses_a_fraction_outside(bad):
    with pytest.raises(ValueError, match=r"sparta\(fraction=.*\(0, 1\]"):
        df.sparta(loss, df.sgd(0.1), df.topology("complete", N), fraction=bad)
