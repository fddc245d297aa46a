"""DeMuon against a float64 numpy loop, with msgn from a singular value decomposition, and its laws."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from tests.algorithms.test_compressed_algorithms import (
    START,
    STATIC,
    VARYING,
    N,
    flat,
    gradients,
    history,
    loss,
    schedule,
)
from tests.quadratics import Sgd, batch, problem

STEPS, LR, LAM = 40, 0.05, 0.3
MATRICES = ((slice(0, 9), (3, 3)), (slice(14, 38), (4, 6)))
"""Places of the two matrices; the vector lies between them."""


def least_squares(x, batch):
    A, b = batch
    return ((A @ x - b) ** 2).sum() / 2


def msgn(v):
    v = v.copy()
    for place, shape in MATRICES:
        for i, row in enumerate(v[:, place]):
            U, S, Vt = np.linalg.svd(row.reshape(shape), full_matrices=False)
            S = S / (np.linalg.norm(S) + 1e-7)
            for _ in range(5):
                S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
            v[i, place] = (U * S @ Vt).ravel()
    return v


def numpy_demuon(matrices):
    x, path = START.copy(), [START]
    m = v = np.zeros_like(x)
    for t in range(STEPS):
        m_new = (1 - LAM) * m + LAM * gradients(x)
        v = matrices[(t - 1) % len(matrices)] @ (v + m_new - m) if t else m_new
        m = m_new
        x = matrices[t % len(matrices)] @ (x - LR * msgn(v))
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize("matrices", [STATIC["random"], VARYING], ids=["static", "varying"])
def test_demuon_is_its_equation(matrices):
    states = history(df.demuon(loss, Sgd(LR), schedule(matrices), momentum=LAM), STEPS)
    path = np.stack([flat(state.params) for state in states])
    assert np.abs(path - numpy_demuon(matrices)).max() <= 1e-10
    for state in states:
        np.testing.assert_allclose(flat(state.memory.v).mean(0), flat(state.memory.m).mean(0), atol=1e-13)


def test_demuon_without_matrices_and_momentum_is_gradient_tracking():
    p = problem(N)
    ends = []
    for algorithm, options in ((df.demuon, {"momentum": 1.0}), (df.gradient_tracking, {})):
        built = algorithm(least_squares, Sgd(LR), schedule(VARYING), **options)
        state = trees.map(lambda *rows: torch.stack(rows), *[built.init(torch.tensor(x)) for x in p.start])
        step = df.simulate(built.step, N)
        for t in range(STEPS):
            state, _ = step(state, batch(p), t)
        ends.append(state.params[0])
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_a_momentum_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"demuon\(momentum=0.0\).*\(0, 1\]"):
        df.demuon(loss, Sgd(LR), schedule(VARYING), momentum=0.0)
