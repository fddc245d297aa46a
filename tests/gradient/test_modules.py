"""Modules as people have them: batches and outputs of any kind, tied and frozen and lazy, and their state dicts."""

import copy
from collections import UserDict
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import decentfn as df
from decentfn.core import trees
from decentfn.engine import cache as compile_cache
from decentfn.engine import compilation

pytestmark = pytest.mark.thorough


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Labeled(nn.Module):
    """As transformers' models: keyword arguments, and the loss in the output."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens, labels=None):
        self.count += 1
        logits = self.head(self.table(tokens) * self.scale)
        return Output(logits, None if labels is None else cross_entropy(logits.flatten(0, -2), labels.flatten()))


def tokens(*shape):
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(0))


def trained(loss_fn, params, buffers, batch, *, compiled=False, n=1, steps=3):
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", n))
    state = init(params, buffers)
    if n > 1:
        state, step = df.stack(state, n), df.simulate(step, n)
    if compiled:
        step = df.compile(step, backend="aot_eager")
    for t in range(steps):
        state, metrics = step(state, batch, t)
    return state, metrics


WAYS = pytest.mark.parametrize("around", [lambda f: f, df.autograd], ids=["traced", "autograd"])


@pytest.mark.one_in(2)
@WAYS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_keyword_batches_and_outputs_with_a_loss(around, compiled):
    torch.manual_seed(0)
    net, batch = Labeled(), {"tokens": tokens(3, 5), "labels": tokens(3, 5)}
    plain = copy.deepcopy(net)
    opt = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        opt.zero_grad()
        plain(**batch).loss.backward()
        opt.step()

    def with_criterion(output, batch):
        return cross_entropy(output.logits.flatten(0, -2), batch["labels"].flatten())

    def forward(module, batch):
        output = module(batch["tokens"], labels=batch["labels"])
        return output.loss, output.logits.detach()

    for how in ({}, {"criterion": with_criterion}, {"forward": forward}):
        params, buffers, loss_fn = df.functional(net, **how)
        for n in ((2,) if how else (1,)) if compiled else (1, 2):
            given = batch if n == 1 else df.stack(batch, n)
            if not compiled:
                given = UserDict(given)
            state, metrics = trained(around(loss_fn), params, buffers, given, compiled=compiled, n=n)
            got = df.state_dict(net, state if n == 1 else df.worker(state, 1))
            assert list(got) == list(net.state_dict()) and "scale" not in got
            copy.deepcopy(net).load_state_dict(got, strict=True)
            for name, x in plain.state_dict().items():
                torch.testing.assert_close(got[name], x, atol=1e-6, rtol=1e-5)
            assert (metrics.aux is not None) == ("forward" in how)
    assert float(net.count) == 0


@WAYS
def test_a_criterion_may_use_the_modules_own_parameters(around):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    batch = (torch.randn(5, 3), torch.randn(5, 1))

    def criterion(output, y):
        return mse_loss(output, y) + sum(p.square().sum() for p in net.parameters())

    plain = copy.deepcopy(net)
    (mse_loss(plain(batch[0]), batch[1]) + sum(p.square().sum() for p in plain.parameters())).backward()
    params, buffers, loss_fn = df.functional(net, criterion)
    for compiled in (False, True):
        state, _ = trained(around(loss_fn), params, buffers, batch, steps=1, compiled=compiled)
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(df.params(state)[name], p - 0.1 * q.grad)
    assert all(p.grad is None for p in net.parameters())


class Caching(nn.Module):
    """Keeps what it computed last among its attributes, and uses a block twice."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(3, 3), None
        self.again = self.block

    def forward(self, x):
        self.last = self.again(self.block(x))
        return self.last


@WAYS
def test_the_module_is_left_as_it_was(around):
    net = Caching()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    params, buffers, loss_fn = df.functional(net, mse_loss)
    batch = (torch.randn(5, 3), torch.randn(5, 3))
    for batches, n in ((batch, 1), (df.stack(batch, 2), 2), ((torch.randn(5, 4), torch.randn(5, 3)), 1)):
        is_right = around is df.autograd and batches[0].shape[-1] == 3
        with nullcontext() if is_right else pytest.raises((ValueError, RuntimeError)):
            trained(around(loss_fn), params, buffers, batches, n=n)
    assert type(net.block.weight) is nn.Parameter and net.block is net.again
    assert (net.last is None) == (around is not df.autograd)
    net.last = None
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    torch.compile(copy.deepcopy(net), backend="eager")(batch[0])


