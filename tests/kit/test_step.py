"""The laws of the core algorithms, against torch.optim, large batches and float64 references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.comm import collectives, gossip
from decentfn.core import trees
from decentfn.core.buckets import loose
from tests import network

OPTIMIZERS = {
    "sgd": (lambda: df.sgd(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        lambda: df.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (lambda: df.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (lambda: df.adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
}


def regression(params, batch):
    inputs, targets = batch
    return ((torch.tanh(inputs @ params["w"]) @ params["v"] - targets) ** 2).mean()


def start():
    random = torch.Generator().manual_seed(1)
    return {
        "w": torch.randn(5, 4, generator=random, dtype=torch.float64),
        "v": torch.randn(4, 2, generator=random, dtype=torch.float64),
    }


def data(n, t, size=6):
    random = torch.Generator().manual_seed(t)
    inputs = torch.randn(n, size, 5, generator=random, dtype=torch.float64)
    return inputs, torch.sin(inputs[..., :2]) + torch.arange(n, dtype=torch.float64).view(n, 1, 1) / n


@pytest.mark.parametrize("algorithm", network.CORE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_torch_optim(algorithm, optimizer):
    ours, theirs = OPTIMIZERS[optimizer]
    init, step = getattr(df, algorithm)(regression, ours(), df.topology("complete", 1))
    state = init(start())
    reference = {name: p.clone().requires_grad_() for name, p in start().items()}
    optim = theirs(reference.values())
    for t in range(100):
        batch = tuple(x[0] for x in data(1, t))
        state, metrics = step(state, batch, t)
        optim.zero_grad()
        loss = regression(reference, batch)
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in reference.values()))
        optim.step()
        torch.testing.assert_close(metrics.loss, loss.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(metrics.grad_norm, norm, atol=1e-12, rtol=1e-12)
    for name, p in df.params(state).items():
        torch.testing.assert_close(p, reference[name].detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [("adapt_then_combine", "nesterov"), ("all_reduce", "nesterov"), ("all_reduce", "adamw")],
)
def test_complete_from_equal_starts_is_large_batch_training(algorithm, optimizer):
    n, ours = 4, OPTIMIZERS[optimizer][0]
    init, step = getattr(df, algorithm)(regression, ours(), df.topology("complete", n))
    state, many = df.stack(init(start()), n), df.simulate(step, n)
    one_init, one = df.all_reduce(regression, ours(), df.topology("complete", 1))
    large = one_init(start())
    for t in range(30):
        batch = data(n, t)
        state, _ = many(state, batch, t)
        large, _ = one(large, tuple(x.flatten(0, 1) for x in batch), t)
    expected = df.params(large)
    for i in range(n):
        for name, p in df.params(df.worker(state, i)).items():
            torch.testing.assert_close(p, expected[name], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("update_at", ["local", "mixed"])
@pytest.mark.parametrize("gamma", [1.0, 0.3])
@pytest.mark.parametrize("topology", ["ring", "one-peer-exp", "complete"])
def test_adapt_while_communicate_is_its_equation(topology, gamma, update_at):
    """x̃ = (1-γ)x + γWx; x⁺ = x̃ - η(g(x) + λ·(x or x̃)), with matrices, in float64."""
    n, rate, decay = 4, 0.1, 0.5
    schedule = df.topology(topology, n)
    optimizer = df.sgd(rate, weight_decay=decay)
    init, step = df.adapt_while_communicate(regression, optimizer, schedule, gamma=gamma, update_at=update_at)
    state, step = df.stack(init(start()), n), df.simulate(step, n)
    x = {name: p.repeat(n, 1, 1) for name, p in start().items()}
    for t in range(10):
        batch = data(n, t)
        matrix = df.mixing_matrix(schedule, t)
        grads = []
        for i in range(n):
            mine = {name: p[i].clone().requires_grad_() for name, p in x.items()}
            regression(mine, tuple(b[i] for b in batch)).backward()
            grads.append({name: p.grad for name, p in mine.items()})
        for name, p in x.items():
            mixed = (1 - gamma) * p + gamma * torch.einsum("ij,jkl->ikl", matrix, p)
            decayed = mixed if update_at == "mixed" else p
            x[name] = mixed - rate * (torch.stack([g[name] for g in grads]) + decay * decayed)
        state, _ = step(state, batch, t)
    for name, p in df.params(state).items():
        torch.testing.assert_close(p, x[name], atol=1e-12, rtol=1e-12)


def test_gamma_may_be_a_schedule():
    n, schedule = 4, df.topology("ring", 4)
    _, partial = df.adapt_while_communicate(regression, df.sgd(0.0), schedule, gamma=lambda t: t / 10)
    init, _ = df.adapt_while_communicate(regression, df.sgd(0.0), schedule)
    state = df.stack(init(start()), n)
    state = trees.map(lambda leaf: leaf + torch.arange(n).view(-1, 1) if leaf.dim() == 2 else leaf, state)
    kept, _ = df.simulate(partial, n)(state, data(n, 0), 0)
    assert all(torch.equal(a, b) for a, b in zip(kept.params, state.params, strict=True))
    moved, _ = df.simulate(partial, n)(state, data(n, 0), 10)
    expected = df.mixing_matrix(schedule, 10) @ state.params[0]
    torch.testing.assert_close(moved.params[0], expected)


@given(
    name=st.sampled_from(["ring", "one-peer-exp", "random-matching", "static-exp"]),
    wire=st.sampled_from([torch.bfloat16, torch.float16]),
    t=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_a_narrow_wire_keeps_the_mean_and_small_updates(name, wire, t, seed):
    n, schedule = 8, df.topology(name, 8)
    x = 1 + 1e-4 * torch.randn(n, 40, generator=torch.Generator().manual_seed(seed))

    def mix(row):
        here = collectives.look_up(row, schedule, torch.tensor(t))
        return gossip.collect(gossip.post(loose([row]), here, wire_dtype=wire))[0]

    mixed = torch.func.vmap(mix)(x)
    torch.testing.assert_close(mixed.mean(0), x.mean(0), atol=1e-6, rtol=0)
    assert not torch.equal(mixed, mixed.to(wire).to(x.dtype))


def test_a_thousand_small_updates_survive_a_bfloat16_wire():
    n = 4
    init, step = df.adapt_while_communicate(
        lambda params, batch: params["w"].sum(), df.sgd(1e-4), df.topology("ring", n), wire_dtype=torch.bfloat16
    )
    state, step = df.stack(init({"w": torch.ones(3)}), n), df.simulate(step, n)
    for t in range(1000):
        state, _ = step(state, None, t)
    torch.testing.assert_close(df.consensus_mean(state)["w"], torch.full((3,), 0.9), atol=1e-4, rtol=0)


def test_consensus_mean_and_distances_are_numpys():
    n = 5
    init, _ = df.adapt_then_combine(regression, df.sgd(0.1), df.topology("static-ring", n))
    state = df.stack(init(start()), n)
    state = state._replace(params=trees.map(lambda p: p + torch.randn(p.shape, dtype=p.dtype), state.params))
    x = torch.cat([p.flatten(1) for p in df.params(state).values()], 1)
    mean = torch.cat([p.flatten() for p in df.consensus_mean(state).values()])
    torch.testing.assert_close(mean, x.mean(0))
    distances = (x - x.mean(0)).norm(dim=1)
    torch.testing.assert_close(df.distance_to_consensus(state), distances)
    torch.testing.assert_close(df.consensus_distance(state), (distances**2).mean().sqrt())


def consensus_of_this_rank():
    here = df.init()
    init, _ = df.adapt_then_combine(regression, df.sgd(0.1), df.topology("ring", here.size))
    state = init({"w": torch.full((3,), float(here.rank))})
    return df.consensus_mean(state)["w"].tolist(), df.consensus_distance(state).item(), df.distance_to_consensus(state)


def test_consensus_of_ranks_is_that_of_a_stacked_state(ranks):
    for rank, (mean, distance, mine) in enumerate(ranks(2).run(consensus_of_this_rank)):
        assert mean == [0.5] * 3 and distance == pytest.approx(0.75**0.5)
        assert mine.item() == pytest.approx(abs(rank - 0.5) * 3**0.5)


def test_a_state_holds_no_graph_of_its_buffers():
    def loss_fn(params, buffers, batch):
        return (params["w"] * buffers["f"]).sum(), (buffers, None)

    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    state = init({"w": torch.ones(3)}, {"f": torch.nn.Parameter(torch.ones(3))})
    state, _ = step(state, None, 0)
    assert not any(leaf.requires_grad for leaf in trees.leaves(state))


def sixteen_bit_replicas():
    df.init()
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    init, _ = df.all_reduce(regression, df.sgd(0.1), df.topology("complete", 3))
    state = init({"w": values})
    return torch.equal(df.consensus_mean(state)["w"], values), df.consensus_distance(state).item()


def test_equal_sixteen_bit_replicas_are_their_mean(ranks):
    for is_same, distance in ranks(3).run(sixteen_bit_replicas):
        assert is_same and distance == 0


def test_a_module_with_batch_norm_trains_in_functional_form():
    from torch import nn

    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    module[0].bias.requires_grad_(False)
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    assert "0.bias" in buffers and "0.bias" not in params
    before = {name: b.clone() for name, b in module.state_dict().items()}
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    state = init(params, buffers)
    optim = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for t in range(5):
        state, _ = step(state, tuple(x[0] for x in data(1, t)), t)
    assert all(torch.equal(b, before[name]) for name, b in module.state_dict().items())
    for t in range(5):
        inputs, targets = (x[0] for x in data(1, t))
        optim.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optim.step()
    expected = module.state_dict()
    for name, value in {**df.params(state), **state.buffers}.items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [3, 2**17])
def test_what_follows_a_step_can_be_differentiated_from_its_first_one_on(size):
    """m′ = m − 0.2 m b², and the loss after it (2m′)²: its derivative in b is −3.2 m m′ b."""
    loss_fn = lambda params, batch: (params["w"].mean() * batch) ** 2  # noqa: E731
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1 * size), df.topology("ring", 1))
    state = init({"w": torch.ones(size)})

    def after(b):
        new, _ = step(state, b, 0)
        return step(new, torch.tensor(2.0), 1)[1].loss

    torch.testing.assert_close(torch.func.grad(after)(torch.tensor(0.1)), torch.tensor(-0.32 * 0.998))
