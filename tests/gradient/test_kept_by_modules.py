"""What a module keeps between calls stays its worker's own, and what its classes are does not matter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decentfn as df
from decentfn.core import trees

N = 3


class Cached(nn.Module):
    """As GCNConv(cached=True): the first graph that it sees is used for ever."""

    def __init__(self, in_a_dict):
        super().__init__()
        self.linear, self.graph, self.tables = nn.Linear(4, 2), None, {}
        self.in_a_dict = in_a_dict

    def forward(self, x):
        if self.in_a_dict:
            graph = self.tables.setdefault("graph", x.detach().mean(0))
        else:
            self.graph = graph = x.detach().mean(0) if self.graph is None else self.graph
        return self.linear(x * graph)


class Spiking(nn.Module):
    """A membrane that goes on from call to call."""

    def __init__(self):
        super().__init__()
        self.linear, self.membrane = nn.Linear(4, 2), torch.zeros(2)

    def forward(self, x):
        self.membrane = (0.5 * self.membrane + self.linear(x).mean(0)).detach()
        return self.linear(x) + self.membrane


class Counting(nn.Module):
    """A counter, and a flag that says whether the cache is there."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.is_first = nn.Linear(4, 2), 0, True

    def forward(self, x):
        self.calls += 1
        if self.is_first:
            self.is_first, self.graph = False, x.detach().mean(0)
        return self.linear(x * self.graph) / self.calls


MODULES = {
    "a counter and a flag": Counting,
    "a cache": lambda: Cached(False),
    "a cache in a dict": lambda: Cached(True),
    "a membrane": Spiking,
}


def _batch(worker, t):
    draw = torch.Generator().manual_seed(10 * worker + t)
    return torch.randn(5, 4, generator=draw) + worker, torch.randn(5, 2, generator=draw)


def _net(name):
    torch.manual_seed(0)
    return MODULES[name]()


def _made(net):
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    algorithm = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", N))
    return net, algorithm, algorithm.init(params, buffers)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("transform", [lambda step: step, df.donate, lambda step: df.compile(step, backend="eager")])
def test_simulated_workers_keep_what_each_of_them_would_on_its_own_rank(name, transform):
    nets = [_net(name) for _ in range(N + 1)]  # ranks are threads, which share a generator

    def alone(rank):
        _, algorithm, state = _made(nets[rank])
        for t in range(4):
            state, _ = algorithm.step(state, _batch(rank, t), t)
        return df.params(state)

    expected = df.testing.on_ranks(N, alone)
    net, algorithm, state = _made(nets[N])
    step, state = transform(df.simulate(algorithm.step, N)), df.stack(state, N)
    for t in range(4):
        batch = trees.map(lambda *rows: torch.stack(rows), *(_batch(i, t) for i in range(N)))
        state, _ = step(state, batch, t)
    for i, own in enumerate(expected):
        torch.testing.assert_close(df.params(df.worker(state, i)), own, rtol=1e-5, atol=1e-6)
    kept, last = ([x for x in vars(m).values() if isinstance(x, (int, torch.Tensor))] for m in (net, nets[N - 1]))
    torch.testing.assert_close(kept, last)  # the last worker's are left in the module, as on its rank


def test_what_is_reset_between_steps_is_reset_for_every_worker():
    net, algorithm, state = _made(_net("a membrane"))
    step, state = df.simulate(algorithm.step, N), df.stack(state, N)
    for t in range(3):
        batch = trees.map(lambda *rows: torch.stack(rows), *(_batch(i, t) for i in range(N)))
        net.membrane, before = torch.zeros(2), state
        state, metrics = step(state, batch, t)
        _, again, _ = _made(_net("a membrane"))
        expected = df.simulate(again.step, N)(trees.map(torch.clone, before), batch, t)[1].loss
        torch.testing.assert_close(metrics.loss, expected)


