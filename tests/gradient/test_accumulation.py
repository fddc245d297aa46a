"""Micro-batches: the gradient of k of them is that of one batch k times as large, with k calls of the loss."""

import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from tests import network

pytestmark = pytest.mark.thorough

N = 4


def accumulating(algorithm="adapt_while_communicate", accumulated=True):
    topology = df.topology("one-peer-exp", N)
    loss_fn = df.accumulate(network.loss_fn) if accumulated else network.loss_fn
    return getattr(df, algorithm)(loss_fn, df.adamw(0.01), topology, bucket_mb=0.002)


def in_micro_batches(batch, k, axis=1):
    return trees.map(lambda x: x.unflatten(axis, (k, -1)), batch)


def trajectory(algorithm, k=None, steps=4, listed=False, **compile_options):
    init, step = accumulating(algorithm, accumulated=k is not None)
    state, step = df.stack(init(network.params()), N), df.simulate(step, N)
    step = df.compile(step, **compile_options) if compile_options else step
    for t in range(steps):
        batch = network.batches(N, t)
        if k is not None:
            batch = in_micro_batches(batch, k)
        if listed:
            batch = [trees.map(lambda x, i=i: x[:, i], batch) for i in range(k)]
        state, metrics = step(state, batch, t)
    return trees.leaves(state), metrics


def assert_close(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or {"atol": 2e-6, "rtol": 1e-5}))


@pytest.mark.parametrize("algorithm", ["adapt_while_communicate", "all_reduce"])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_k_micro_batches_are_one_batch_k_times_as_large(algorithm, k):
    leaves, metrics = trajectory(algorithm, k)
    expected, whole = trajectory(algorithm)
    assert_close(leaves, expected)
    assert_close([metrics.loss, metrics.grad_norm, metrics.aux.mean(1)], [whole.loss, whole.grad_norm, whole.aux])
    assert metrics.aux.shape == (N, k)


