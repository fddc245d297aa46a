"""A batch of another size: one compilation for the first, one for all others, and perhaps one for a size of 1."""

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn.engine.cache import counted
from decentfn.testing.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention, in the eager trial

N, SIZES = 4, (16, 20, 24, 13, 31, 8, *range(1, 25))


class Transformer(nn.Module):
    """One of each operator whose own rule of `vmap` reads sizes."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 8), nn.Embedding(40, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=dropout, activation="gelu", batch_first=True)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        h = self.block(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        mixed, _ = self.heads(h, h, h, need_weights=False)
        best = h.max(1, keepdim=True).values
        return self.head(torch.cat([mixed + best, h - h[:, -1:]], -1)).transpose(1, 2)


def images():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(4, 7)),
    )


class Bags(nn.Module):
    """Operators that PyTorch batches by a loop over the workers, or by their sizes as numbers."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(7, 5, mode=mode) for mode in ("mean", "sum")])
        self.pair, self.head = nn.Bilinear(5, 5, 4), nn.Linear(4, 7)

    def forward(self, x):
        mean, total = (bag(x) for bag in self.bags)
        starts = torch.arange(len(x) + 1, device=x.device) * x.shape[1]  # the last bag is empty
        total = total + self.bags[0](x.flatten(), starts)[:-1]
        weighted = nn.functional.embedding_bag(x, self.bags[1].weight, per_sample_weights=x / 9, mode="sum")
        h = self.pair(mean, (total + weighted).tanh())
        return self.head(torch.take_along_dim(h, h.argsort(-1), -1) + torch.take_along_dim(h, h.argmax(0, True), 0))


def perceptron():
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 7))


SUBJECTS = {
    "rows": (perceptron, lambda size: (size, 3), lambda size: (size,)),
    "rows of images": (images, lambda size: (size, 2, 12, 12), lambda size: (size,)),
    "rows of tokens": (Transformer, lambda size: (size, 6), lambda size: (size, 6)),
    "rows of bags": (Bags, lambda size: (size, 6), lambda size: (size,)),
    "length": (Transformer, lambda size: (2, size), lambda size: (2, size)),
}


def batch_of(subject, size, *axes):
    _, shape, classes = SUBJECTS[subject]
    x = (
        torch.randn(*axes, *shape(size))
        if subject in ("rows", "rows of images")
        else torch.randint(7, (*axes, *shape(size)))
    )
    return x, torch.randint(7, (*axes, *classes(size)))


def run(subject, wrap=lambda loss_fn: loss_fn, workers=N, axes=(), runs=None, stacked=True, sizes=SIZES, compared=0):
    """Take a step for each size, and the first few beside an eager step; return the number of graphs."""
    net = SUBJECTS[subject][0]
    net = net(dropout=0.0) if compared and net is Transformer else net()
    params, buffers, loss_fn = df.functional(net, nn.functional.cross_entropy)
    init, step = df.adapt_while_communicate(wrap(loss_fn), df.sgd(0.1), df.topology("one-peer-exp", workers))
    state, graphs = init(params, buffers), []
    if stacked:
        state, step, axes = df.stack(state, workers), df.simulate(step, workers), (workers, *axes)
    if runs is not None:
        state, step, axes = df.stack_runs([state] * runs), df.sweep(step, runs), (runs, *axes)
    backend = counted("aot_eager" if compared else "eager", graphs)
    compiled, other = df.compile(step, backend=backend, donate=not compared), state
    for t, size in enumerate(sizes):
        batch = batch_of(subject, size, *axes)
        state, metrics = compiled(state, batch, t)
        if t < compared:
            other, expected = step(other, batch, t)
            torch.testing.assert_close(metrics, expected)
            torch.testing.assert_close(list(state.params), list(other.params))
    return len(graphs)