@WAYS
def test_a_module_that_has_changed_since_is_looked_at_again(around):
    """Other submodules of the same names have the state's weights, too; what has no place any more is named."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), (torch.randn(5, 3), torch.randn(5, 3))
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state = init(params, buffers)
    expected, _ = step(state, batch, 0)
    net[0] = other = nn.Linear(3, 3)
    own = other.weight
    again, _ = step(state, batch, 0)
    for x, y in zip(trees.leaves(df.params(again)), trees.leaves(df.params(expected)), strict=True):
        assert torch.equal(x, y)
    assert net[0].weight is own and own.grad is None
    net[1].weight = net[0].weight
    with pytest.raises(ValueError, match=r"has changed since, in \['1.weight'\]; call df.functional again"):
        step(state, batch, 0)
    net[1] = nn.Tanh()
    with pytest.raises(ValueError, match=r"has changed since, in \['1.bias', '1.weight'\]"):
        step(state, batch, 0)
    assert net[0].weight is own


class Running(nn.Module):
    """A running mean that is no buffer."""

    def __init__(self, start):
        super().__init__()
        self.weight, self.mean = nn.Parameter(torch.ones(2)), start

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return x * self.weight - self.mean


@pytest.mark.parametrize(
    ("start", "compiled"),
    [(0.0, False), (torch.zeros(()), False), (torch.zeros(()), True)],
    ids=["number", "eager", "compiled"],
)
def test_a_tensor_that_lives_on_as_an_attribute_is_refused_where_it_is_traced(start, compiled):
    params, buffers, loss_fn = df.functional(Running(start), mse_loss)
    batch = (torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"attributes \['mean'\].*df\.autograd.*register_buffer"):
        trained(loss_fn, params, buffers, batch, compiled=compiled)
    trained(df.autograd(loss_fn), params, buffers, batch, compiled=compiled)


class Filling(nn.Module):
    """A buffer that the first call makes and the next one uses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", None)

    def forward(self, x):
        before, self.cache = self.cache, x.mean(0)
        return x * self.weight + (0 if before is None else before)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_buffer_that_a_call_fills_is_refused_where_it_is_traced(compiled):
    params, buffers, loss_fn = df.functional(Filling(), mse_loss)
    with pytest.raises(ValueError, match=r"attributes \['cache'\].*df\.autograd"):
        trained(loss_fn, params, buffers, (torch.ones(3, 2), torch.ones(3, 2)), compiled=compiled)


class Masked(nn.Module):
    """A plain attribute that a call may read, or replace by None."""

    def __init__(self, ends):
        super().__init__()
        self.weight, self.mask, self.ends = nn.Parameter(torch.ones(2)), torch.tensor([1.0, 0.5]), ends

    def forward(self, x):
        y = x * self.weight if self.mask is None else x * self.weight * self.mask
        if self.ends:
            self.mask = None
        return y


@pytest.mark.parametrize("ends", [False, True])
def test_a_tensor_kept_as_an_attribute_is_read_in_compiled_loops_too(ends):
    (eager, _), (compiled, _) = (
        trained(df.accumulate(loss_fn), params, buffers, 2 * (torch.ones(2, 3, 2),), compiled=is_it)
        for is_it in (False, True)
        for params, buffers, loss_fn in [df.functional(Masked(ends), mse_loss)]
    )
    torch.testing.assert_close(df.params(compiled), df.params(eager))


