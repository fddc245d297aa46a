"""What a loss does to weights: it writes over those that it is given, or takes a gradient of others."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import decentfn as df
from decentfn import trees
from decentfn.testing.algorithms import Run, assert_close, ranks, simulated
from tests import contract

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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss_fn", [writes, writes_data, moves_data])
def test_what_the_loss_writes_over_counts_before_the_update_and_the_old_state_stays(loss_fn, compiled):
    """w = 0.5 w, then decay and momentum at the new w; a bad gradient undoes both; accumulated, one after another."""
    start, data = {"w": torch.ones(3), "rest": torch.ones(2)}, torch.ones(3)
    plain, rest = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([plain, rest], 0.1, momentum=0.9, weight_decay=0.1)

    def whole(p, batch):
        return loss_fn(p, batch) * batch[0] + p["rest"].sum()

    momentum = df.sgd(0.1, momentum=0.9, weight_decay=0.1)
    for accumulated in (False, True):
        around = df.accumulate if accumulated else lambda f: f
        init, step = df.all_reduce(
            df.dynamic_loss_scale(around(df.autograd(whole))), momentum, df.topology("complete", 1)
        )
        step = df.compile(step, backend="aot_eager", donate=False) if compiled else step
        with torch.no_grad():
            plain.fill_(1), rest.fill_(1)
        optimizer.state.clear()
        state, batch = init(start), df.stack(data, 2) if accumulated else data
        for t in range(3):
            optimizer.zero_grad()
            for _ in range(2 if accumulated else 1):
                (whole({"w": plain, "rest": rest}, data) / (2 if accumulated else 1)).backward()
            optimizer.step()
            before = [x.clone() for x in trees.leaves(state)]
            new, _ = step(state, batch, t)
            assert all(torch.equal(x, y) for x, y in zip(before, trees.leaves(state), strict=True))
            state = new
            torch.testing.assert_close(df.params(state), {"w": plain.detach(), "rest": rest.detach()})
        bad, _ = step(state, batch * float("inf"), 3)
        torch.testing.assert_close(df.params(bad), df.params(state), rtol=0, atol=0)


def shrinking(loss_fn):
    def shrinks(params, *rest):
        with torch.no_grad():
            for x in trees.leaves(params):
                x.mul_(0.97)
        return loss_fn(params, *rest)

    return shrinks


ROWS = [
    pytest.param(row, marks=() if row in ("adapt_then_combine", "demo") else pytest.mark.slow) for row in contract.ROWS
]


@pytest.mark.parametrize("row", ROWS)
def test_ranks_write_over_what_the_simulator_does(row):
    """Every algorithm, on ranks that share a loss and learn of it at the same time."""
    run = Run(losses=(shrinking, df.autograd))
    end = simulated(contract.ROWS[row], run)[-1]
    assert_close(ranks(contract.ROWS[row], run)[-1], end)
    still = simulated(contract.ROWS[row])[-1]
    assert any(not torch.equal(x, y) for x, y in zip(end.params, still.params, strict=True))


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
        with pytest.raises(RuntimeError, match=f"wrote over '{name}' of the state.*df.autograd"):
            step(state, batch, 0)


@pytest.mark.parametrize("loss_fn", [writes, moves_data])
def test_a_loss_that_begins_to_write_later_is_refused(loss_fn):
    init, step = built(df.autograd(lambda p, batch: loss_fn(p, batch) if batch else p["w"].sum()))
    state, _ = step(init({"w": torch.ones(3)}), False, 0)
    with pytest.raises(RuntimeError, match="left alone in its first evaluation"):
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
