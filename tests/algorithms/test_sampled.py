"""Sampled participation: a random share of the workers takes part in a round, on `sampled` and by `arrives`."""

from functools import lru_cache, partial

import numpy as np
import pytest
import torch

import decentfn as df
from tests.quadratics import Sgd, flat, loss, problem, run, states

N, M, H, LR, STEPS = 6, 3, 4, 0.05, 40


of_seed = lru_cache(partial(df.topologies.sampled, N, M))


def drawn(t, seed=5):
    """The workers of round t, as a mask."""
    return (df.topologies.mixing_matrix(of_seed(seed=seed), t).diagonal() < 1).numpy()


def agree(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_each_round_averages_as_many_random_workers_and_all_alike():
    made, together = df.topologies.sampled(N, M, seed=5), np.zeros((N, N))
    for t in range(600):
        W = df.mixing_matrix(made, t).numpy()
        mask = drawn(t)
        assert mask.sum() == M
        agree(W, np.where(np.outer(mask, mask), 1 / M, np.diag(~mask)), 1e-15)
        together += np.outer(mask, mask)
    agree(together.diagonal() / 600, M / N, 0.1)
    agree(together[~np.eye(N, dtype=bool)] / 600, M * (M - 1) / (N * (N - 1)), 0.1)
    assert df.topologies.certificate(made).expected_contraction == pytest.approx(1 - (M - 1) / (N - 1), abs=0.05)
    assert not np.array_equal(drawn(0, 1), drawn(0, 2)) or not np.array_equal(drawn(1, 1), drawn(1, 2))


@pytest.mark.parametrize("participants", [1, N + 1])
def test_a_sample_of_one_or_of_more_than_all_is_refused(participants):
    with pytest.raises(ValueError, match=rf"sampled\(participants={participants}\): from 2 to all 6"):
        df.topologies.sampled(N, participants)


@pytest.mark.parametrize(("n", "m"), [(64, 8), (17, 2)])
def test_rounds_of_few_of_many_workers_need_not_reach_all_soon(n, m):
    """In the rounds that are tried first, some workers receive nothing; a round may come rarely, too."""
    for seed in range(3):
        made = df.topologies.sampled(n, m, seed=seed)
        assert [int((df.mixing_matrix(made, t).diagonal() < 1).sum()) for t in range(3)] == [m] * 3

    def rarely(t):
        peers = (torch.arange(n) ^ 1 if df.draws.uniform(4, t, 0, ()) < 0.02 else torch.full((n,), -1)).clamp(max=n - 1)
        peers = torch.where(peers[peers] == torch.arange(n), peers, -1)[:, None]
        return peers, peers, torch.full((n, 2), 0.5, dtype=torch.float64)

    made = df.topologies.from_draw("rarely", n, rarely)
    shares = [float((df.mixing_matrix(made, t).diagonal() < 1).double().mean()) for t in range(500)]
    assert 0.005 < sum(shares) / 500 < 0.04 and not any(shares[:16])


def test_local_sgd_with_a_share_of_the_workers_per_round_follows_its_equation():
    p = problem(N)
    x, xs = p.start.copy(), [p.start]
    for t in range(STEPS):
        x = x - LR * p.gradients(x)
        if t % H == 0:
            these = drawn(t // H)
            x[these] = x[these].mean(0)
        xs.append(x.copy())
    schedule = df.topologies.every(H, df.topologies.sampled(N, M, seed=5))
    agree(run(df.adapt_then_combine(loss, Sgd(LR), schedule), p, STEPS), np.stack(xs))


def test_the_mean_of_gasloc_on_a_sample_of_the_workers_follows_diloco():
    """PyTorch's Nesterov on the mean drift."""
    p = problem(N, starts_equal=True)
    options = {"outer_learning_rate": 0.6, "outer_momentum": 0.5, "gossip_step": 1.0}
    made = df.gasloc(loss, Sgd(LR), df.topologies.sampled(N, M), inner_steps=H, **options)
    history = states(made, p, STEPS)
    mean = torch.nn.Parameter(torch.tensor(p.start[0]))
    outer = torch.optim.SGD([mean], lr=0.6, momentum=0.5, nesterov=True)
    before = flat(history[0].params)
    for r in range(STEPS // H):
        theta = before
        for _ in range(H):
            theta = theta - LR * p.gradients(theta)
        mean.grad = torch.tensor((before - theta).mean(0))
        outer.step()
        before = flat(history[(r + 1) * H].params)
        agree(before.mean(0), mean.detach().numpy())
    assert np.ptp(before, 0).max() > 1e-3


def test_diloco_counts_the_drawn_workers_alone_and_others_bring_their_progress_later():
    def takes_part(t, worker):
        u = df.draws.uniform(7, t, 0, (N,))
        return (u < u.gather(0, worker.view(1))).sum() < M

    p = problem(N, starts_equal=True)
    theta, phi, b, xs = p.start.copy(), p.start[0], 0.0, [p.start]
    counts = []
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            mask = np.array([bool(takes_part(torch.tensor(t), torch.tensor(i))) for i in range(N)])
            waited = np.array([t + 1] * N) - (counts[-1] if counts else np.zeros(N))
            w = np.where(mask, waited, 0.0)  # tokens² / steps, with a token per step
            delta = (w[:, None] * (phi - theta)).sum(0) / w.sum()
            b = 0.5 * b + delta
            phi = phi - 0.6 * (delta + 0.5 * b)
            theta[mask] = phi
            counts.append(np.where(mask, t + 1, counts[-1] if counts else 0))
            assert mask.sum() == M
        xs.append(theta.copy())
    options = {"num_fragments": 1, "inner_steps": H, "outer_learning_rate": 0.6, "outer_momentum": 0.5}
    made = df.decoupled_diloco(loss, Sgd(LR), df.topology("complete", N), arrives=takes_part, **options)
    agree(run(made, p, STEPS), np.stack(xs))
