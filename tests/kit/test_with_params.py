"""`with_params`: nothing that an algorithm remembers pulls back to the old parameters."""

from typing import NamedTuple

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from tests import contract, network

pytestmark = pytest.mark.thorough

N = 4
LATER = [
    ("stochastic_gradient_push, delayed", {"delay": 2}),
    ("streaming_diloco", {"inner_steps": 6, "num_fragments": 2, "delay": 3}),
]
"""Hyperparameters with which more is on its way."""
EVERY = [(row, {}) for row in contract.ROWS] + LATER
each_algorithm = pytest.mark.parametrize(("row", "options"), EVERY, ids=str)
REMEMBER_NOTHING = ("adapt_while_communicate", "adapt_then_combine", "all_reduce")


@pytest.fixture(autouse=True)
def gated(monkeypatch):
    """The network's loss, times a number in the batch: 0 for a gradient of zero."""
    plain = network.loss_fn
    monkeypatch.setattr(network, "loss_fn", lambda params, batch: (batch[0] * plain(params, batch[1:])[0], None))


def build(row, options):
    return network.build(row, N, **options)


def shifted(by):
    return trees.map(lambda leaf: leaf + by, network.params())


def train(step, state, first, steps, gate=1.0, data=0):
    for t in range(first, first + steps):
        state, _ = step(state, (torch.full((N,), gate), *network.batches(N, t + data)), t)
    return state


def started(algorithm, by=0.0, data=0, steps=7):
    """Trained for 7 steps: between two outer rounds, with messages under way."""
    step = df.simulate(algorithm.step, N)
    return train(step, df.stack(algorithm.init(shifted(by)), N), 0, steps, data=data), step


def assert_close(a, b, atol=2e-5):
    for x, y in zip(trees.leaves(a), trees.leaves(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=0)


@pytest.mark.one_in(3)
@each_algorithm
def test_without_gradients_all_workers_stay_where_they_were_put(row, options):
    state, step = started(build(row, options))
    p = df.stack(shifted(3.0), N)
    state = df.with_params(state, p)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(df.params(state)), trees.leaves(p), strict=True))
    assert_close(df.params(train(step, state, 7, 20, gate=0.0)), p)


@pytest.mark.one_in(3)
@each_algorithm
def test_two_pasts_that_get_the_same_parameters_have_one_future(row, options):
    algorithm, p = build(row, options), df.stack(shifted(0.1), N)
    ends = []
    for by, data in ((0.0, 0), (-0.2, 100)):
        state, step = started(algorithm, by, data)
        ends.append(df.params(train(step, df.with_params(state, p), 7, 5)))
    assert_close(*ends)


@each_algorithm
def test_a_stacked_state_gets_what_each_worker_would_get_alone(row, options):
    state, _ = started(build(row, options))
    new = df.with_params(state, df.stack(shifted(1.0), N))
    for i in range(N):
        alone = df.with_params(df.worker(state, i), shifted(1.0))
        for a, b in zip(trees.leaves(df.worker(new, i)), trees.leaves(alone), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
    places = [leaf.data_ptr() for leaf in trees.leaves(new) if leaf.numel()]
    assert len(set(places)) == len(places)  # as donation needs it


@pytest.mark.parametrize("name", REMEMBER_NOTHING)
def test_where_nothing_is_remembered_the_own_parameters_change_nothing(name):
    state, step = started(network.build(name, N))
    went_on = train(step, state, 7, 5)
    assert_close(train(step, df.with_params(state, df.params(state)), 7, 5), went_on, atol=0)


@pytest.mark.parametrize("name", ["diloco", "adapt_while_communicate"])
def test_an_ema_starts_anew_or_goes_on(name):
    algorithm = df.ema(network.build(name, N), 0.9)
    state, step = started(algorithm)
    p = df.stack(shifted(3.0), N)
    new = df.with_params(state, p)
    assert_close(df.ema_params(new), p, atol=0)
    assert_close(df.params(train(step, new, 7, 20, gate=0.0)), p)


class OwnMemory(NamedTuple):
    slow: torch.Tensor


def test_a_memory_that_does_not_say_how_it_restarts_is_refused():
    state = network.build("all_reduce", N).init(network.params())
    with pytest.raises(ValueError, match=r"a OwnMemory, has no `restart`.*restart\(self, x\)"):
        df.with_params(state._replace(memory=OwnMemory(torch.ones(3))), network.params())
