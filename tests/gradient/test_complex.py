"""Complex parameters are trained as torch.optim trains them: real and imaginary parts are numbers of their own."""

import pytest
import torch

import decentfn as df
from decentfn import testing
from decentfn.core import trees

pytestmark = pytest.mark.thorough

OPTIMIZERS = {
    "sgd": (lambda: df.sgd(0.1, momentum=0.9, weight_decay=0.1), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (lambda: df.adamw(0.05, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.05}),
}


def start():
    draw = torch.Generator().manual_seed(0)
    return {
        "filter": torch.randn(3, 5, dtype=torch.complex64, generator=draw),
        "phase": torch.randn(5, dtype=torch.complex128, generator=draw),
        "gain": torch.randn(3, generator=draw),
    }


def loss_fn(params, batch):
    """Return the loss of a filtered spectrum `[n, 5]`, the same for the filters' conjugates."""
    out = torch.einsum("nf,cf->nc", batch * torch.exp(params["phase"].to(torch.complex64)), params["filter"])
    return ((out.real * params["gain"]).square() + out.imag.square()).mean() + (
        params["filter"] - 1j
    ).abs().square().sum()


def batch_of(t, worker=0):
    return torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(10 * t + worker))


WAYS = pytest.mark.parametrize("around", [lambda f: f, df.autograd], ids=["traced", "autograd"])


@pytest.mark.one_in(2)
@WAYS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_torch_optim(around, name):
    ours, theirs, arguments = OPTIMIZERS[name]
    leaves = {key: x.requires_grad_() for key, x in start().items()}
    optimizer = theirs(leaves.values(), **arguments, weight_decay=0.1)
    clipped = df.chain(df.clip_by_global_norm(1.0), ours())
    init, step = df.adapt_while_communicate(around(loss_fn), clipped, df.topology("complete", 1))
    for run in (step, df.compile(step, backend="aot_eager")):
        state = init(start())
        with torch.no_grad():
            for key, x in start().items():
                leaves[key].copy_(x)
        optimizer.state.clear()
        for t in range(4):
            state, metrics = run(state, batch_of(t), t)
            optimizer.zero_grad()
            loss = loss_fn(leaves, batch_of(t))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
            optimizer.step()
            torch.testing.assert_close((metrics.loss, metrics.grad_norm), (loss, norm), check_dtype=False)
        for key, x in df.params(state).items():
            torch.testing.assert_close(x, leaves[key].detach(), atol=1e-5, rtol=1e-5)


@WAYS
def test_ranks_compute_what_the_simulator_does(around):
    init, step = df.gradient_tracking(around(loss_fn), df.adamw(0.05), df.topology("ring", 2))

    def on_a_rank(rank):
        state = init(start())
        for t in range(3):
            state, _ = step(state, batch_of(t, rank), t)
        return df.params(state), df.consensus_mean(state), df.consensus_distance(state)

    state, run = df.stack(init(start()), 2), df.simulate(step, 2)
    for t in range(3):
        state, _ = run(state, torch.stack([batch_of(t, worker) for worker in range(2)]), t)
    distance = sum((x - x.mean(0)).abs().square().sum().double() / 2 for x in df.params(state).values()).sqrt()
    for rank, (own, mean, away) in enumerate(testing.on_ranks(2, on_a_rank)):
        for key, x in df.params(state).items():
            torch.testing.assert_close(own[key], x[rank], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mean[key], x.mean(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(away, distance, atol=1e-5, rtol=1e-5)
    changed = df.with_params(df.worker(state, 0), trees.map(torch.conj, start()))
    assert torch.equal(df.params(changed)["phase"], start()["phase"].conj())


@WAYS
@pytest.mark.parametrize(
    "optimizer", [df.sgd(0.1), df.from_torch(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))]
)
def test_a_complex_leaf_without_elements_in_its_own_bucket_is_simulated(around, optimizer):
    params = {"none": torch.ones(3, 0, dtype=torch.complex64), "some": torch.ones(2, dtype=torch.complex64)}

    def distances(params, batch):
        return sum((x - batch).abs().square().sum() for x in params.values())

    init, step = df.adapt_then_combine(around(distances), optimizer, df.topology("ring", 2), bucket_mb=1e-5)
    state, _ = df.simulate(step, 2)(df.stack(init(params), 2), torch.zeros(2, 1), 0)
    torch.testing.assert_close(df.params(state)["some"], torch.full((2, 2), 0.8 + 0j))
    assert df.params(state)["none"].shape == (2, 3, 0)
