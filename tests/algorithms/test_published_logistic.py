"""BlueFog's logistic regression on a ring of eight: corrected methods reach the optimum, the others stop short."""

import pytest
import torch

import decentfn as df
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.algorithms.exact_diffusion import exact_diffusion
from decentfn.algorithms.extra import extra
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.push_diging import push_diging
from tests.quadratics import Sgd

N, SAMPLES, DIM = 8, 20, 5
RHO, LR = 0.01, 0.1


def shards() -> tuple[torch.Tensor, torch.Tensor]:
    """`X [N, 20, 5]` and labels ±1 `[N, 20]`, drawn in float32 under each worker's own seed."""
    features, labels = [], []
    for rank in range(N):
        draw = torch.Generator().manual_seed(123417 * rank)
        X = torch.randn(SAMPLES, DIM, generator=draw).double()
        w = torch.randn(DIM, 1, generator=draw).double()
        positive = torch.rand(SAMPLES, 1, generator=draw).double() < 1 / (1 + torch.exp(X @ w))
        features.append(X)
        labels.append(2.0 * positive[:, 0].double() - 1)
    return torch.stack(features), torch.stack(labels)


def loss_fn(x, batch):
    X, y = batch
    # The regulariser's norm is not squared; its gradient at 0 is 0.
    return torch.log1p(torch.exp(-y * (X @ x))).mean() + RHO / 2 * torch.linalg.vector_norm(x)


pytestmark = [pytest.mark.xdist_group("published_logistic"), pytest.mark.thorough]  # one process makes the fixture


@pytest.fixture(scope="module")
def optimum() -> torch.Tensor:
    X, y = shards()
    x = torch.zeros(DIM, dtype=torch.float64)
    for _ in range(20_000):
        residual = -y * torch.sigmoid(-y * (X @ x))
        norm = x.norm()
        x = x - LR * (
            torch.einsum("nij,ni->j", X, residual) / (N * SAMPLES) + (RHO / 2 * x / norm if norm > 0 else 0 * x)
        )
    return x


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "options", "published"),
    [
        (exact_diffusion, {}, "2.2e-08"),
        (gradient_tracking, {"form": "awc"}, "2.2e-08"),
        (gradient_tracking, {"form": "semi-atc"}, "2.2e-08"),
        (gradient_tracking, {"form": "atc"}, "2.2e-08"),
        (extra, {}, "2.2e-08"),
        (push_diging, {}, "2.2e-08"),
        (adapt_then_combine, {}, "8.2e-02"),
        (adapt_while_communicate, {}, "6.5e-02"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_worker_zeros_error_after_a_thousand_steps_is_the_published_one(function, options, published, optimum):
    init, step = function(loss_fn, Sgd(LR), df.topology("static-ring", num_workers=N), **options)
    state, batch = df.stack(init(torch.zeros(DIM, dtype=torch.float64)), N), shards()
    step = df.simulate(step, N)
    for t in range(1000):
        state, _ = step(state, batch, t)
    assert f"{float((state.params[0][0] - optimum).norm()):.1e}" == published
