"""ClippedGossip against a float64 loop written from its equation, and with a hostile worker."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import draws
from decentfn.testing import hostile
from decentfn.testing.ranks import on_kept_ranks
from tests.quadratics import Sgd, build, problem, random_symmetric, run, static_ring

N, STEPS, LR = 6, 40, 0.1


def garbage(x, t):
    return (200 * draws.uniform(0, t, 0, (x.shape[-1],), device=x.device) - 100).to(x.dtype).expand_as(x)


LIES = {
    "garbage": garbage,
    "nan": lambda x, t: torch.full_like(x, torch.nan),
    "times 100": lambda x, t: 100 * x,
    "constant": lambda x, t: torch.ones_like(x),
}
each_lie = pytest.mark.parametrize("sends", LIES)


def loop(p, matrices, tau, b=1):
    x, xs = p.start, [p.start]
    for t in range(STEPS):
        W, y = matrices[t % len(matrices)], x - LR * p.gradients(x)
        x = y.copy()
        for i in range(N):
            others = sorted((np.linalg.norm(y[j] - y[i]), j) for j in np.flatnonzero(W[i]) if j != i)
            near, far = others[: len(others) - b], others[len(others) - b :]
            radius = tau or np.sqrt(sum(W[i, j] * d**2 for d, j in near) / sum(W[i, j] for _, j in far))
            for d, j in others:
                x[i] += W[i, j] * min(1, radius / d) * (y[j] - y[i])
        xs.append(x)
    return np.stack(xs)


@pytest.mark.parametrize("tau", [0.3, None])
@pytest.mark.parametrize(
    "matrices", [static_ring(N), random_symmetric(N, 3, seed=1), np.full((1, N, N), 1 / N)], ids=len
)
def test_clipped_gossip_follows_its_equation(matrices, tau):
    p = problem(N)
    built = build(df.clipped_gossip, p, matrices, LR, tau=tau)
    np.testing.assert_allclose(run(built, p, STEPS), loop(p, matrices, tau), rtol=0, atol=1e-10)


def test_with_a_radius_that_nothing_reaches_it_is_adapt_then_combine():
    p, matrices = problem(N), random_symmetric(N, 3, seed=1)
    plain = run(build(df.adapt_then_combine, p, matrices, LR), p)
    np.testing.assert_allclose(run(build(df.clipped_gossip, p, matrices, LR, tau=1e6), p), plain, rtol=0, atol=1e-12)


@each_lie
def test_whatever_a_worker_sends_moves_a_neighbor_by_at_most_the_radius_times_its_weight(sends):
    p, W = problem(N, starts_equal=True), static_ring(N)
    built = hostile(build(df.clipped_gossip, p, W, 0.0, tau=0.3), 2, LIES[sends])
    moved = np.linalg.norm(run(built, p, 1)[1] - p.start, axis=1)
    expected = np.where(W[0, :, 2] * (np.arange(N) != 2) > 0, 0.0 if sends == "nan" else 0.3 * W[0, :, 2], 0.0)
    np.testing.assert_allclose(moved, expected, atol=1e-14)


def test_a_hostile_worker_is_the_same_on_ranks():
    algorithm = hostile(
        df.adapt_then_combine(lambda x, b: (x * b).sum(), Sgd(0.1), df.topology("ring", 4)), 1, LIES["garbage"]
    )
    step = df.simulate(algorithm.step, 4)
    batches, state = torch.arange(8.0).view(4, 2), df.stack(algorithm.init(torch.ones(2)), 4)

    def train(rank):
        own = algorithm.init(torch.ones(2))
        for t in range(3):
            own, _ = algorithm.step(own, batches[rank], t)
        return own.params[0]

    for t in range(3):
        state, _ = step(state, batches, t)
    assert torch.equal(torch.stack(on_kept_ranks(4, train)), state.params[0])
    assert state.params[0].abs().max() > 5


def test_several_workers_lie_as_functions_say_and_mix_their_own_values():
    p, W = problem(N), static_ring(N)
    built = hostile(build(df.adapt_then_combine, p, W, 0.0), 2, lambda x, t: -x)
    built = hostile(built, 4, lambda x, t: (t + 10) * x)
    sent = p.start * np.array([1, 1, -1, 1, 10, 1])[:, None]
    expected = W[0] @ sent + np.diag(W[0])[:, None] * (p.start - sent)
    np.testing.assert_allclose(run(built, p, 1)[1], expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"hostile\(returned=.*a tensor like x, of shape"):
        run(hostile(built, 0, lambda x, t: x[:1]), p, 1)


def accuracy_of_the_others(algorithm, sends, n=8, liar=3):
    """Of seven workers that learn to tell four clouds apart while the eighth one lies."""
    draw = torch.Generator().manual_seed(0)
    centers = torch.randn(4, 6, generator=draw)
    labels = torch.randint(4, (n, 64), generator=draw)
    inputs = centers[labels] + 0.7 * torch.randn(n, 64, 6, generator=draw)
    tested = torch.randint(4, (2000,), generator=draw)
    tests = centers[tested] + 0.7 * torch.randn(2000, 6, generator=draw)

    def cross_entropy(w, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(x @ w, y)

    built = algorithm(cross_entropy, Sgd(0.3), df.topology("static-exp", n))
    built = built if sends is None else hostile(built, liar, LIES[sends])
    state, step = df.stack(built.init(torch.zeros(6, 4)), n), df.simulate(built.step, n)
    for t in range(100):
        state, _ = step(state, (inputs, labels), t)
    honest = df.params(state)[torch.arange(n) != liar]
    return ((tests @ honest).argmax(-1) == tested).double().mean(1).min().item()


@pytest.mark.thorough
@each_lie
def test_one_hostile_worker_of_eight_ruins_plain_mixing_and_not_clipped_mixing(sends):
    honest = accuracy_of_the_others(df.clipped_gossip, None)
    assert honest > 0.9
    assert accuracy_of_the_others(df.clipped_gossip, sends) > honest - 0.03
    assert accuracy_of_the_others(df.adapt_then_combine, sends) < (honest - 0.2 if sends != "constant" else honest + 1)


def test_preconditions_say_what_to_do():
    p = problem(4)
    with pytest.raises(ValueError, match=r"clipped_gossip\(tau=0\)"):
        build(df.clipped_gossip, p, static_ring(4), tau=0)
    with pytest.raises(ValueError, match=r"clipped_gossip\(hostile=0\)"):
        build(df.clipped_gossip, p, static_ring(4), hostile=0)
    with pytest.raises(ValueError, match=r"hostile\(sends='noise'\): sends is a function \(x, t\)"):
        hostile(build(df.clipped_gossip, p, static_ring(4)), 0, "noise")
    with pytest.raises(ValueError, match=r"hostile\(worker=4\): there are 4 workers"):
        hostile(build(df.clipped_gossip, p, static_ring(4)), 4, LIES["nan"])