def test_what_functional_cannot_take_is_refused():
    with pytest.raises(ValueError, match="forward returns the loss itself"):
        df.functional(nn.Linear(2, 2), mse_loss, forward=lambda m, b: 0)
    with pytest.raises(ValueError, match="expected an nn.Module"):
        df.functional(mse_loss, mse_loss)
    with pytest.raises(ValueError, match="run the module once on a batch first"):
        df.functional(nn.LazyLinear(3), mse_loss)

    class MakesABuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(2.0))
            return x * self.weight + self.table

    net = MakesABuffer()
    params, buffers, loss_fn = df.functional(net, mse_loss)
    with pytest.raises(ValueError, match=r"attributes \['table'\].*df\.autograd.*call the module once"):
        trained(loss_fn, params, buffers, (torch.ones(2), torch.ones(2)))
    assert not hasattr(net, "table")
    params, buffers, loss_fn = df.functional(nn.Linear(2, 2), mse_loss)
    for batch in (torch.ones(2, 2), "text"):
        for around in (lambda f: f, df.autograd):
            with pytest.raises(ValueError, match="expected a tuple"):
                trained(around(loss_fn), params, buffers, batch)
    params, buffers, loss_fn = df.functional(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="there is no criterion"):
        trained(loss_fn, params, buffers, (torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(ValueError, match="without a criterion the module's output has the loss"):
        trained(loss_fn, params, buffers, {"input": torch.ones(2, 2)})


@pytest.mark.parametrize("how", ["data", "transposed", "buffer", "frozen buffer"])
def test_a_parameter_whose_copy_in_a_state_would_not_follow_another_one_is_refused(how):
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    if "buffer" in how:
        a.weight.requires_grad_(how == "buffer")
        del b.weight
        b.register_buffer("weight", a.weight)
    else:
        b.weight.data = a.weight.data if how == "data" else a.weight.data.T
    with pytest.raises(ValueError, match=r"\['0.weight', '1.weight'\] share their memory.*one Parameter"):
        df.functional(nn.Sequential(a, b), mse_loss)


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.data[:2], lambda w: [w.detach()]])
def test_a_plain_attribute_that_is_a_view_of_a_trained_parameter_is_refused(view):
    """A plain loop's updates would reach it: tied layers of an autoencoder are written so."""
    net = nn.Linear(4, 4)
    net.decoder = view(net.weight)
    with pytest.raises(ValueError, match=r"the attributes \['decoder'\] are views of trained parameters.*in forward"):
        df.functional(net, mse_loss)
    net.weight.requires_grad_(False)
    net.decoder = view(net.weight)
    df.functional(net, mse_loss)


@pytest.mark.parametrize("of", ["parameters", "buffers"])
def test_a_part_of_another_tensor_is_refused_and_neighbors_in_one_memory_are_not(of):
    """As a fused projection has them, or two views of one table: a copy of the part would not follow the whole."""

    def made(*parts):
        net = nn.Linear(2, 2)
        for i, part in enumerate(parts):
            net.register_buffer(f"p{i}", part) if of == "buffers" else net.register_parameter(
                f"p{i}", nn.Parameter(part)
            )
        return df.functional(net, mse_loss)

    whole = torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"\['p0', 'p1'\] share their memory.*clone\(\)"):
        made(whole, whole[2:4])
    assert len(made(whole[:2], whole[2:4], whole[4:])) == 3
    assert len(made(whole[:, :2], whole[:, 2:])) == 3


def test_constants_and_tensors_without_memory_may_share_it():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight.data = a.weight.data
    net = nn.Sequential(a.requires_grad_(False), b)
    b.weight.requires_grad_(False)
    assert df.functional(net, mse_loss)[0].keys() == {"1.bias"}
    assert len(df.functional(net.to("meta").requires_grad_(), mse_loss)[0]) == 4


def test_a_state_dict_comes_back():
    net, batch = Labeled(), {"tokens": tokens(3, 5), "labels": tokens(3, 5)}
    params, buffers, loss_fn = df.functional(net)
    init, step = df.all_reduce(loss_fn, df.adamw(1e-2), df.topology("complete", 2))
    state = df.stack(init(params, buffers), 2)
    step = df.simulate(step, 2)
    state, _ = step(state, {name: torch.stack([x, x.flip(0)]) for name, x in batch.items()}, 0)
    with pytest.raises(ValueError, match="the state is stacked"):
        df.state_dict(net, state)
    mean = df.state_dict(net, state, consensus=True)
    torch.testing.assert_close(mean["table.weight"], df.consensus_mean(state)["table.weight"])
    start = init(params, buffers)
    loaded = df.load_state_dict(net, start, mean)
    for got, want in zip(df.state_dict(net, loaded).values(), mean.values(), strict=True):
        assert torch.equal(got, want) and got.data_ptr() != want.data_ptr()
    for got, want in zip(trees.leaves(df.params(start)), trees.leaves(params), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="Missing key"):
        df.load_state_dict(net, start, {"count": torch.zeros(1)})


