"""A module that changes between `df.functional` and the first step is noticed; equal frozen parameters are demanded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decentfn as df

BATCH = torch.ones(4, 3), torch.zeros(4, 2)


def _net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _replace(net):
    net[0].weight = nn.Parameter(torch.zeros(4, 3))


def _write(net):
    with torch.no_grad():
        net[2].weight.mul_(2)


CHANGES = {
    "load_state_dict": lambda net: net.load_state_dict(_net(1).state_dict()),
    "nn.init": lambda net: nn.init.zeros_(net[0].weight),
    "double": lambda net: net.double(),
    "another parameter": _replace,
    "in place": _write,
    "data": lambda net: setattr(net[0].weight, "data", torch.zeros(4, 3)),
    "to": lambda net: net.to(torch.bfloat16),
    "frozen": lambda net: nn.init.ones_(net[0].bias),
}


def _made(net, around=lambda loss: loss):
    net[0].bias.requires_grad_(False)
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    return params, buffers, *df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))


@pytest.mark.parametrize("around", [lambda loss: loss, df.autograd, df.accumulate])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_before_init_is_refused_and_the_cure_works(change, around):
    net = _net()
    params, buffers, init, _ = _made(net, around)
    CHANGES[change](net)
    with pytest.raises(
        ValueError, match=r"init\(params, buffers\): .* has changed since df.functional.*df.functional.*again"
    ):
        init(params, buffers)
    params, buffers, init, _ = _made(net, around)
    state = init(params, buffers)
    assert torch.equal(df.params(state)["0.weight"], net[0].weight)


@pytest.mark.parametrize("transform", [lambda step: step, df.donate, lambda step: df.compile(step, backend="eager")])
@pytest.mark.parametrize("change", ["load_state_dict", "nn.init", "in place"])
def test_a_module_that_changes_after_init_is_refused_in_the_first_step(change, transform):
    net = _net()
    params, buffers, init, step = _made(net)
    state = init(params, buffers)
    CHANGES[change](net)
    with pytest.raises(ValueError, match=r"step\(state, batch, t\): .* has changed since df.functional"):
        transform(step)(state, BATCH, 0)


@pytest.mark.parametrize("around", [lambda loss: loss, df.autograd])
def test_training_evaluating_and_loading_back_are_no_such_change(around):
    net = _net()
    params, buffers, init, step = _made(net, around)
    net(BATCH[0])  # which moves statistics
    for _ in range(2):  # two runs from one start
        state = init(params, buffers)
        for t in range(2):
            state, _ = step(state, BATCH, t)
            df.evaluate(
                lambda p, b, batch: F.mse_loss(torch.func.functional_call(net, {**p, **b}, batch[0]), batch[1]),
                state,
                [BATCH],
            )
            net.load_state_dict(df.state_dict(net, state))
    init(df.params(state), df.buffers(state))


def test_weights_that_are_the_modules_new_ones_are_no_older_copy():
    net = _net()
    params, buffers, init, step = _made(net)
    net.load_state_dict(_net(1).state_dict())
    new = {name: x.detach().clone() for name, x in net.named_parameters()}
    given = {name: new[name] for name in params}, {**buffers, **{name: new[name] for name in buffers if name in new}}
    state, _ = step(init(*given), BATCH, 0)


def test_a_resumed_run_may_look_at_its_module_first(tmp_path):
    net = _net()
    params, buffers, init, step = _made(net)
    state, _ = step(init(params, buffers), BATCH, 0)
    df.checkpoint.save(tmp_path / "run", state, 1)
    net = _net()
    params, buffers, init, step = _made(net)
    state, start, _, _ = df.checkpoint.restore(tmp_path / "run", init(params, buffers))
    net.load_state_dict(df.state_dict(net, state, consensus=True))
    step(state, BATCH, start)


@pytest.mark.parametrize("make", [df.adapt_while_communicate, df.gradient_tracking, df.all_reduce])
def test_frozen_parameters_that_differ_between_ranks_are_refused_and_broadcast_cures(make):
    """As pretrained weights that are loaded on rank 0 only, which DDP allows."""

    nets = [_net(0), _net(0), _net(0), _net(0)]  # ranks are threads, which share a generator

    def start(rank, cured):
        net = nets[rank + 2 * cured]
        with torch.no_grad():
            net[0].bias.fill_(rank)
        net[0].bias.requires_grad_(False)
        params, buffers, loss_fn = df.functional(net, F.mse_loss)
        init, _ = make(loss_fn, df.sgd(0.1), df.topology("complete", 2))
        if cured:
            params, buffers = df.broadcast((params, buffers))
        return float(init(params, buffers).buffers["0.bias"][0])

    with pytest.raises(
        df.errors.PlanMismatch, match=r"Rank 0 has '(buffers.)?0.bias.*rank 1 has.*df.broadcast\(\(params, buffers\)\)"
    ):
        df.testing.on_ranks(2, start, False)
    assert df.testing.on_ranks(2, start, True) == [0.0, 0.0]


def test_statistics_that_differ_between_ranks_are_no_frozen_ones():
    nets = [_net(0), _net(0)]

    def start(rank):
        net = nets[rank]
        net[1].running_mean.fill_(rank)
        params, buffers, loss_fn = df.functional(net, F.mse_loss)
        init, _ = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 2))
        return float(init(params, buffers).buffers["1.running_mean"][0])

    assert df.testing.on_ranks(2, start) == [0.0, 1.0]