def test_compiled_accumulation_is_the_eager_one_and_one_graph():
    counters.clear()
    leaves, metrics = trajectory("adapt_while_communicate", 4, backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    expected, eager = trajectory("adapt_while_communicate", 4)
    assert_close(leaves, expected)
    assert_close([metrics.loss, metrics.aux], [eager.loss, eager.aux])


def test_a_list_of_micro_batches_is_stacked():
    stacked, _ = trajectory("all_reduce", 4)
    listed, _ = trajectory("all_reduce", 4, listed=True)
    assert_close(listed, stacked, atol=0, rtol=0)


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
def test_the_loss_is_called_once_for_each_micro_batch(around):
    seen = []

    def loss_fn(params, batch):
        seen.append(float(batch.sum()) if around is df.autograd else None)
        return ((batch - params) ** 2).mean()

    init, step = df.all_reduce(df.accumulate(around(loss_fn)), df.sgd(0.5), df.topology("complete", 1))
    state, metrics = step(init(torch.zeros(1)), torch.tensor([[1.0], [3.0], [5.0]]), 0)
    assert len(seen) == 3
    torch.testing.assert_close(df.params(state), torch.tensor([3.0]))
    torch.testing.assert_close(metrics.loss, torch.tensor(35.0 / 3))


def test_aux_of_micro_batches_that_differs_in_shape_is_a_list_with_both_gradients():
    sizes = iter([1, 2] * 2)
    loss_fn = lambda params, batch: (((batch - params) ** 2).mean(), torch.ones(next(sizes)))  # noqa: E731
    for one in (loss_fn, df.autograd(loss_fn)):
        init, step = df.all_reduce(df.accumulate(one), df.sgd(0.5), df.topology("complete", 1))
        aux = step(init(torch.zeros(1)), torch.tensor([[1.0], [3.0]]), 0)[1].aux
        assert [list(x.shape) for x in aux] == [[1], [2]]


def test_gloo_ranks_accumulate_as_vmap_does():
    init, step = accumulating()
    step = df.compile(step, backend="aot_eager")

    starts = on_kept_ranks(N, lambda rank: init(network.params()))

    def train(rank):
        state = trees.map(torch.clone, starts[rank])
        for t in range(4):
            batch = in_micro_batches(tuple(x[rank] for x in network.batches(N, t)), 4, axis=0)
            state, metrics = step(state, batch, t)
        return trees.leaves(state), metrics

    with alone_as_rank_of(N):  # compiled once, before all run it
        train(0)
    expected, metrics = trajectory("adapt_while_communicate", 4)
    for rank, (leaves, mine) in enumerate(on_kept_ranks(N, train)):
        assert_close(leaves, [leaf[rank] for leaf in expected])
        assert_close([mine.loss, mine.aux], [metrics.loss[rank], metrics.aux[rank]])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_buffers_pass_from_one_micro_batch_to_the_next(backend):
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    inputs, targets = torch.randn(4, 6, 3), torch.randn(4, 6, 1)
    init, step = df.all_reduce(df.accumulate(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    step = step if backend is None else df.compile(step, backend=backend)
    state, metrics = step(init(params, buffers), (inputs, targets), 0)

    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x, y in zip(inputs, targets, strict=True):
        (nn.functional.mse_loss(module(x), y) / 4).backward()
    optimizer.step()
    expected = module.state_dict()
    got = df.params(state) | df.buffers(state)
    assert got["1.num_batches_tracked"] == 4
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_buffer_that_changes_its_dtype_is_refused(backend):
    def loss_fn(params, count, batch):
        return (params * batch).sum(), (count * 0.95, None)

    init, step = df.all_reduce(df.accumulate(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    step = step if backend is None else df.compile(step, backend=backend)
    with pytest.raises(ValueError, match=r"float32.*int64|int64.*float32"):
        step(init(torch.ones(3), torch.tensor(10)), torch.ones(2, 4, 3), 0)


def test_micro_batches_of_different_numbers_are_an_error():
    init, step = df.all_reduce(df.accumulate(lambda p, b: (p * b[0]).sum()), df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"leaves are \[\[2, 3\], \[3\]\].*same leading axis of M >= 1"):
        step(init(torch.ones(3)), (torch.ones(2, 3), torch.ones(3)), 0)
    with pytest.raises(ValueError, match="not accumulated yet"):
        df.accumulate(df.accumulate(network.loss_fn))
    with pytest.raises(ValueError, match=r"leaves are \[\]"):
        step(init(torch.zeros(3)), [None, None], 0)
    with pytest.raises(ValueError, match=r"leaves are \[\['generator'\]\].*a list of M"):
        step(init(torch.zeros(3)), (x for x in torch.ones(2, 4, 3)), 0)
    with pytest.raises(ValueError, match=r"leaves are \[\[2, 4, 3\], \['int'\]\].*a list of M"):
        step(init(torch.zeros(3)), (torch.ones(2, 4, 3), 3), 0)


LINEAR = df.functional(nn.Linear(3, 1), nn.functional.mse_loss)


@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        ([6, 3], [6, 1]),  # a batch as it is: a linear network would take every sample for a micro-batch
        ([6, 3], [6]),
        ([6], [6]),
        ([2, 3, 3], [2, 1]),
        ([2, 3, 3], [2]),
    ],
)
def test_a_batch_without_the_axis_of_micro_batches_is_refused(shapes, autograd, simulated):
    params, buffers, loss_fn = LINEAR
    loss_fn = df.autograd(loss_fn) if autograd else loss_fn
    init, step = df.all_reduce(df.accumulate(loss_fn), df.sgd(0.1), df.topology("complete", 2 if simulated else 1))
    state, batch = init(params, buffers), tuple(torch.ones(shape) for shape in shapes)
    if simulated:
        state, step = df.stack(state, 2), df.simulate(step, 2)
        batch = tuple(torch.stack([x, x]) for x in batch)
    with pytest.raises(
        ValueError, match=r"accumulate\(loss_fn\): the batch's leaves are .*\[M, b, \.\.\.\].*unflatten"
    ):
        step(state, batch, 0)


def _embedded(params, batch):
    rows, width = batch["tokens"].shape  # as in transformers, which a row alone does not have
    return ((params[batch["tokens"]].sum(-1) - batch["labels"]) ** 2).sum() / (rows * width)


TRANSFORMS = {
    "eager": lambda step: step,
    "donated": df.donate,
    "compiled": lambda step: df.compile(step, backend="eager"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
def test_a_batch_taken_for_micro_batches_is_named_where_the_loss_fails_on_one(transform, autograd, simulated):
    """Nothing in the shapes tells `[B, T]` of one batch from `[M, b]`, so the model's error has to say it."""
    loss_fn = df.autograd(_embedded) if autograd else _embedded
    init, step = df.all_reduce(df.accumulate(loss_fn), df.sgd(0.1), df.topology("complete", 2 if simulated else 1))
    state, batch = init(torch.ones(5, 2)), {name: torch.ones(4, 3, dtype=torch.int64) for name in ("tokens", "labels")}
    if simulated:
        state, step, batch = (
            df.stack(state, 2),
            df.simulate(step, 2),
            {n: x.expand(2, -1, -1) for n, x in batch.items()},
        )
    step = TRANSFORMS[transform](step)
    with pytest.raises(Exception, match="not enough values to unpack|expected 2") as error:  # noqa: B017
        step(state, batch, 0)
    lead = r"\[2, 4, 3\]" if simulated else r"\[4, 3\]"
    assert any(
        re.search(
            rf"step\(state, batch, t\): df.accumulate .*leaves are \[{lead}, .*\[M, b, .*\[batch\].*unflatten", note
        )
        for note in error.value.__notes__
    )
    step(state, [batch], 0)  # as it says


def test_a_list_of_micro_batches_says_where_each_begins_whatever_their_leaves():
    def loss_fn(params, batch):
        return (batch["weight"] * (batch["x"] - params) ** 2).mean()

    init, step = df.all_reduce(df.accumulate(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    micros = [{"weight": torch.tensor(w), "x": torch.ones(2, 3)} for w in (1.0, 3.0)]
    assert step(init(torch.zeros(3)), micros, 0)[1].loss == 2


def test_accum_adam_steps_on_every_micro_batch_beside_it():
    """Decent-DP's other way to use a large batch: a window of updates, each with an exchange of its own."""
    init, step = df.adapt_while_communicate(
        network.loss_fn, df.transforms.accum_adamw(0.01, accum_iter=4), df.topology("ring", N), bucket_mb=0.002
    )
    state, step = df.stack(init(network.params()), N), df.simulate(step, N)
    first = step(state, network.batches(N, 0), 0)[1].loss
    for t in range(40):
        state, metrics = step(state, network.batches(N, t), t)
    assert (metrics.loss < first).all()


def short_last():
    """Two micro-batches of 5 and 2 samples."""
    torch.manual_seed(0)
    return [(torch.randn(b, 3, dtype=torch.float64), torch.randn(b, 1, dtype=torch.float64)) for b in (5, 2)]


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
@pytest.mark.parametrize("simulated", [False, True])
def test_micro_batches_of_a_list_may_differ_in_size_and_count_alike(simulated, around, backend):
    def loss_fn(params, batch):
        errors = ((batch[0] @ params - batch[1]) ** 2).flatten()
        return errors.mean(), errors

    init, step = df.all_reduce(
        df.accumulate(around(loss_fn)), df.sgd(0.1), df.topology("complete", 2 if simulated else 1)
    )
    start, micros = torch.ones(3, 1, dtype=torch.float64), short_last()
    state, given, here = init(start), micros, 0
    if simulated:
        state, step, here = df.stack(state, 2), df.simulate(step, 2), (0,)
        given = trees.map(lambda x: torch.stack([x, x]), micros)
    step = step if backend is None else df.compile(step, backend=backend)
    state, metrics = step(state, given, 0)
    gradients = [2 * x.T @ (x @ start - y) / len(x) for x, y in micros]
    assert_close(
        [df.params(state)[here] if simulated else df.params(state)],
        [start - 0.1 * sum(gradients) / 2],
        atol=1e-12,
        rtol=0,
    )
    rows = [aux[0] if simulated else aux for aux in metrics.aux]
    assert_close(rows, [((x @ start - y) ** 2).flatten() for x, y in micros], atol=1e-12, rtol=0)