class Assigning(nn.Module):
    """Loads by assignment, as quantized modules and codebooks do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("codes", torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.weight = nn.Parameter(state_dict[prefix + "weight"])
        self.codes = state_dict[prefix + "codes"]


def test_a_state_dict_is_loaded_as_the_module_loads_it():
    net = Assigning()
    init, _ = df.all_reduce(df.functional(net, mse_loss)[2], df.sgd(0.1), df.topology("complete", 1))
    state = init(*df.functional(net, mse_loss)[:2])
    given = {"weight": torch.arange(3.0), "codes": torch.arange(2.0)}
    loaded = df.load_state_dict(net, state, given)
    held = df.params(loaded) | df.buffers(loaded)
    assert all(torch.equal(held[name], x) and held[name].data_ptr() != x.data_ptr() for name, x in given.items())
    assert not any(x.any() for x in (*net.state_dict().values(), *df.params(state).values()))
    with pytest.raises(ValueError, match=r"has loaded another shape into 'codes' than the state's, \[2\]"):
        df.load_state_dict(net, state, {**given, "codes": torch.zeros(5)})


class Listing(nn.Module):
    """Computes, saves and loads by a list of its parameters, as TensorDictParams do by a TensorDict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.listed = [self.weight]

    def forward(self, x):
        return x * self.listed[0]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.listed[0]

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.listed[0].data.copy_(state_dict[prefix + "weight"])


def test_a_module_that_keeps_its_parameters_in_a_list_too_exports_loads_and_computes_with_the_state():
    net, x = Listing(), torch.ones(3)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(1.5), df.topology("complete", 1))
    state, _ = step(init(params, buffers), (x, x), 0)
    assert torch.equal(df.params(state)["weight"], x)
    assert torch.equal(df.state_dict(net, state)["weight"], x)
    assert loss_fn(df.params(state), buffers, (x, x))[0] == 0
    loaded = df.load_state_dict(net, state, {"weight": 2 * x})
    assert torch.equal(df.params(loaded)["weight"], 2 * x)
    assert not net.weight.any()


def test_a_frozen_parameter_that_is_made_of_others_is_refused():
    """As torchao's quantized weights are."""
    pytest.importorskip("torch.testing._internal.two_tensor")
    from torch.testing._internal.two_tensor import TwoTensor

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"the frozen parameter '0.weight' is a .*TwoTensor, made of other tensors.*bitsandbytes"
    ):
        df.functional(net, mse_loss)


class KeepsViews(nn.Linear):
    """Keeps a detached view of its weights, as torchrl's losses do for the networks that a term does not train."""

    def forward(self, x):
        if not hasattr(self, "cached"):
            self.cached = {"first": self.weight.detach()}
        return super().forward(x) @ self.cached["first"]


def keeping(module, batch):
    return mse_loss(module(batch), batch)


def dropping(module, batch):
    loss = keeping(module, batch)
    del module.cached
    return loss


@pytest.mark.parametrize("call", ["step", "simulated", "evaluation"])
def test_views_of_parameters_that_a_call_leaves_behind_are_refused(call):
    x = torch.randn(4, 3)
    params, buffers, loss_fn = df.functional(KeepsViews(3, 3), forward=keeping)
    init, step = df.all_reduce(
        df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2 if call == "simulated" else 1)
    )
    state = init(params, buffers)
    if call == "simulated":
        state, step, x = df.stack(state, 2), df.simulate(step, 2), torch.stack([x, x])
    with pytest.raises(ValueError, match=r"a call left views .*\['cached'\].*at the end of forward"):
        df.evaluate(loss_fn, state, [x]) if call == "evaluation" else step(state, x, 0)


def test_a_loss_that_drops_its_views_of_parameters_trains_as_a_plain_loop():
    module, plain, x = KeepsViews(3, 3), KeepsViews(3, 3), torch.randn(4, 3)
    plain.load_state_dict(module.state_dict())
    params, buffers, loss_fn = df.functional(module, forward=dropping)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, optimizer = init(params, buffers), torch.optim.SGD(plain.parameters(), 0.1)
    for t in range(3):
        state, _ = step(state, x, t)
        df.evaluate(loss_fn, state, [x])
        optimizer.zero_grad()
        keeping(plain, x).backward()  # its view follows the updates
        optimizer.step()
    torch.testing.assert_close(df.params(state), {name: p.detach() for name, p in plain.named_parameters()})


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x):
        return self.head(self.table(x)).flatten(0, 1)


