"""`all_reduce` is DistributedDataParallel: the same parameters and buffers after 50 steps on 4 gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from decentfn.core import trees

pytestmark = pytest.mark.thorough

STEPS, MICRO = 50, 2


def model():
    torch.manual_seed(0)
    # No bias before the norm: its gradient is rounding alone, which AdamW would turn into steps of full length.
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def batch_of(rank, t):
    draw = torch.Generator().manual_seed(1000 * rank + t)
    inputs = torch.randn(MICRO, 8, 6, generator=draw) + rank / 4
    return inputs, torch.sin(inputs[..., :2] * (1 + rank))


OPTIMIZERS = {
    "sgd": (
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
        lambda: df.sgd(0.05, momentum=0.9, weight_decay=1e-3),
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), lambda: df.adamw(1e-2, weight_decay=0.1)),
}


def with_ddp(name):
    # Training-mode BatchNorm does not read its buffers, so broadcasting them changes no parameter; switched off, every
    # rank keeps its own statistics, as a worker here does.
    ddp = DistributedDataParallel(model(), broadcast_buffers=False)
    optimizer = OPTIMIZERS[name][0](ddp.parameters())
    for t in range(STEPS):
        inputs, targets = batch_of(dist.get_rank(), t)
        optimizer.zero_grad()
        with ddp.no_sync():
            for i in range(MICRO - 1):
                (nn.functional.mse_loss(ddp(inputs[i]), targets[i]) / MICRO).backward()
        (nn.functional.mse_loss(ddp(inputs[-1]), targets[-1]) / MICRO).backward()
        optimizer.step()
    return {name: value.clone() for name, value in ddp.state_dict().items()}


def with_decentfn(name, backend):
    here = df.init()
    params, buffers, loss_fn = df.functional(model(), nn.functional.mse_loss)
    topology = df.topology("complete", here.size)
    init, step = df.all_reduce(df.accumulate(loss_fn), OPTIMIZERS[name][1](), topology, bucket_mb=0.0005)
    state = init(params, buffers)
    step = step if backend is None else df.compile(step, backend=backend)
    for t in range(STEPS):
        state, _ = step(state, batch_of(here.rank, t), t)
    return df.params(state) | df.buffers(state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, backend", [("sgd", None), ("adamw", None), ("adamw", "aot_eager")])
def test_all_reduce_is_ddp_with_batch_norm_and_accumulation(ranks, name, backend):
    theirs, ours = ranks(4).run(with_ddp, name), ranks(4).run(with_decentfn, name, backend)
    for ddp, mine in zip(theirs, ours, strict=True):
        consume_prefix_in_state_dict_if_present(ddp, "module.")
        assert ddp.keys() == mine.keys()
        for leaf, value in ddp.items():
            torch.testing.assert_close(mine[leaf], value, atol=1e-5, rtol=1e-5, msg=lambda m, leaf=leaf: f"{leaf}: {m}")
        assert torch.equal(mine["0.weight"], ours[0]["0.weight"])


CONFIGS = [("all_reduce", "complete"), ("adapt_while_communicate", "one-peer-exp"), ("adapt_then_combine", "ring")]


@pytest.mark.parametrize("algorithm, topology", CONFIGS)
def test_a_config_switches_between_all_reduce_and_decentralized_algorithms(algorithm, topology):
    params, buffers, loss_fn = df.functional(model(), nn.functional.mse_loss)
    init, step = getattr(df, algorithm)(df.accumulate(loss_fn), df.adamw(1e-2), df.topology(topology, 4))
    state, step = df.stack(init(params, buffers), 4), df.simulate(step, 4)
    losses = []
    for t in range(12):
        inputs, targets = zip(*(batch_of(i, t) for i in range(4)), strict=True)
        state, metrics = step(state, (torch.stack(inputs), torch.stack(targets)), t)
        losses.append(metrics.loss.mean())
    assert losses[-1] < losses[0]


def two_heads(params, batch):
    """Worker 1 never uses `b`; nobody uses it in odd steps; nobody ever uses `c`."""
    x, use_b = batch
    return ((params["a"] * x).sum() - 1) ** 2 + use_b * (params["b"] ** 2).sum()


@pytest.mark.parametrize("algorithm, topology", CONFIGS)
def test_parameters_unused_on_some_workers_or_in_some_steps_are_averaged_all_the_same(algorithm, topology):
    init, step = getattr(df, algorithm)(two_heads, df.sgd(0.1), df.topology(topology, 4))
    state = df.stack(init({name: torch.ones(3) for name in "abc"}), 4)
    if algorithm != "all_reduce":
        state = state._replace(params=trees.map(lambda x: x + 0.1 * torch.arange(4.0)[:, None], state.params))
    step, mean = df.simulate(step, 4), df.consensus_mean(state)["c"]
    for t in range(8):
        use = torch.tensor([1.0, 0.0, 1.0, 1.0]) * (t % 2 == 0)
        state, _ = step(state, (torch.rand(4, 3), use), t)
    torch.testing.assert_close(df.consensus_mean(state)["c"], mean)
    assert df.params(state)["c"].std(0).max() < 0.02 and (df.consensus_mean(state)["b"] < 1).all()


def start_unequal():
    here = df.init()
    params, buffers = (
        {"w": torch.full((3,), float(here.rank))},
        {"n": torch.tensor(here.rank), "flag": torch.tensor(True)},
    )
    topology = df.topology("complete", here.size)

    def loss_fn(p, b, batch):
        return (p["w"] * batch).sum(), (b, None)

    init, _ = df.all_reduce(loss_fn, df.sgd(0.1), topology)
    message = None
    try:
        init(params, buffers)
    except ValueError as error:
        message = str(error)
    df.adapt_while_communicate(loss_fn, df.sgd(0.1), topology).init(params, buffers)
    params, buffers = df.broadcast((params, buffers))
    init(params, buffers)
    return message, params["w"].tolist(), buffers["n"].item(), buffers["flag"].item()


def test_all_reduce_demands_equal_replicas_and_broadcast_makes_them(ranks):
    for message, w, n, flag in ranks(2).run(start_unequal):
        assert "init(params, buffers): ranks disagree" in message and "df.broadcast" in message
        assert "params" in message or "buffers" in message
        assert w == [0.0] * 3 and n == 0 and flag is True


def test_broadcast_without_a_group_is_a_copy():
    tree = {"a": torch.arange(3), "b": torch.tensor(2.0)}
    copy = df.broadcast(tree)
    assert torch.equal(copy["a"], tree["a"]) and copy["a"].data_ptr() != tree["a"].data_ptr()
