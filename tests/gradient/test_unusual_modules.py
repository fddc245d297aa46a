"""With `df.autograd`, what few modules do: against a plain loop, or refused with a sentence."""

import copy
from collections import OrderedDict, deque, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrize

import decentfn as df

pytestmark = pytest.mark.thorough

X, Y = torch.arange(12.0).view(3, 4) / 10, torch.ones(3, 2)


def built(module, *, around=lambda loss_fn: loss_fn, lr=0.1, **how):
    """A state of one worker and its step."""
    params, buffers, loss_fn = df.functional(module, **(how or {"criterion": mse_loss}))
    init, step = df.adapt_while_communicate(around(df.autograd(loss_fn)), df.sgd(lr), df.topology("complete", 1))
    return init(params, buffers), step


def compiled_by(backend, step):
    return step if backend is None else df.compile(step, backend=backend)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.end = kind(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.end(self.rnn(x)[0])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_every_micro_batch_has_its_gradient_of_recurrent_weights(kind, backend):
    torch.manual_seed(0)
    net = Recurrent(kind)
    micros = [(torch.randn(5, 2, 4), torch.randn(5, 2, 1)) for _ in range(4)]
    plain = copy.deepcopy(net)
    for x, y in micros:
        (mse_loss(plain(x), y) / len(micros)).backward()
    state, step = built(net, around=df.accumulate, lr=1.0)
    before = {name: p.clone() for name, p in df.params(state).items()}
    state, _ = compiled_by(backend, step)(state, micros, 0)
    after = df.params(state)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(before[name] - after[name], p.grad)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_every_batch_is_evaluated_with_the_weights_that_are_given(kind):
    torch.manual_seed(0)
    net, trained = Recurrent(kind), Recurrent(kind)
    batches = [(torch.randn(5, 2, 4), torch.randn(5, 2, 1)) for _ in range(3)]
    plain = [mse_loss(trained(x), y).detach() for x, y in batches]
    _, buffers, loss_fn = df.functional(net, mse_loss)
    params = {name: p.detach().clone() for name, p in trained.named_parameters()}
    torch.testing.assert_close([loss_fn(params, buffers, batch)[0] for batch in batches], plain)
    state = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
    torch.testing.assert_close(df.evaluate(loss_fn, state, batches), torch.stack(plain).double().mean())


def test_a_recurrent_network_has_its_own_list_of_weights_again_and_makes_none_in_a_call(monkeypatch):
    net, made = Recurrent(nn.LSTM), []
    own = net.rnn._flat_weights, net.rnn._flat_weight_refs
    state, step = built(net)
    monkeypatch.setattr(nn.RNNBase, "_init_flat_weights", lambda rnn: made.append(rnn))
    for t in range(2):
        state, _ = step(state, (torch.ones(5, 2, 4), torch.ones(5, 2, 1)), t)
    assert made == []
    assert net.rnn._flat_weights is own[0] and net.rnn._flat_weight_refs is own[1]
    for listed, w in zip(net.rnn._flat_weights, net.rnn.parameters(), strict=True):
        assert listed is w


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_recurrent_weights_that_a_call_computes(norm):
    """By a parametrization, or by a hook that writes into the network's list of weights."""
    torch.manual_seed(0)
    net = Recurrent(nn.GRU)
    norm(net.rnn, "weight_hh_l0")
    plain, batch = copy.deepcopy(net), (torch.randn(5, 2, 4), torch.randn(5, 2, 1))
    state, step = built(net)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for t in range(3):
        optimizer.zero_grad()
        mse_loss(plain(batch[0]), batch[1]).backward()
        optimizer.step()
        state, _ = step(state, batch, t)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(df.params(state)[name], p.detach())


class Assigned(nn.Module):
    """A buffer that a call puts another tensor in the place of."""

    def __init__(self, first, make):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make
        self.register_buffer("kept", first)

    def forward(self, x):
        y = self.layer(x)
        self.kept = self.make(self.kept, x, y.detach())
        return y


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_a_buffer_assigned_with_other_strides_is_the_same(backend):
    state, step = built(Assigned(torch.zeros(4, 3), lambda old, x, y: x.t()))
    state, _ = compiled_by(backend, step)(state, (X, Y), 0)
    assert torch.equal(df.buffers(state)["kept"], X.t())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("first", "make", "said"),
    [
        (torch.zeros(1, 2), lambda old, x, y: torch.cat([old, y]), r"'kept' of shape \[1, 2\] became one of \[4, 2\]"),
        (torch.tensor(1), lambda old, x, y: old * 0.9, "torch.int64 became one of torch.float32"),
    ],
)
def test_a_buffer_that_becomes_another_is_refused(first, make, said, backend):
    state, step = built(Assigned(first, make))
    with pytest.raises(ValueError, match=said):
        compiled_by(backend, step)(state, (X, Y), 0)