@WAYS
def test_a_hundred_lengths_and_a_short_last_batch_train_in_one_run(around):
    params, buffers, loss_fn = df.functional(Tokens(), lambda out, y: cross_entropy(out, y.flatten()))
    init, step = df.adapt_while_communicate(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    graphs = []
    run = df.compile(step, backend=compile_cache.counted("aot_eager", graphs))
    state, eager = init(params, buffers), init(params, buffers)
    for t, (rows, length) in enumerate([*((4, n) for n in range(2, 102)), (3, 17), (1, 17)]):
        batch = (tokens(rows, length), tokens(rows, length))
        state, _ = run(state, batch, t)
        if t % 20 == 0 or length == 17:
            eager, _ = step(init(df.params(state), buffers), batch, t)
    assert len(graphs) == 1 if around is df.autograd else len(graphs) <= 5


def asks(params, batch):
    return (params * batch).square().mean() if (params * batch).sum() > -1e9 else params.sum()


def checkpointed(params, batch):
    return checkpoint(torch.tanh, params, use_reentrant=False).sum()


def test_what_cannot_be_traced_is_answered_with_a_way_out(monkeypatch):
    x = torch.ones(3)
    for n, compiled, words in (
        (1, True, "torch.compile could not trace"),
        (2, False, "for all workers at once"),
        (2, True, "for all workers at once"),
    ):
        with pytest.raises(RuntimeError, match=f"{words}.*df.autograd\\(loss_fn\\)"):
            trained(asks, x, None, df.stack(x, n) if n > 1 else x, compiled=compiled, n=n)
        trained(df.autograd(asks), x, None, df.stack(x, n) if n > 1 else x, compiled=compiled, n=n)
    with pytest.raises(RuntimeError, match="saved tensor hooks(.|\n)*df.autograd"):
        trained(checkpointed, x, None, x, compiled=True)
    trained(df.autograd(checkpointed), x, None, x)
    assert compilation._GRAPHS == 32
    monkeypatch.setattr(compilation, "_GRAPHS", 3)
    init, step = df.all_reduce(lambda p, b: (p - b).square().mean(), df.sgd(0.1), df.topology("complete", 1))
    state, run = init(x), df.compile(step, dynamic=False, backend="eager")
    for t in range(3):
        state, _ = run(state, torch.ones(t + 1, 3), t)
    with pytest.raises(RuntimeError, match="more than 3 kinds.*df.autograd"):
        run(state, torch.ones(4, 3), 3)


@pytest.mark.parametrize("around", [nn.utils.spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)])
def test_a_weight_that_a_hook_computes_is_refused_where_it_is_traced_and_by_autograd_computed_in_every_step(around):
    torch.manual_seed(0)
    layer = around(nn.Linear(4, 4))
    before, batch = layer.weight, (torch.randn(3, 4), torch.randn(3, 4))
    params, buffers, loss_fn = df.functional(layer, mse_loss)
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    for run in (step, df.donate(step), df.compile(step, backend="aot_eager")):
        with pytest.raises(ValueError, match=r"attributes \['weight'\].*df\.autograd.*parametrizations"):
            run(init(params, buffers), batch, 0)
    assert layer.weight is before
    loss_fn = df.autograd(loss_fn)
    (eager, _), (compiled, _) = (trained(loss_fn, params, buffers, batch, compiled=is_it) for is_it in (False, True))
    torch.testing.assert_close(df.params(compiled), df.params(eager))
    torch.testing.assert_close(df.buffers(compiled), df.buffers(eager))


def test_a_weight_that_a_hook_computes_is_that_of_each_worker_in_simulated_micro_batches_and_evaluations():
    """The mean over two equal workers of two micro-batches each is one gradient of the whole batch."""
    torch.manual_seed(0)
    layer = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    params, buffers, loss_fn = df.functional(layer, mse_loss)
    loss_fn, batch = df.autograd(loss_fn), (torch.randn(6, 4), torch.randn(6, 4))
    (whole, _) = trained(loss_fn, params, buffers, batch)
    micros = df.stack(tuple(x.unflatten(0, (2, 3)) for x in batch), 2)
    (state, _) = trained(df.accumulate(loss_fn), params, buffers, micros, n=2)
    torch.testing.assert_close(df.params(df.worker(state, 0)), df.params(whole))
    expected = df.evaluate(loss_fn, whole, [batch])
    torch.testing.assert_close(df.evaluate_replicas(loss_fn, state, [batch]), expected.expand(2))
