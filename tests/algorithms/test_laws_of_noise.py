"""Two laws of linear theory, exact: the maps of a step are read off the library's own steps, and covariances are solved for.

The stationary variance of a worker's parameters is, to first order in the rate, 1/N of one worker's, on every graph
(arXiv:2601.07021). Disagreement follows all eigenvalues of W, not the gap alone (arXiv:2606.09154).
"""

import numpy as np
import pytest
import torch

import decentfn as df

N, CURVATURE = 8, 1.3
GRAPHS = ["static-ring", "chain", "star", "static-exp", "one-peer-exp", "complete"]
ALGORITHMS = {
    "adapt_then_combine": df.adapt_then_combine,
    "adapt_while_communicate": df.adapt_while_communicate,
    "all_reduce": df.all_reduce,
}


def loss(x, noise):
    """Gradient a x + ξ."""
    return CURVATURE * (x**2).sum() / 2 + (noise * x).sum()


def maps(algorithm, topology, rate):
    """A and B of `x⁺ = A x + B ξ` for each phase: a step of the columns of the identity at once."""
    n = topology.num_workers
    init, step = algorithm(loss, df.sgd(rate), topology)
    state, step = df.stack(init(torch.zeros(n, dtype=torch.float64)), n), df.simulate(step, n)
    eye, zero, found = torch.eye(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64), []
    for t in range(topology.period):
        from_x, _ = step(df.with_params(state, eye), zero, t)
        from_noise, _ = step(df.with_params(state, zero), eye, t)
        found.append((df.params(from_x).numpy(), df.params(from_noise).numpy()))
    return found


def stationary(phases):
    """Covariance after a whole period, `P = A P Aᵀ + Q`, by doubling."""
    A, Q = np.eye(len(phases[0][0])), 0.0
    for a, b in phases:
        A, Q = a @ A, a @ Q @ a.T + b @ b.T if isinstance(Q, np.ndarray) else b @ b.T
    for _ in range(60):
        A, Q = A @ A, Q + A @ Q @ A.T
    return Q


def on(name, n):
    return df.topology(name, n)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("algorithm", ["adapt_then_combine", "adapt_while_communicate"])
def test_a_workers_variance_is_one_nth_of_one_worker_alone_to_first_order_in_the_rate(algorithm, name):
    """The rest is of first order: a quarter of the rate leaves about a quarter of it."""
    excess = []
    for rate in (0.004, 0.001):
        alone = stationary(maps(df.adapt_then_combine, on("complete", 1), rate))[0, 0]
        assert alone == pytest.approx(rate / (2 * CURVATURE), rel=rate)
        own = np.diag(stationary(maps(ALGORITHMS[algorithm], on(name, N), rate)))
        excess.append(np.abs(N * own / alone - 1).max())
    assert excess[0] < 0.5
    assert excess[1] == pytest.approx(excess[0] / 4, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("name", ["static-ring", "chain", "star", "complete"])
def test_disagreement_under_noise_is_a_sum_over_all_eigenvalues(name):
    """Σ_{k >= 2} η² λ_k² / (1 - λ_k² (1 - η a)²), for adapt-then-combine on a symmetric W."""
    rate, topology = 0.05, on(name, N)
    P = stationary(maps(df.adapt_then_combine, topology, rate))
    eigenvalues = np.sort(np.linalg.eigvalsh(df.mixing_matrix(topology, 0).numpy()))[:-1]
    expected = (rate**2 * eigenvalues**2 / (1 - eigenvalues**2 * (1 - rate * CURVATURE) ** 2)).sum()
    assert np.trace(P) - P.sum() / N == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_certificate_tells_how_far_noise_drives_workers_apart(name):
    """Its spread times η² σ², to first order in the rate η: of the library's own steps, on every graph."""
    rate, topology = 1e-5, on(name, N)
    P = stationary(maps(df.adapt_then_combine, topology, rate))
    spread = df.topologies.certificate(topology).noise_spread
    assert (np.trace(P) - P.sum() / N) / N == pytest.approx(rate**2 * spread, rel=1e-3, abs=1e-16)


def test_the_noise_spread_is_that_of_its_closed_form_or_none():
    ring = df.mixing_matrix(on("static-ring", 16), 0).numpy()
    squares = np.sort(np.linalg.eigvalsh(ring) ** 2)[:-1]
    spread = {name: df.topologies.certificate(on(name, 16)).noise_spread for name in ("static-ring", "random-matching")}
    assert spread["static-ring"] == pytest.approx((squares / (1 - squares)).sum() / 16)
    kept = 0.5 - 0.5 / 15  # of the squared disagreement, by a random pairing, in every direction
    assert spread["random-matching"] == pytest.approx(15 / 16 * kept / (1 - kept), rel=0.1)
    assert df.topologies.certificate(on("complete", 16)).noise_spread == pytest.approx(0, abs=1e-12)
    for unbounded in (df.topologies.idle(4), on("static-ring", 300)):
        assert df.topologies.certificate(unbounded).noise_spread is None


def disagreements(W, steps):
    """Mean squared disagreement after each step, relative to the start, of random vectors: `Σ_{k >= 2} λ_k^{2t} / (N - 1)`."""
    topology = df.topologies.from_matrices("given", [W.tolist()])
    init, step = df.adapt_then_combine(lambda x, b: 0.0 * x.sum(), df.sgd(0.1), topology)
    n = len(W)
    state, step = df.stack(init(torch.zeros(n, dtype=torch.float64)), n), df.simulate(step, n)
    state, found = df.with_params(state, torch.eye(n, dtype=torch.float64)), []
    for t in range(steps):
        state, _ = step(state, torch.zeros(n, 1), t)
        found.append(float(df.consensus_distance(state)) ** 2)
    return np.array(found)


def test_of_two_graphs_the_one_with_the_smaller_gap_may_agree_sooner():
    """Two cliques joined by three links have few slow modes, a ring has many. Both follow their whole spectrum in every step."""
    n = 16
    joined = np.kron(np.eye(2), np.full((8, 8), 1 / 8))
    for i, j in ((5, 8), (6, 9), (7, 10)):
        joined[[i, j], [i, j]] -= 1 / 16
        joined[[i, j], [j, i]] = 1 / 16
    ring = df.mixing_matrix(df.topology("static-ring", n), 0).numpy()
    gaps, spreads, curves = [], [], []
    for W in (joined, ring):
        eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(W)))[:-1]
        powers = np.array([(eigenvalues ** (2 * t)).sum() for t in range(1, 31)])
        curve = disagreements(W, 30)
        np.testing.assert_allclose(curve / curve[0], powers / powers[0], rtol=1e-8)
        gaps.append(1 - eigenvalues[-1])
        spreads.append(df.topologies.certificate(df.topologies.from_matrices("given", [W.tolist()])).noise_spread)
        curves.append(powers / (n - 1))
    assert gaps[0] < gaps[1] and spreads[0] < spreads[1]
    assert curves[0][4] < 0.65 * curves[1][4]
