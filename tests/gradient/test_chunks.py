"""`simulate(chunk_size=)`: the same numbers, with fewer workers' activations at a time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import decentfn as df
from decentfn.core import trees
from tests import contract, network

pytestmark = pytest.mark.thorough

N = 6


def run(build, batches, chunk_size, compiled=None, steps=3):
    """All leaves of state and metrics after some steps of N simulated workers."""
    init, step, *start = build()
    step = df.simulate(step, N, chunk_size=chunk_size)
    step = step if compiled is None else df.compile(step, backend=compiled)
    state = df.stack(init(*start), N)
    for t in range(steps):
        state, metrics = step(state, batches(t), t)
    return trees.leaves((state, metrics))


def agree(build, batches, sizes, **how):
    whole = run(build, batches, None, **how)
    for size in sizes:
        for a, b in zip(whole, run(build, batches, size, **how), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def of_any_size(row):
    try:
        network.subject(row).topology(N)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("row", list(filter(of_any_size, contract.ROWS)))
def test_chunks_change_nothing(row):
    agree(lambda: (*network.build(row, N), network.params()), lambda t: network.batches(N, t), [4], steps=2)


@pytest.mark.parametrize("compiled", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_chunks_of_every_size_compiled_too(compiled):
    row = "adapt_while_communicate on ring"
    sizes = [4] if compiled == "inductor" else [1, 2, 5, 6, 100]
    build = lambda: (*network.build(row, N), network.params())  # noqa: E731
    agree(build, lambda t: network.batches(N, t), sizes, compiled=compiled)


def test_chunks_with_buffers_and_micro_batches():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    params, buffers, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
    x = torch.randn(3, N, 5, 8, 3)  # steps, workers, micro-batches, batch
    y = torch.randn(3, N, 5, 8, 2)

    def build():
        topology = df.topology("ring", num_workers=N)
        return *df.adapt_while_communicate(df.accumulate(loss_fn), df.sgd(1e-2), topology), params, buffers

    agree(build, lambda t: (x[t], y[t]), [1, 4])


class Widest(TorchDispatchMode):
    """The most workers that took part in one matrix product."""

    workers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.workers = max(self.workers, args[0].shape[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk_size", "workers"), [(None, N), (4, 4), (2, 2)])
def test_no_more_workers_than_a_chunk_holds_are_evaluated_at_once(chunk_size, workers):
    init, step = df.all_reduce(lambda p, x: (x @ p).square().mean(), df.sgd(0.1), df.topology("complete", N))
    state = df.stack(init(torch.ones(3, 2)), N)
    with Widest() as widest:
        df.simulate(step, N, chunk_size=chunk_size)(state, torch.randn(N, 5, 3), 0)
    assert widest.workers == workers


def test_a_loss_that_draws_numbers_is_refused_in_chunks_and_not_without():
    def loss_fn(params, x):
        return torch.nn.functional.dropout(x @ params).square().mean()

    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", N))
    state, batch = df.stack(init(torch.ones(3, 2)), N), torch.randn(N, 5, 3)
    df.simulate(step, N)(state, batch, 0)
    with pytest.raises(RuntimeError, match="called random operation"):
        df.simulate(step, N, chunk_size=2)(state, batch, 0)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5])
def test_a_chunk_holds_at_least_one_worker(chunk_size):
    with pytest.raises(ValueError, match=r"simulate\(chunk_size=.* integer"):
        df.simulate(lambda state, batch, t: (state, None), N, chunk_size=chunk_size)
