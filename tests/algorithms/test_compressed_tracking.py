"""BEER and MoTEF against float64 numpy loops in the order of the papers, and their laws."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn import compressors
from tests.algorithms.test_compressed_algorithms import (
    COMPRESSORS,
    CURVATURE,
    LR,
    MINIMUM,
    SIZE,
    START,
    STATIC,
    TOP,
    VARYING,
    N,
    flat,
    gradients,
    history,
    loss,
    narrow_run,
    schedule,
)
from tests.algorithms.test_published_logistic import DIM, loss_fn, optimum, shards  # noqa: F401 (a fixture)
from tests.quadratics import Sgd

STEPS = 40
each_compressor = pytest.mark.parametrize(("compressor", "C"), COMPRESSORS, ids=lambda c: getattr(c, "name", ""))


def numpy_motef(W, C, gamma, lam):
    """Every worker holds every public copy; BEER is λ = 1."""

    def pull(public):
        return np.stack([sum(W[i, j] * (public[j] - public[i]) for j in range(N)) for i in range(N)])

    def compressed(z, t):
        return np.stack([C(row, t, i) for i, row in enumerate(z)])

    x, path = START.copy(), [START]
    h, s = compressed(x, 0), np.zeros((N, SIZE))
    m = v = lam * gradients(x)
    for t in range(1, STEPS + 1):
        x = x + gamma * pull(h) - LR * v
        path.append(x)
        h = h + compressed(x - h, t)
        s = s + compressed(v - s, t)
        m_new = (1 - lam) * m + lam * gradients(x)
        v = v + gamma * pull(s) + m_new - m
        m = m_new
    return np.stack(path)


def path_of(algorithm):
    return np.stack([flat(state.params) for state in history(algorithm, STEPS)])


@pytest.mark.thorough
@each_compressor
def test_motef_is_its_equation(compressor, C):
    options = {"compressor": compressor, "gamma": 0.3, "momentum": 0.4}
    algorithm = df.motef(loss, Sgd(LR), schedule(STATIC["random"]), **options)
    assert np.abs(path_of(algorithm) - numpy_motef(STATIC["random"][0], C, 0.3, 0.4)).max() <= 1e-10


def test_beer_is_its_equation_and_motef_with_momentum_1():
    options = {"compressor": TOP[0], "gamma": 0.3}
    beer = path_of(df.beer(loss, Sgd(LR), schedule(STATIC["ring"]), **options))
    assert np.abs(beer - numpy_motef(STATIC["ring"][0], TOP[1], 0.3, 1.0)).max() <= 1e-10
    motef = df.motef(loss, Sgd(LR), schedule(STATIC["ring"]), momentum=1.0, **options)
    assert np.array_equal(path_of(motef), beer)


def test_beer_uncompressed_is_gradient_tracking():
    topology = schedule(STATIC["random"])
    beer = df.beer(loss, Sgd(LR), topology, compressor=compressors.identity(), gamma=1.0)
    tracking = df.gradient_tracking(loss, Sgd(LR), topology, form="awc")
    assert np.abs(path_of(beer) - path_of(tracking)).max() <= 1e-12


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_the_mean_of_trackers_is_the_mean_of_what_they_track(momentum):
    options = {"compressor": TOP[0], "gamma": 0.3, "momentum": momentum}
    for state in history(df.motef(loss, Sgd(LR), schedule(STATIC["ring"]), **options), STEPS):
        v, m = flat(state.memory.v), flat(state.memory.m)
        np.testing.assert_allclose(v.mean(0), m.mean(0), atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (df.beer, {"compressor": compressors.identity(), "gamma": 1.0}),
        (df.motef, {"compressor": compressors.quantize(8), "gamma": 0.3, "momentum": 0.5}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_float32_reaches_the_optimum_to_its_rounding(algorithm, options):
    state = narrow_run(algorithm(loss, Sgd(2 * LR), schedule(STATIC["ring"]), **options), torch.float32, 250)
    best = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)
    assert np.abs(flat(state.params) - best).max() < 1e-5
    assert np.abs(flat(state.memory.v).mean(0) - flat(state.memory.m).mean(0)).max() < 1e-6


@pytest.mark.one_in(2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "options", "arrives"),
    [(df.beer, {}, True), (df.motef, {"momentum": 0.5}, True), (df.choco_sgd, {}, False), (df.deep_squeeze, {}, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_tracking_reaches_the_optimum_of_heterogeneous_data(algorithm, options, arrives, optimum):  # noqa: F811
    topology = df.topology("static-ring", 8)
    options = {"compressor": compressors.top_k(0.1), "gamma": 0.2, **options}
    init, step = algorithm(loss_fn, Sgd(0.1), topology, **options)
    state, batch = df.stack(init(torch.zeros(DIM, dtype=torch.float64)), 8), shards()
    step = df.simulate(step, 8)
    for t in range(1000):
        state, _ = step(state, batch, t)
    error = float((state.params[0] - optimum).norm(dim=1).max())
    assert error < 1e-6 if arrives else error > 1e-2


def test_preconditions_say_what_to_do():
    for algorithm in (df.beer, df.motef):
        name = algorithm.__name__
        with pytest.raises(ValueError, match=rf"{name}.*same mixing matrix at every step.*deep_squeeze"):
            algorithm(loss, Sgd(LR), schedule(VARYING), compressor=TOP[0], gamma=0.3)
    with pytest.raises(ValueError, match=r"motef\(momentum=0.0\).*1 is beer"):
        df.motef(loss, Sgd(LR), schedule(STATIC["ring"]), compressor=TOP[0], gamma=0.3, momentum=0.0)
