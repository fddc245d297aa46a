"""A module that changes between `df.functional` and the first step is noticed; equal frozen parameters are demanded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decentfn as df
from tests.run.within_worker import Network, batch, sharded, workers

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
    "by data": lambda net: net[0].weight.data[2].zero_(),  # as many functions that initialize do; raises no version
    "through NumPy": lambda net: net[2].bias.detach().numpy().fill(0),
    "to": lambda net: net.to(torch.bfloat16),
    "another layer": lambda net: setattr(net, "2", nn.Linear(4, 5)),
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
    assert all(torch.equal(x, net.get_parameter(name)) for name, x in df.params(state).items())


@pytest.mark.parametrize("transform", [lambda step: step, df.donate, lambda step: df.compile(step, backend="eager")])
@pytest.mark.parametrize("t", [0, 1])
@pytest.mark.parametrize("change", ["load_state_dict", "nn.init", "in place", "another layer"])
def test_a_module_that_changes_after_init_is_refused_in_the_first_step(change, t, transform):
    net = _net()
    params, buffers, init, step = _made(net)
    state = init(params, buffers)
    CHANGES[change](net)
    with pytest.raises(ValueError, match=r"step\(state, batch, t\): .* has changed since df.functional"):
        transform(step)(state, BATCH, t)


class Scaled(nn.Module):
    """A constant, statistics, and a cache."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return self.last(self.norm(x - self.mean))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.mean.fill_(2),
        lambda net: setattr(net, "mean", torch.ones(3)),
        lambda net: net.load_state_dict({**net.state_dict(), "mean": torch.ones(3)}),
    ],
)
def test_a_buffer_that_changes_is_refused_too_and_statistics_are_not(change):
    net = Scaled()
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    net(BATCH[0])
    state = init(params, buffers)
    change(net)
    for call in (lambda: init(params, buffers), lambda: step(state, BATCH, 0)):
        with pytest.raises(ValueError, match="'mean' of the module has changed since df.functional"):
            call()


@pytest.mark.parametrize("free", [lambda net: net.to("meta"), lambda net: _replace_data(net, lambda x: x.new_empty(0))])
def test_a_module_whose_memory_is_freed_has_not_changed(free):
    net = _net()
    params, buffers, init, step = _made(net)
    free(net)
    step(init(params, buffers), BATCH, 0)


def _replace_data(net, of):
    for p in net.parameters():
        p.data = of(p)


def test_a_module_that_gets_its_memory_after_the_split_is_refused():
    with torch.device("meta"):
        net = _net()
    params, buffers, init, _ = _made(net)
    net.to_empty(device="cpu")
    with pytest.raises(ValueError, match="has changed since df.functional"):
        init(params, buffers)


def test_another_tree_is_given_on_purpose_whatever_the_module_has():
    net = _net()
    params, buffers, init, step = _made(net)
    other = {name: 2 * x for name, x in params.items()}
    net.load_state_dict({**net.state_dict(), **{name: x + 1 for name, x in params.items()}})  # also a bias of 0
    state, _ = step(init(other, buffers), BATCH, 0)
    net.load_state_dict(df.state_dict(net, state))


def test_a_change_on_one_rank_is_told_to_the_others_at_once():
    """Pretrained weights that are loaded too late, on rank 0 only."""
    nets = [_net(), _net(), _net(1)]  # ranks are threads, which share a generator

    def start(rank):
        params, buffers, init, _ = _made(nets[rank])
        if rank == 0:
            nets[0].load_state_dict(nets[2].state_dict())
        with pytest.raises(df.errors.PlanMismatch, match=r"has changed since df.functional"):
            init(params, buffers)
        return True

    assert df.testing.on_ranks(2, start) == [True, True]


def test_a_parameter_that_is_frozen_on_one_rank_only_is_named():
    nets = [_net(), _net()]

    def start(rank):
        net = nets[rank]
        net[2].weight.requires_grad_(rank == 1)
        params, buffers, loss_fn = df.functional(net, F.mse_loss)
        init, _ = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 2))
        with pytest.raises(df.errors.PlanMismatch, match=r"2.weight.*the same algorithm, model"):
            init(params, buffers)
        return True

    assert df.testing.on_ranks(2, start) == [True, True]


def test_the_older_copies_start_a_run_on_purpose():
    """Two losses of one module, whose first result is loaded into it: the advice is followed literally."""
    net = _net()
    params, buffers, init, step = _made(net)
    _, _, other_init, _ = _made(net)
    state, _ = step(init(params, buffers), BATCH, 0)
    net.load_state_dict(df.state_dict(net, state))
    with pytest.raises(ValueError, match="on purpose with the older copies"):
        other_init(params, buffers)
    _, _, init, step = _made(net)
    step(init(params, buffers), BATCH, 0)


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


def _scaled(rank):
    net = Scaled()
    net.mean.fill_(rank)
    return net


def _in_eval_mode(rank):
    net = Scaled().eval()
    net.norm.running_mean.fill_(rank)
    return net


@pytest.mark.parametrize("cured", [False, True])
@pytest.mark.parametrize(("make", "name"), [(_scaled, "mean"), (_in_eval_mode, "norm.running_mean")])
def test_frozen_buffers_that_differ_between_ranks_are_refused_and_broadcast_cures(make, name, cured):
    """As those of torchvision's FrozenBatchNorm2d."""
    nets = [make(rank) for rank in range(2)]

    def start(rank):
        params, buffers, loss_fn = df.functional(nets[rank], F.mse_loss)
        init, _ = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 2))
        if cured:
            params, buffers = df.broadcast((params, buffers))
        return float(init(params, buffers).buffers[name][0])

    if cured:
        assert df.testing.on_ranks(2, start) == [0.0, 0.0]
    else:
        with pytest.raises(df.errors.PlanMismatch, match=rf"'{name}.*df.broadcast"):
            df.testing.on_ranks(2, start)


@pytest.mark.thorough
def test_a_sharded_module_is_watched_too(ranks):
    ranks(2).run(_changes_shards)


def _changes_shards():
    with workers(2) as world:
        net = sharded(world, Network())
        for change in (lambda: nn.init.zeros_(net.first.weight), lambda: net.double()):
            params, buffers, loss_fn = df.functional(net, F.mse_loss)
            init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
            state = init(params, buffers)
            df.evaluate(loss_fn, state, [batch(0, world.process, 0)])
            state, _ = step(state, batch(0, world.process, 0), 0)
            init(df.params(state), df.buffers(state))
            params, buffers, loss_fn = df.functional(net, F.mse_loss)
            init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
            change()
            with pytest.raises(
                (ValueError, df.errors.PlanMismatch), match="of the module has changed since df.functional"
            ):
                init(params, buffers)
