"""A²CiD² against a float64 loop written from its equation, its laws, and its speed on rings."""

import math

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.algorithms.a2cid2 import rates
from tests.quadratics import Sgd, flat, loss, problem, random_symmetric, run, states

N, STEPS, LR = 6, 40, 0.1


def matrices_of(topology, steps):
    return np.stack([df.mixing_matrix(topology, t).numpy() for t in range(steps)])


def laplacian_of_ring(n):
    """Of a ring whose edges meet in every second step."""
    eye = np.eye(n)
    return eye - (np.roll(eye, 1, 0) + np.roll(eye, -1, 0)) / 2


def loop(p, matrices, eta, alpha):
    x, copy, e, xs = p.start, p.start, math.exp(-2 * eta), [p.start]
    for t in range(STEPS):
        x, copy = ((1 + e) * x + (1 - e) * copy) / 2, ((1 - e) * x + (1 + e) * copy) / 2
        u, d = -LR * p.gradients(x), np.zeros_like(x)
        for i, row in enumerate(matrices[t]):
            for j in set(np.flatnonzero(row)) - {i}:
                d[i] = x[i] - x[j]
        x, copy = x - d / 2 + u, copy - alpha * d + u
        xs.append(x)
    return np.stack(xs)


@pytest.mark.parametrize("topology", [df.topology("ring", N), df.topology("random-matching", N)], ids=repr)
def test_a2cid2_follows_its_equation_and_keeps_both_means_equal(topology):
    p = problem(N)
    history = states(df.a2cid2(loss, Sgd(LR), topology, bucket_mb=1e-9), p, STEPS)
    expected = loop(p, matrices_of(topology, STEPS), *rates(topology))
    np.testing.assert_allclose(np.stack([flat(s.params) for s in history]), expected, rtol=0, atol=1e-10)
    for state in history:
        np.testing.assert_allclose(flat(state.params).mean(0), flat(state.memory.copy).mean(0), atol=1e-13)


def test_without_exchange_it_is_gossip_in_random_pairs():
    p, topology = problem(N), df.topology("random-matching", N)
    plain = run(df.adapt_while_communicate(loss, Sgd(LR), topology), p, STEPS)
    np.testing.assert_allclose(run(df.a2cid2(loss, Sgd(LR), topology, eta=0.0), p, STEPS), plain, rtol=0, atol=1e-12)


def test_the_rates_of_a_ring_are_those_of_its_laplacian():
    n = 8
    chi1 = 1 / np.linalg.eigvalsh(laplacian_of_ring(n))[1]
    inverse = np.linalg.pinv(laplacian_of_ring(n))
    chi2 = (inverse[0, 0] + inverse[1, 1] - 2 * inverse[0, 1]) / 2
    expected = 1 / (2 * math.sqrt(chi1 * chi2)), math.sqrt(chi1 / chi2) / 2
    np.testing.assert_allclose(rates(df.topology("ring", n)), expected, rtol=1e-12)
    np.testing.assert_allclose(rates(df.topologies.shuffled(df.topology("ring", n))), expected, rtol=0.2)


def steps_to_agree(n, eta):
    """Steps after which the disagreement of random vectors on a ring of random pairs is a thousandth."""
    topology = df.topologies.shuffled(df.topology("ring", n))
    algorithm = df.a2cid2(lambda x, batch: (0 * x).sum(), Sgd(0.0), topology, eta=eta)
    step = df.simulate(algorithm.step, n)
    start = torch.randn(n, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = df.stack(algorithm.init(start[0]), n)
    state = df.with_params(state, start)
    first, t = (start - start.mean(0)).norm(), 0
    while (state.params[0] - start.mean(0)).norm() > 1e-3 * first:
        state, _ = step(state, torch.zeros(n, 1), t)
        t += 1
    return t


@pytest.mark.thorough
def test_on_a_ring_agreement_takes_time_in_proportion_to_its_size_instead_of_its_square():
    accelerated = [steps_to_agree(n, None) for n in (16, 64)]
    plain = [steps_to_agree(n, 0.0) for n in (16, 32)]
    assert 3 < accelerated[1] / accelerated[0] < 6
    assert plain[1] / plain[0] > 3.2
    assert plain[0] > 2.5 * accelerated[0]


def test_preconditions_say_what_to_do():
    with pytest.raises(ValueError, match=r"a2cid2\(topology='static-ring'\).*pairs.*'ring'"):
        df.a2cid2(loss, Sgd(LR), df.topology("static-ring", N))
    with pytest.raises(ValueError, match=r"a2cid2\(topology='given'\).*pairs"):
        df.a2cid2(loss, Sgd(LR), df.topologies.from_matrices("given", random_symmetric(N, 3, seed=1)))
    lower = df.topologies.from_groups("halves", [[df.topologies.Edge([0, 1]), df.topologies.Edge([2, 3])]], 4)
    with pytest.raises(ValueError, match=r"a2cid2.*do not connect all workers"):
        df.a2cid2(loss, Sgd(LR), lower)
    with pytest.raises(ValueError, match=r"a2cid2\(eta=-1.0\)"):
        df.a2cid2(loss, Sgd(LR), df.topology("ring", N), eta=-1.0)
