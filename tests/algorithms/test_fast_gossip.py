"""Fast gossip averaging in every algorithm that offers it, against powers of matrices in float64."""

import functools
import math
import re

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn import kit
from decentfn.testing import PROMISES, Subject, try_promise
from tests import contract
from tests.quadratics import STEPS, Sgd, batch, build, loss, problem, random_symmetric, run, start, static_ring

N = 6
OFFERED = {
    "adapt_then_combine": {},
    "gradient_tracking": {},
    "demuon": {},
    "noloco": {"inner_steps": 2},
    "gasloc": {"inner_steps": 2},
}


def factor(W):
    """β and η of a symmetric matrix."""
    beta = np.sort(np.abs(np.linalg.eigvalsh(W)))[-2]
    root = math.sqrt(1 - beta**2)
    return beta, (1 - root) / (1 + root)


def polynomial(W, rounds):
    """The matrix by which `rounds` rounds mix."""
    eta, old, new = factor(W)[1], np.eye(len(W)), np.eye(len(W))
    for _ in range(rounds):
        old, new = new, (1 + eta) * W @ new - eta * old
    return new


@pytest.mark.parametrize("W", [static_ring(N)[0], random_symmetric(N, 1, seed=3)[0]], ids=["ring", "random"])
def test_adapt_then_combine_mixes_by_the_polynomial(W):
    p, rounds = problem(N), 4
    x, xs = p.start, [p.start]
    for _ in range(STEPS):
        x = polynomial(W, rounds) @ (x - 0.1 * p.gradients(x))
        xs.append(x)
    built = build(df.adapt_then_combine, p, W[None], gossip_rounds=rounds)
    np.testing.assert_allclose(run(built, p), np.stack(xs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OFFERED)
def test_several_rounds_are_one_of_the_polynomial_in_every_algorithm_that_offers_them(name):
    p, W, rounds = problem(N), static_ring(N)[0], 3
    mixed = polynomial(W, rounds)
    assert mixed.min() >= 0  # so that it is a topology
    fast = build(getattr(df, name), p, W[None], gossip_rounds=rounds, **OFFERED[name])
    one = build(getattr(df, name), p, mixed[None], **OFFERED[name])
    np.testing.assert_allclose(run(fast, p), run(one, p), rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [16, 32, 64])
def test_disagreement_after_several_rounds_beats_plain_gossip(n):
    rounds, topology = n // 2, df.topology("static-ring", n)
    beta, eta = factor(df.mixing_matrix(topology, 0).numpy())
    algorithm = df.adapt_then_combine(lambda x, batch: (0 * x).sum(), Sgd(0.0), topology, gossip_rounds=rounds)
    start = torch.eye(n, dtype=torch.float64)
    state = df.with_params(df.stack(algorithm.init(start[0]), n), start)
    state, _ = df.simulate(algorithm.step, n)(state, torch.zeros(n, 1), 0)
    mixed = state.params[0].numpy()
    np.testing.assert_allclose(mixed.mean(0), 1 / n, atol=1e-14)
    left = np.linalg.norm(mixed - 1 / n, 2)
    # The roots of z² = (1 + η) β z - η are a double one, √η: (1 + r (1 - √η)) √η^r after r rounds.
    expected = math.sqrt(eta) ** rounds * (1 + rounds * (1 - math.sqrt(eta)))
    assert left == pytest.approx(expected, rel=1e-6)
    assert left < 0.7 * beta**rounds


def test_a_guarded_worker_with_bad_parameters_takes_its_neighbors_mix():
    W = static_ring(N)
    algorithm = df.guard(df.adapt_then_combine(loss, Sgd(0.0), df.topologies.from_matrices("W", W), gossip_rounds=3))
    p = problem(N)
    state = start(algorithm, p)
    bad = state.params[0].clone()
    bad[2] = torch.nan
    state = state._replace(params=kit.Buckets([bad], state.params.plan))
    end, _ = df.simulate(algorithm.step, N)(state, batch(p), 0)
    assert torch.isfinite(end.params[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("promise", ["interpreters_agree", "traced_ranks_agree", "scales_the_loss"])
def test_fast_gossip_keeps_the_contract_on_ranks(promise):
    topology = contract.on("static-ring")
    assert try_promise(PROMISES[promise], Subject(df.gradient_tracking, topology, {"gossip_rounds": 3})) is None


def test_a_schedule_without_one_symmetric_matrix_is_refused():
    with pytest.raises(ValueError, match=r"gossip_rounds=2: 'ring' has period 2"):
        df.adapt_then_combine(loss, Sgd(0.1), df.topology("ring", N), gossip_rounds=2)
    with pytest.raises(ValueError, match=r"gradient_tracking\(form='awc', gossip_rounds=2\).*'atc'"):
        df.gradient_tracking(loss, Sgd(0.1), df.topology("static-ring", N), form="awc", gossip_rounds=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("n", [17, 32, 64])
def test_so_few_rounds_that_disagreement_would_grow_are_refused_and_the_advice_works(name, n):
    """From a_{-1} = a_0, where W has negative eigenvalues: static-ring of 64 grew by 3 % per step, chain by 14 %."""
    for topology in (df.topology("static-ring", n), df.topology("chain", n), df.topology("equitopo-u-static", n)):
        for rounds in (2, 3, 4, 5):
            grows = np.linalg.norm(polynomial(df.mixing_matrix(topology, 0).numpy(), rounds) - 1 / n, 2) > 1
            build = functools.partial(getattr(df, name), loss, Sgd(0.1), topology, **OFFERED[name])
            if not grows:
                build(gossip_rounds=rounds)
                continue
            with pytest.raises(
                ValueError, match=rf"gossip_rounds={rounds}: on .* multiply disagreement by \d"
            ) as error:
                build(gossip_rounds=rounds)
            build(gossip_rounds=int(re.findall(r"use gossip_rounds=(\d+)", str(error.value))[0]))


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("gamma", [1.0, 2.5, 4.0, 5.5])
def test_disagreement_that_all_rounds_make_grow_is_refused_and_no_other(rounds, gamma):
    """On this chain all eigenvalues of W are positive, and those of two fast rounds go down to -0.66."""
    alpha, topology = 0.5, df.topologies.lazy(df.topology("chain", N))
    W = df.mixing_matrix(topology, 0).numpy()
    away, carried = (W if rounds == 1 else polynomial(W, rounds)) - np.eye(N), alpha * np.eye(N)
    linear = np.block([[np.eye(N) + gamma * away, carried], [gamma * away, carried]])  # of φ and the outer momentum
    grows = np.abs(np.linalg.eigvals(linear)).max() > 1 + 1e-9  # 1 is the mean's
    build = functools.partial(
        df.noloco, loss, Sgd(0.0), topology, alpha=alpha, gamma=gamma, inner_steps=1, gossip_rounds=rounds
    )
    if grows:
        with pytest.raises(ValueError, match="noloco.* disagreement grows .*use gamma <= 1.5"):
            build()
        build(gamma=1.5)
    else:
        build()