class Counting(nn.Module):
    """Buffers of one shape, in an order that is not the alphabet's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("b", torch.zeros(1))
        self.register_buffer("a", torch.zeros(1))

    def forward(self, x):
        self.b += 1
        self.a += 100
        return self.layer(x)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("mapping", [dict, OrderedDict, MappingProxyType])
def test_buffers_come_back_under_their_names_from_any_mapping(mapping, backend):
    net = Counting()
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, step = init(params, mapping(buffers)), compiled_by(backend, step)
    for t in range(3):
        state, _ = step(state, (X, Y), t)
    assert {name: b.item() for name, b in df.buffers(state).items()} == {"b": 3, "a": 300}
    assert net.a.item() == net.b.item() == 0


def test_a_function_may_have_its_buffers_in_a_named_tuple_compiled_too():
    kind = namedtuple("Sums", "b a")
    init, step = df.all_reduce(
        df.autograd(lambda p, b, x: ((p * x).sum(), (kind(b.b + 1, b.a + 100), None))),
        df.sgd(0.1),
        df.topology("complete", 1),
    )
    state = init(torch.zeros(2), kind(torch.zeros(()), torch.zeros(())))
    state, _ = df.compile(step, backend="eager")(state, torch.ones(2), 0)
    assert df.buffers(state) == kind(1, 100)


def test_weights_reached_by_a_list_made_before_are_the_workers():
    net = nn.Linear(4, 2)
    listed = list(net.parameters())
    state, step = built(net, forward=lambda module, batch: sum(p.square().sum() for p in listed))
    state, _ = step(state, (X, Y), 0)
    torch.testing.assert_close(df.params(state)["weight"], 0.8 * net.weight.detach())


@pytest.mark.parametrize(
    "forward",
    [
        lambda module, batch: mse_loss(module(batch["x"].mul_(0.5)), batch["y"]),
        lambda module, batch: mse_loss(module(batch["x"]), batch.pop("y")),
    ],
    ids=["in place", "popped"],
)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_loss_that_changes_its_batch_sees_it_once(forward, backend):
    net = nn.Linear(4, 2)
    state, step = built(net, forward=forward)
    _, metrics = compiled_by(backend, step)(state, {"x": X.clone(), "y": Y}, 0)
    torch.testing.assert_close(metrics.loss, forward(net, {"x": X.clone(), "y": Y}).detach())


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 2), deque(maxlen=2)

    def forward(self, x):
        self.last.append(float(len(self.last)))
        return self.layer(x) * sum(self.last)


@pytest.mark.parametrize(
    "make", [Remembering, lambda: torch.jit.script(nn.Linear(4, 2)), lambda: torch.jit.trace(nn.Linear(4, 2), X)]
)
def test_losses_are_those_of_a_plain_loop(make):
    torch.manual_seed(1)
    state, step = built(make())
    losses = []
    for t in range(5):
        state, metrics = step(state, (X, Y), t)
        losses.append(metrics.loss)
    torch.manual_seed(1)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        plain = mse_loss(net(X), Y)
        plain.backward()
        optimizer.step()
        torch.testing.assert_close(loss, plain.detach())


def test_a_loss_of_one_element_is_a_number_and_others_are_refused():
    net = nn.Linear(4, 2)
    state, step = built(net, forward=lambda module, batch: mse_loss(module(X), Y).reshape(1))
    _, metrics = step(state, (X, Y), 0)
    torch.testing.assert_close(metrics.loss, mse_loss(net(X), Y).detach())
    for wrong, said in (
        (lambda module, batch: (mse_loss(module(X), Y), 1, 2), "loss_fn returned tuple"),
        (lambda module, batch: module(X), r"loss_fn returned \[3, 2\] of torch.float32"),
        (lambda module, batch: mse_loss(module(X), Y).long(), r"loss_fn returned \[\] of torch.int64"),
    ):
        state, step = built(net, forward=wrong)
        with pytest.raises(ValueError, match=said):
            step(state, (X, Y), 0)


def test_sparse_buffers_are_refused():
    net = nn.Linear(4, 2)
    net.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"\['adjacency'\] are sparse"):
        df.functional(net, mse_loss)


class Adding(nn.Module):
    """Adds two factors' product to the weight, as long as a call lasts; as peft with `target_parameters`."""

    def __init__(self):
        super().__init__()
        self.base, self.left, self.right = nn.Linear(3, 2), *(nn.Parameter(torch.randn(s)) for s in ((2, 1), (1, 3)))
        self.base.requires_grad_(False)

    def forward(self, x):
        added = nn.Module()
        added.forward = lambda w: w + self.left @ self.right
        parametrize.register_parametrization(self.base, "weight", added)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@pytest.mark.parametrize("overwritten", [(), ("base.weight",)])
