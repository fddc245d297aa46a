"""Losses that overwrite the given weights, or differentiate other weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import decentfn as df

BATCH = (torch.linspace(-1, 1, 30).view(6, 5), torch.linspace(0, 1, 6)[:, None])


def built(loss_fn):
    return df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))


def writes(p, batch):
    with torch.no_grad():
        p["w"].mul_(0.5)
    return p["w"].square().sum()


def writes_data(p, batch):
    p["w"].data.mul_(0.5)
    return p["w"].square().sum()


def moves_data(p, batch):
    p["w"].data = p["w"].data * 0.5
    return p["w"].square().sum()


def renormalizes(p, batch):
    return nn.functional.embedding(torch.arange(2), p["w"][:, None], max_norm=0.1).square().sum()


@pytest.mark.parametrize("way", ["eager", "donated", "simulated", "compiled", "simulated and compiled"])
@pytest.mark.parametrize("loss_fn", [writes, writes_data, moves_data, renormalizes])
def test_a_loss_that_writes_over_trained_parameters_is_refused(loss_fn, way):
    """Wherever it shows: by version counters, by where the parameter is, or in the first step by its values."""
    n = 2 if "simulated" in way else 1
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", n))
    state, batch = init({"w": torch.ones(3), "rest": torch.ones(2)}), torch.ones(3)
    if n > 1:
        state, step, batch = df.stack(state, n), df.simulate(step, n), df.stack(batch, n)
    step = df.compile(step, backend="aot_eager") if "compiled" in way else df.donate(step) if way == "donated" else step
    with pytest.raises(RuntimeError, match=r"the loss wrote over \['w'\] of the state.*max_norm.*overwritten"):
        step(state, batch, 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_frozen_layer_that_the_loss_moves_is_named_or_refused(by_data, compiled):
    def follows(module, batch):
        if by_data:
            module[1].weight.data = module[1].weight.data * 0.9 + module[0].weight.data * 0.1
        else:
            with torch.no_grad():
                module[1].weight.mul_(0.9).add_(module[0].weight, alpha=0.1)
        return (module[0](batch) - module[1](batch)).square().mean()

    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    params, buffers, loss_fn = df.functional(net, forward=follows)
    init, step = built(df.autograd(loss_fn))
    step = df.compile(step, backend="aot_eager") if compiled else step
    with pytest.raises(RuntimeError, match=r"wrote over \['1.weight'\] of the state"):
        step(init(params, buffers), torch.ones(2, 3), 0)
    followed = buffers["1.weight"] * 0.9 + params["0.weight"] * 0.1
    for name in ("1", "1.weight"):
        params, buffers, loss_fn = df.functional(net, forward=follows, overwritten=[name])
        for around in (df.autograd, lambda f: f) if not by_data else (df.autograd,):
            state, _ = built(around(loss_fn))[1](init(params, buffers), torch.ones(2, 3), 0)
            torch.testing.assert_close(df.buffers(state)["1.weight"], followed)
            assert torch.equal(net[1].weight, buffers["1.weight"])


def test_what_cannot_be_overwritten_is_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    for name in ("0.weight", "2", "1.wei"):
        with pytest.raises(ValueError, match=r"no frozen parameter has this name.*\['1.bias', '1.weight'\]"):
            df.functional(net, mse_loss, overwritten=[name])


@pytest.mark.parametrize("way", ["eager", "simulated", "compiled, not donated"])
def test_a_traced_step_that_wrote_over_its_state_says_so(way):
    """Also over frozen leaves; donated, the state is written over anyhow."""

    def follows(module, batch):
        with torch.no_grad():
            module[1].weight.mul_(0.9).add_(module[0].weight, alpha=0.1)
        return (module[0](batch) - module[1](batch)).square().mean()

    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    params, buffers, of_net = df.functional(net, forward=follows)
    for loss_fn, start, name in (
        (of_net, (params, buffers), "buffers.1.weight"),
        (writes_data, ({"w": torch.ones(3)},), "params.w"),
        (writes_data, ({"w": torch.ones(2**16)},), "params.w"),
    ):
        init, step = (
            built(loss_fn) if way != "simulated" else df.all_reduce(loss_fn, df.sgd(0.1), df.topology("ring", 2))
        )
        state, batch = init(*start), torch.ones(2, 3)
        if way == "simulated":
            state, step, batch = df.stack(state, 2), df.simulate(step, 2), df.stack(batch, 2)
        step = df.compile(step, backend="aot_eager", donate=False) if way.startswith("compiled") else step
        with pytest.raises(RuntimeError, match=f"wrote over '{name}' of the state.*with_params"):
            step(state, batch, 0)


@pytest.mark.parametrize("loss_fn", [writes, moves_data])
def test_a_loss_that_begins_to_write_later_is_refused(loss_fn):
    init, step = built(df.autograd(lambda p, batch: loss_fn(p, batch) if batch else p["w"].sum()))
    state, _ = step(init({"w": torch.ones(3)}), False, 0)
    with pytest.raises(RuntimeError, match="the loss wrote over"):
        step(state, True, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_that_the_loss_was_not_given_are_answered_with_a_sentence(reentrant):
    """Recomputed by a functional_call of the user's own, or added to the loss; nothing stays behind."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    class Net(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.net, self.checkpointed = net, checkpointed

        def forward(self, x):
            return (
                checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant) if self.checkpointed else self.net(x)
            )

    def loss_of(module, also=0.0):
        def loss_fn(params, batch):
            out = torch.func.functional_call(module, params, (batch[0],))
            loss = mse_loss(out, batch[1])
            return loss + also * sum(p.sum() for p in module.parameters()) if also else loss

        return df.autograd(loss_fn)

    params = {name: p.detach().clone() for name, p in Net(False).named_parameters()}
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    for loss_fn in (loss_of(Net(True)), loss_of(Net(False), 0.1)):
        init, step = built(loss_fn)
        for run in (step, df.compile(step, backend="aot_eager")):
            with pytest.raises(RuntimeError, match=r"a module's own parameters, of shapes .*\[8, 5\].*df.functional"):
                run(init(params), BATCH, 0)
            assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    init, step = built(loss_of(Net(False)))
    step(init(params), BATCH, 0)
    for p in net.parameters():
        p.requires_grad_(False)
    net.zero_grad()
    init, step = built(loss_of(Net(False), 0.1))
    step(init(params), BATCH, 0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


def emptied(module):
    for p in module.parameters():
        p.data = p.new_empty(0)


def loss_after_two_steps(around, free):
    torch.manual_seed(0)
    module, batch = Tied(), (torch.arange(6), torch.arange(6))
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    init, step = built(around(loss_fn))
    state = init(params, buffers)
    free(module)
    for t in range(2):
        state, metrics = step(state, batch, t)
    return metrics.loss.item()


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
def test_the_modules_own_weights_may_be_freed_and_tied_ones_stay_tied(around):
    assert loss_after_two_steps(around, emptied) == loss_after_two_steps(around, lambda module: None)
    with pytest.raises(
        ValueError, match=r"the module has changed since, in \['head.weight'\]; call df.functional again"
    ):
        loss_after_two_steps(around, lambda module: module.to("meta"))


def test_a_module_on_the_meta_device_is_refused_and_stays_as_it_is():
    net = nn.Linear(5, 1)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = built(df.autograd(loss_fn))
    state = init(params, buffers)
    net.to("meta")
    with pytest.raises(ValueError, match=r"the module's tensors are on meta, and cannot hold values that are on cpu"):
        step(state, BATCH, 0)
    assert net.weight.is_meta and net.weight.grad is None
