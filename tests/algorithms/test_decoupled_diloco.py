"""Decoupled DiLoCo against a float64 loop written from its equation, and its laws."""

import numpy as np
import pytest

import decentfn as df
from tests.algorithms.test_weighted_means import LR, STEPS, N, built, run, tokens_at
from tests.quadratics import Sgd, loss, problem
from tests.quadratics import run as run_plain

H, P = 4, 2
OPTIONS = {"inner_steps": H, "num_fragments": P}
FRAGMENTS = [np.array([0, 2, 3]), np.array([1, 4])]
"""The leaves are a bucket each, of 2 and of 3 elements, cut into equal parts."""


def tokens_of(t):
    """Worker 1 trains in the first half alone, and worker 2 in every second step."""
    return tokens_at(t) * [1, t < STEPS // 2, t % 2, 1]


def loop(p, quorum):
    theta, phi, b = (np.array(z) for z in (p.start, p.start, np.zeros_like(p.start)))
    tokens, steps, xs = np.zeros((P, N)), np.zeros((P, N)), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        tokens, steps = tokens + tokens_of(t), steps + (tokens_of(t) > 0)
        for f, mine in enumerate(FRAGMENTS):
            if (t + 1) % H == (f + 1) * H // P % H and (steps[f] > 0).sum() >= quorum:
                w = tokens[f] ** 2 / np.maximum(steps[f], 1)
                delta = np.average(phi[:, mine] - theta[:, mine], axis=0, weights=w)
                b[:, mine] = 0.9 * b[:, mine] + delta
                phi[:, mine] -= 0.7 * (delta + 0.9 * b[:, mine])
                theta[:, mine] = phi[:, mine]
                tokens[f], steps[f] = 0, 0
        xs.append(theta.copy())
    return np.stack(xs)


@pytest.mark.parametrize("quorum", [1, 4])
def test_decoupled_diloco_follows_its_equation(quorum):
    p = problem(N, starts_equal=True)
    made = built(df.decoupled_diloco, quorum=quorum, **OPTIONS)
    np.testing.assert_allclose(run(made, p, tokens_of), loop(p, quorum), rtol=0, atol=1e-10)


def test_with_equal_weights_it_is_diloco_and_in_fragments_streaming_diloco():
    p, topology = problem(N, starts_equal=True), df.topology("complete", N)

    def path(algorithm, **options):
        return run_plain(algorithm(loss, Sgd(LR), topology, inner_steps=H, bucket_mb=1e-9, **options), p, STEPS)

    np.testing.assert_allclose(path(df.decoupled_diloco, num_fragments=1), path(df.diloco), rtol=0, atol=1e-12)
    fragments = path(df.streaming_diloco, num_fragments=P, delay=0, alpha=0.0)
    np.testing.assert_allclose(path(df.decoupled_diloco, num_fragments=P), fragments, rtol=0, atol=1e-12)


def test_an_absent_worker_changes_only_the_members_of_the_mean():
    p = problem(N, starts_equal=True)
    others = p._replace(A=p.A[:3], b=p.b[:3], start=p.start[:3])
    absent = run(built(df.decoupled_diloco, **OPTIONS), p, lambda t: tokens_at(t) * (np.arange(N) < 3))
    without = run(built(df.decoupled_diloco, 3, **OPTIONS), others, lambda t: tokens_at(t)[:3])
    np.testing.assert_allclose(absent[:, :3], without, rtol=0, atol=1e-12)


def test_preconditions_say_what_to_do():
    with pytest.raises(ValueError, match=r"decoupled_diloco\(.*quorum=5\).*there are 4 workers"):
        built(df.decoupled_diloco, quorum=5, **OPTIONS)
    with pytest.raises(ValueError, match=r"num_fragments=5.*num_fragments <= inner_steps"):
        built(df.decoupled_diloco, inner_steps=4, num_fragments=5)