def test_a_parametrization_for_the_time_of_a_call_is_evaluated_and_leaves_no_second_weight(overwritten):
    net, batches = Adding(), [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    expected = torch.stack([mse_loss(net(x), y) for x, y in batches]).mean().double()
    params, buffers, loss_fn = df.functional(net, mse_loss, overwritten=overwritten)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state = init(params, buffers)
    for _ in range(2):
        torch.testing.assert_close(df.evaluate(loss_fn, state, batches), expected, rtol=1e-6, atol=0)
        assert not dict(net.named_buffers())
    if overwritten:
        state, _ = step(state, batches[0], 0)
        mse_loss(net(batches[0][0]), batches[0][1]).backward()
        torch.testing.assert_close(df.params(state)["left"], params["left"] - 0.1 * net.left.grad)


class End(nn.Module):
    def __init__(self, function=torch.relu):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Settable(nn.Module):
    """Its call sees plain attributes, what stands in a container, and a submodule."""

    def __init__(self):
        super().__init__()
        self.layer, self.end = nn.Linear(4, 2), End()
        self.scale, self.shifts = 1.0, [[0.0]]

    def forward(self, x):
        return self.end(self.layer(x)) * self.scale + self.shifts[0][0]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_is_set_between_two_steps_counts_and_stays(backend):
    """The module is looked at once, and again where something is another."""
    torch.manual_seed(0)
    net = Settable()
    state, step = built(net)
    step, t = compiled_by(backend, step), 0

    def loss():
        nonlocal t, state
        weight, bias = (df.params(state)[f"layer.{name}"] for name in ("weight", "bias"))
        expected = mse_loss(net.end.function(X @ weight.T + bias) * net.scale + net.shifts[0][0], Y)
        before = vars(net) | {"_modules": dict(net._modules)}
        state, metrics = step(state, (X, Y), t)
        assert vars(net) | {"_modules": dict(net._modules)} == before
        t += 1
        torch.testing.assert_close(metrics.loss, expected)

    loss()
    loss()
    net.scale = 2.0
    loss()
    net.shifts[0][0] = 0.5
    loss()
    net.end = End(torch.tanh)
    loss()
    net.end, net.kept = End(torch.sigmoid), {"more": 1}
    loss()
    net.layer.weight, net.layer.bias = (nn.Parameter(p.detach().clone()) for p in (net.layer.weight, net.layer.bias))
    loss()