class Shaping(nn.Module):
    """Its buffer gets its shape in the first call, as the membrane of snntorch's Leaky."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("membrane", torch.zeros(0))

    def forward(self, x):
        membrane = self.membrane if self.membrane.numel() else torch.zeros(5, 2)
        self.membrane = (0.5 * membrane + self.linear(x)).detach()
        return self.linear(x) + self.membrane


class Hiding(nn.Module):
    """Its parameter is in a plain dict, too, from which the call takes it, as in pennylane's TorchLayer."""

    def __init__(self, others):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.kept, self.others = {"weight": self.linear.weight}, others

    def forward(self, x):
        y = x @ self.kept["weight"].T
        return y + self.linear.bias if self.others else y


@pytest.mark.parametrize("around", [lambda loss: loss, df.autograd], ids=["traced", "autograd"])
def test_a_buffer_that_the_first_call_shapes_is_named_and_one_call_before_is_right(around):
    net = Shaping()
    for sentence in (
        r"buffer 'membrane' of shape \[0\] became one of \[5, 2\].*call the module once.*before df.functional",
        None,
    ):
        params, buffers, loss_fn = df.functional(net, F.mse_loss)
        init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
        if sentence is None:
            assert torch.isfinite(step(init(params, buffers), _batch(0, 0), 0)[1].loss)
        else:
            with pytest.raises(ValueError, match=sentence):
                step(init(params, buffers), _batch(0, 0), 0)
            net(_batch(0, 0)[0])


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("n", "transform"), [(1, lambda s: s), (2, lambda s: s), (1, lambda s: df.compile(s, backend="eager"))]
)
def test_a_parameter_that_a_plain_dict_hides_is_refused_with_the_name_of_autograd_which_is_right(others, n, transform):
    params, buffers, loss_fn = df.functional(Hiding(others), F.mse_loss)
    batch = _batch(0, 0) if n == 1 else df.stack(_batch(0, 0), n)
    for one in (loss_fn, df.autograd(loss_fn)):
        init, step = df.all_reduce(one, df.sgd(0.1), df.topology("complete", n))
        state, step = (
            (init(params, buffers), step) if n == 1 else (df.stack(init(params, buffers), n), df.simulate(step, n))
        )
        if one is loss_fn:
            with pytest.raises(ValueError) as error:
                transform(step)(state, batch, 0)
            assert "df.autograd(loss_fn)" in "".join(error.value.__notes__)
        else:
            assert torch.isfinite(step(state, batch, 0)[1].loss).all()


class _Irreps(tuple):
    """As e3nn's: its `len` is not what one expects, and says so."""

    def __len__(self):
        raise NotImplementedError


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.irreps = nn.Linear(4, 2), _Irreps((1, 2))
        self.register_buffer("codebook", torch.ones(2, requires_grad=True))  # as VectorQuantize's

    def forward(self, x):
        return self.linear(x) * self.codebook


@pytest.mark.parametrize("around", [lambda loss: loss, df.autograd])
def test_a_tuple_without_length_and_a_buffer_with_a_gradient_are_taken(around):
    torch.manual_seed(0)
    net, batch = Odd(), _batch(0, 0)
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    init, step = df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, _ = step(init(params, buffers), batch, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    optimizer.step()
    torch.testing.assert_close(df.params(state), dict(net.named_parameters()), rtol=1e-5, atol=1e-6)
    assert net.codebook.requires_grad and torch.equal(state.buffers["codebook"], torch.ones(2))


@pytest.mark.thorough
@pytest.mark.parametrize("transform", [lambda step: step, lambda step: df.compile(step, backend="eager")])
def test_chunks_with_dropout_are_refused_and_the_way_out_works(transform):
    net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    batch = trees.map(lambda *rows: torch.stack(rows), *(_batch(i, 0) for i in range(4)))

    def run(loss_fn, **how):
        init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 4))
        return transform(df.simulate(step, 4, **how))(df.stack(init(params, buffers), 4), batch, 0)

    with pytest.raises(RuntimeError, match="called random operation") as error:
        run(loss_fn, chunk_size=2)
    assert "df.autograd(loss_fn)" in "".join((str(error.value), *getattr(error.value, "__notes__", ())))
    run(loss_fn), run(df.autograd(loss_fn), chunk_size=2)
