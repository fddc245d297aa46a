"""Parameters that the state does not have, or no longer trains: trained, or refused with a sentence."""

import copy
import itertools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import decentfn as df
from tests.gradient.test_one_rule import AROUND, everywhere

pytestmark = pytest.mark.thorough

BATCH = (torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 4)[:, None])
WAYS = pytest.mark.parametrize("around", [AROUND["traced"], AROUND["autograd"]], ids=["traced", "autograd"])
BACKENDS = pytest.mark.parametrize("backend", [None, "eager"])


class Scaled(nn.Module):
    """A criterion with a learned temperature, a buffer that counts, a frozen shift, and perhaps a weight of the network."""

    def __init__(self, tied=None):
        super().__init__()
        self.temperature, self.tied = nn.Parameter(torch.full((), 1.5)), tied
        self.shift = nn.Parameter(torch.full((), 0.1), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls.add_(1)
        extra = 0.0 if self.tied is None else self.tied.square().sum()
        return mse_loss(output * self.temperature + self.shift, target) + extra


def made(tied=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return net, Scaled(net[0].weight if tied else None)


def run_of(loss_fn, around, params, buffers, backend=None, n=1):
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", n))
    state = init(params, buffers)
    if n > 1:
        state, step = df.stack(state, n), df.simulate(step, n)
    return state, step if backend is None else df.compile(step, backend=backend)


@everywhere
@pytest.mark.parametrize(("n", "backend", "tied"), [(1, None, True), (2, None, False), (1, "eager", True)])
def test_the_parameters_of_a_criterion_are_trained_with_the_module(n, backend, tied, around):
    if backend and around not in (AROUND["traced"], AROUND["autograd"]):
        return
    net, criterion = made(tied)
    plain, plain_criterion = copy.deepcopy((net, criterion))
    optimizer = torch.optim.SGD(dict.fromkeys([*plain.parameters(), *plain_criterion.parameters()]), 0.1)
    accumulated = around in (AROUND["accumulated"], AROUND["accumulated, autograd"])
    params, buffers, loss_fn = df.functional(net, criterion)
    assert [name for name in params if name.startswith("criterion.")] == ["criterion.temperature"]
    state, step = run_of(loss_fn, around, params, buffers, backend, n)
    batch = df.stack(BATCH, 2) if accumulated else BATCH
    for t in range(3):
        optimizer.zero_grad()
        for _ in range(1 + accumulated):
            (plain_criterion(plain(BATCH[0]), BATCH[1]) / (1 + accumulated)).backward()
        optimizer.step()
        state, _ = step(state, batch if n == 1 else df.stack(batch, n), t)
    one = state if n == 1 else df.worker(state, 1)
    expected = plain.state_dict() | {
        f"criterion.{k}": x for k, x in plain_criterion.state_dict().items() if k != "tied"
    }
    found = {**df.params(one), **df.buffers(one)}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, atol=1e-6, rtol=1e-5)
    assert criterion.temperature.item() == 1.5 and criterion.calls.item() == 0


@BACKENDS
def test_a_submodule_may_have_the_name_of_the_criterion(backend):
    torch.manual_seed(0)
    net, criterion = nn.Sequential(OrderedDict(criterion=nn.Linear(3, 1))), Scaled()
    plain, plain_criterion = copy.deepcopy((net, criterion))
    plain_criterion(plain(BATCH[0]), BATCH[1]).backward()
    params, buffers, loss_fn = df.functional(net, criterion)
    state, step = run_of(loss_fn, lambda f: f, params, buffers, backend)
    state, _ = step(state, BATCH, 0)
    for name, p in (*plain.named_parameters(), ("criterion.temperature", plain_criterion.temperature)):
        torch.testing.assert_close(df.params(state)[name], (p - 0.1 * p.grad).detach())


def test_a_state_with_a_criterion_is_evaluated_saved_and_loaded():
    net, criterion = made()
    params, buffers, loss_fn = df.functional(net, criterion)
    state, step = run_of(loss_fn, df.autograd, params, buffers)
    state, _ = step(state, BATCH, 0)
    of_another = df.functional(net, mse_loss)[2]
    torch.testing.assert_close(df.evaluate(of_another, state, [BATCH]), evaluated(net, state, mse_loss))
    same = copy.deepcopy(criterion)
    same.temperature.data = df.params(state)["criterion.temperature"]
    torch.testing.assert_close(df.evaluate(loss_fn, state, [BATCH]), evaluated(net, state, same))
    saved = df.state_dict(net, state)
    assert saved.keys() == net.state_dict().keys()
    again = df.load_state_dict(net, state, saved)
    for name, x in df.params(state).items():
        assert torch.equal(df.params(again)[name], x)


def evaluated(net, state, criterion):
    own = copy.deepcopy(net).eval()
    own.load_state_dict(df.state_dict(net, state))
    with torch.no_grad():
        return criterion(own(BATCH[0]), BATCH[1]).double()


def test_what_a_criterion_holds_constant_stays_in_it():
    weights = torch.tensor([1.0, 2.0])
    net, perceptual = nn.Linear(3, 2), Scaled().requires_grad_(False)
    for criterion in (nn.CrossEntropyLoss(weight=weights), perceptual):
        params, buffers, _ = df.functional(net, criterion)
        assert params.keys() == {"weight", "bias"} and not buffers


def test_names_that_a_module_has_already_are_refused():
    net = nn.Module()
    net.criterion = Scaled()
    with pytest.raises(ValueError, match='begins with "criterion."; rename the submodule'):
        df.functional(net, Scaled())
    assert "criterion.temperature" in df.functional(net, net.criterion)[0]


def hidden(kind):
    weight = torch.full((), 1.5, requires_grad=True) if kind == "tensor" else nn.Parameter(torch.full((), 1.5))
    criterion = Scaled()
    criterion.calls = nn.Identity()  # torch.func itself refuses a buffer that is written from outside
    criterion.calls.add_ = lambda count: None
    return {
        "tensor": lambda output, y: mse_loss(output * weight, y),
        "parameter": lambda output, y: mse_loss(output * weight, y),
        "bound method": criterion.forward,
        "closure": lambda output, y: criterion(output, y),
    }[kind]


@pytest.mark.one_in(5)
@everywhere
@pytest.mark.parametrize("kind", ["tensor", "parameter", "bound method", "closure"])
def test_parameters_hidden_in_a_closure_are_refused(kind, around):
    net, _ = made()
    params, buffers, loss_fn = df.functional(net, hidden(kind))
    batch = df.stack(BATCH, 2) if around in (AROUND["accumulated"], AROUND["accumulated, autograd"]) else BATCH
    compiled = [(1 + (around is AROUND["traced"]), "eager")] if kind == "closure" else []
    for n, backend in [(1, None), (2, None), *compiled]:
        state, step = run_of(loss_fn, around, params, buffers, backend, n)
        with pytest.raises(ValueError, match=r"gradient of 1 tensor\(s\).*no optimizer would train.*df.functional"):
            step(state, batch if n == 1 else df.stack(batch, n), 0)


@WAYS
@BACKENDS
def test_what_is_frozen_detached_or_given_may_be_used(around, backend):
    net, criterion = made()
    teacher = nn.Linear(3, 1)

    def of_teacher(output, y):
        with torch.no_grad():
            wanted = teacher(BATCH[0])
        return mse_loss(output, wanted + y) + 0 * criterion.temperature.detach()

    params, buffers, loss_fn = df.functional(net, of_teacher)
    state, step = run_of(loss_fn, around, params, buffers, backend)
    step(state, BATCH, 0)


def test_tensors_that_a_loss_makes_and_differentiates_are_its_own():
    """As a gradient penalty does, by autograd; also where they are part of a cycle."""

    def forward(module, batch):
        x = (batch[0] * 0.5).requires_grad_()
        x.itself = x
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return mse_loss(module(batch[0].requires_grad_()), batch[1]) + slope.square().mean()

    params, buffers, loss_fn = df.functional(nn.Linear(3, 1), forward=forward)
    state, step = run_of(loss_fn, df.autograd, params, buffers)
    step(state, (BATCH[0].clone(), BATCH[1]), 0)


@WAYS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_batch_that_carries_the_graph_of_another_module_is_refused(around, backend):
    """Traced, the states of all steps were part of one graph: an encoder before the step kept every batch in memory."""
    net, encoder = nn.Linear(3, 1), nn.Linear(3, 3)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    sizes = (1, 2) if around is AROUND["traced"] else (1,)
    cases = [*itertools.product((encoder(BATCH[0]), BATCH[0].clone().requires_grad_()), sizes)]
    if backend and len(sizes) > 1:
        cases = cases[1:3]  # each kind, and each size
    for given, n in cases:
        state, step = run_of(loss_fn, around, params, buffers, backend, n)
        first, *rest = (given, BATCH[1]) if n == 1 else df.stack((given, BATCH[1]), n)
        if given.is_leaf and around is AROUND["autograd"]:  # takes the gradient of the batch, as a plain loop does
            state, metrics = step(state, (first, *rest), 0)
        else:
            with pytest.raises(ValueError, match=r"gradient of \d tensor\(s\).*of a batch, pass x.detach\(\)"):
                step(state, (first, *rest), 0)
            state, metrics = step(state, (first.detach(), *rest), 0)
        assert not any(x.requires_grad for x in (*state.params.tensors, metrics.loss))


@WAYS
@BACKENDS
def test_what_is_frozen_or_trained_from_now_on_is_refused(around, backend):
    net, criterion = made()
    net[0].weight.requires_grad_(False)
    params, buffers, loss_fn = df.functional(net, criterion)
    state, step = run_of(loss_fn, around, params, buffers, backend)
    state, _ = step(state, BATCH, 0)
    for t, p in enumerate((net[2].bias, net[0].weight, criterion.temperature), start=1):
        p.requires_grad_(not p.requires_grad)
        with pytest.raises(ValueError, match="requires_grad of the module's parameters has changed"):
            step(state, BATCH, t)
        df.evaluate(loss_fn, state, [BATCH])
        p.requires_grad_(not p.requires_grad)
        state, _ = step(state, BATCH, t)


class TiesInForward(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.table, self.head, self.how = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), how

    def forward(self, x):
        if self.how == "in its place":
            self.head._parameters["weight"] = self.table.weight
        elif self.how == "anew":
            self.head.weight = nn.Parameter(self.table.weight.detach() * 1)
        elif self.how == "deleted":
            del self.head.weight
            self.head.weight = self.table.weight
        return self.head(self.table(x))


@WAYS
@BACKENDS
@pytest.mark.parametrize("how", ["in its place", "anew", "deleted"])
def test_parameters_that_a_call_replaces_are_refused(how, around, backend):
    net = TiesInForward(how)
    own = net.head.weight
    params, buffers, loss_fn = df.functional(net, cross_entropy)
    state, step = run_of(loss_fn, around, params, buffers, backend)
    with pytest.raises(ValueError, match=r"other tensors in the places of the parameters \['head.weight'\]"):
        step(state, (torch.arange(5), torch.arange(5)), 0)
    assert net.head.weight is own
