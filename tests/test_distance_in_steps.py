"""The distance between workers in units of a worker's step, against its equation."""

import math

import pytest
import torch

import decentfn as df

TARGETS = torch.tensor([[0.0, 1.0], [4.0, -3.0], [2.0, 2.0]])


def after(optimizer, steps=1):
    init, step = df.adapt_while_communicate(lambda p, x: 0.5 * ((p - x) ** 2).sum(), optimizer, df.topologies.idle(3))
    state, step = df.stack(init(torch.zeros(2)), 3), df.simulate(step, 3)
    for t in range(steps):
        state, metrics = step(state, TARGETS, t)
    return state, metrics


def test_it_is_the_distance_over_the_length_of_a_step():
    """One step of SGD without momentum from a common point: x_i = η target_i."""
    state, metrics = after(df.sgd(0.25))
    away = 0.25 * (TARGETS - TARGETS.mean(0))
    step = 0.25 / (1 - 0.6) * TARGETS.norm(dim=1).mean()
    expected = away.norm(dim=1).square().mean().sqrt() / step
    assert float(df.distance_in_steps(state, metrics, momentum=0.6)) == pytest.approx(float(expected), rel=1e-6)
    twice = df.distance_in_steps(state, metrics, learning_rate=0.5)
    assert float(twice) == pytest.approx(float(expected) * (1 / (1 - 0.6)) / 2, rel=1e-6)


def test_a_step_of_an_adaptive_optimizer_is_at_most_its_rate_for_each_parameter():
    state, metrics = after(df.adamw(0.01, weight_decay=0.0))
    expected = df.consensus_distance(state) / (0.01 * math.sqrt(2))
    assert float(df.distance_in_steps(state, metrics, adaptive=True)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("adaptive", [False, True])
def test_workers_apart_are_infinitely_many_steps_of_length_zero_apart_and_equal_ones_none(adaptive):
    state, metrics = after(df.sgd(df.schedules.linear(0.25, 0.0, 1)), steps=2)
    assert metrics.learning_rate.max() == 0
    assert df.distance_in_steps(state, metrics, adaptive=adaptive) == math.inf
    assert df.distance_in_steps(df.stack(df.worker(state, 0), 3), metrics, adaptive=adaptive) == 0


def test_what_it_lacks_is_named():
    state, metrics = after(df.sgd(0.25))
    with pytest.raises(ValueError, match=r"distance_in_steps\(momentum=1.0\)"):
        df.distance_in_steps(state, metrics, momentum=1.0)
    with pytest.raises(ValueError, match="pass learning_rate="):
        df.distance_in_steps(state, metrics._replace(learning_rate=None))


@pytest.mark.parametrize("n", [3, 5, 7])
def test_equal_workers_have_no_distance_though_their_mean_is_rounded(n):
    init, _ = df.adapt_while_communicate(lambda p, x: p.sum(), df.sgd(0.1), df.topology("complete", n))
    state = df.stack(init(torch.rand(1000, generator=torch.Generator().manual_seed(0))), n)
    assert float(df.consensus_distance(state)) == 0 and not df.distance_to_consensus(state).any()