MODES = {
    "alone": {"workers": 1, "stacked": False},
    "by autograd": {"workers": 1, "stacked": False, "wrap": df.autograd},
    "simulated": {},
    "simulated by autograd": {"wrap": df.autograd},
    "swept": {"runs": 2},
    "accumulated": {"wrap": df.accumulate, "axes": (2,)},
}


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.thorough) if m != "simulated" else m for m in MODES]
)
def test_thirty_sizes_of_a_batch_are_compiled_at_most_three_times(mode):
    """A size of 1 is tried in one mode, and with every network below."""
    sizes = SIZES if mode == "simulated" else [size for size in SIZES if size > 1]
    assert run("rows", **MODES[mode], sizes=sizes) <= 2 + (mode == "simulated")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("rows of tokens", "rows of bags")))
        for name in SUBJECTS
        if name != "rows"
    ],
)
@pytest.mark.parametrize("mode", [pytest.param("alone", marks=pytest.mark.slow), "simulated"])
def test_thirty_sizes_are_compiled_at_most_three_times_whatever_the_network_is_made_of(subject, mode):
    """And compute what the eager step does; in a transformer of rows there is dropout."""
    by_convolutions = subject == "rows of images"  # PyTorch takes another kernel for 16 samples or more
    compared = 0 if subject == "rows of tokens" else 4
    assert run(subject, **MODES[mode], compared=compared) <= 3 + by_convolutions


@pytest.mark.thorough
def test_thirty_sizes_are_compiled_at_most_three_times_on_ranks():
    sizes = [size for size in SIZES if size > 1]
    assert max(on_ranks(2, lambda rank: run("rows", workers=2, stacked=False, sizes=sizes))) <= 2


@pytest.mark.thorough
def test_a_simulation_whose_sizes_are_symbols_from_the_start_is_one_graph_and_computes_what_the_eager_one_does():
    """The number of workers is a constant nevertheless."""
    init, step = df.adapt_then_combine(lambda x, b: ((x - b) ** 2).mean(), df.sgd(0.1), df.topology("ring", N))
    eager, graphs = df.simulate(step, N), []
    compiled = df.compile(eager, backend=counted("eager", graphs), dynamic=True, donate=False)
    one = other = df.stack(init(torch.zeros(3)), N)
    for t, size in enumerate((11, 13, 17)):
        batch = torch.randn(N, size, 3)
        (one, _), (other, _) = eager(one, batch, t), compiled(other, batch, t)
    torch.testing.assert_close(df.params(other), df.params(one))
    assert len(graphs) == 1


@pytest.mark.thorough
def test_attention_with_masks_and_an_empty_vector_compute_in_a_compiled_simulation_what_they_do_in_an_eager_one():
    """A mask for padding, one of all samples, and one for all; the empty vector joins anything."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(8, 24)

        def forward(self, x):
            masks = (
                (x[:, :, 0] > 0)[:, None, None] | torch.eye(6, dtype=torch.bool),
                (x[0, :, :6] > 0) | torch.eye(6, dtype=torch.bool),
                torch.ones(6, 6, dtype=torch.bool).tril(),
            )
            heads = [y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.inputs(x).chunk(3, -1)]
            return [nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask) for mask in masks]

    def loss_of(outputs, y):
        every = [(out * (out + i).cos()).flatten(1) for i, out in enumerate(outputs)]
        return (
            sum(x.mean() for x in every) + torch.cat([torch.zeros(0), *every, every[0][1:]]).square().mean() + y.mean()
        )

    params, buffers, loss_fn = df.functional(Masked(), loss_of)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", N))
    one = other = df.stack(init(params, buffers), N)
    eager = df.simulate(step, N)
    compiled = df.compile(eager, backend="aot_eager", donate=False)
    for t, size in enumerate((5, 9, 4)):
        batch = torch.randn(N, size, 6, 8), torch.randn(N, size)
        (one, expected), (other, metrics) = eager(one, batch, t), compiled(other, batch, t)
        torch.testing.assert_close(metrics, expected)
        torch.testing.assert_close(list(other.params), list(one.params))
