"""Means and masses of 400 rounds: odd weights, late rounds, groups and messages in turn."""

import math

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.topologies import every, from_matrices, later

pytestmark = pytest.mark.thorough


def loss(params, batch):
    return sum(0.0 * p.abs().float().sum() for p in trees.leaves(params))


def started(algorithm, rows):
    return trees.map(lambda *leaves: torch.stack(leaves), *[algorithm.init(row) for row in rows])


def run(step, state, steps, n):
    for t in range(steps):
        state, _ = step(state, torch.zeros(n), t)
    return state


def circulant(n, weights):
    matrix = np.zeros((n, n))
    for i in range(n):
        for shift, weight in weights.items():
            matrix[i, (i - shift) % n] += weight
    return matrix


def fractions(n):
    """Rounds whose weights are no binary fractions: thirds, fifths, sevenths."""
    thirds, fifths = {0: 1 / 3, 1: 1 / 3, -1: 1 / 3}, {0: 1 / 5, 1: 2 / 5, 2: 2 / 5}
    sevenths = {0: 1 / 7, 1: 2 / 7, 3: 4 / 7}
    return from_matrices("fractions", np.stack([circulant(n, w) for w in (thirds, fifths, sevenths)]))


def tenths(n):
    return from_matrices("tenths", circulant(n, {0: 0.3, **{shift: 0.1 for shift in range(1, 8)}})[None])


def in_turn(n):
    return df.topologies.alternate(df.topology("complete", n), fractions(n))


SITUATIONS = {
    "weights that change, and a γ of 0.3": (7, lambda n: ("adapt_while_communicate", fractions(n), {"gamma": 0.3})),
    "0.3 and seven times 0.1": (8, lambda n: ("adapt_while_communicate", tenths(n), {})),
    "momentum that mixes in every third step": (5, lambda n: ("decentlam", every(3, fractions(n)), {"beta": 0.3})),
    "late rounds": (5, lambda n: ("adapt_then_combine", later(2, fractions(n)), {})),
    "groups and messages in turn": (7, lambda n: ("momentum_tracking", in_turn(n), {})),
    "tracking, seven workers": (7, lambda n: ("gradient_tracking", in_turn(n), {})),
    "slow momentum of an odd number": (5, lambda n: ("slowmo", every(2, fractions(n)), {"inner_steps": 3})),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_mean_stays_with(situation):
    n, of = SITUATIONS[situation]
    name, topology, options = of(n)
    algorithm = getattr(df, name)(loss, df.sgd(0.1), topology, **options)
    draw = torch.Generator().manual_seed(0)
    dtypes, steps = (torch.float32, torch.bfloat16), 400
    rows = [[(1.5 + torch.rand(64, generator=draw, dtype=torch.float64)).to(d) for d in dtypes] for _ in range(n)]
    state = started(algorithm, rows)
    before = [bucket.double().mean(0) for bucket in state.params]
    state = run(df.simulate(algorithm.step, n), state, steps, n)
    for x, was in zip(state.params, before, strict=True):
        moved = float((x.double().mean(0) - was).square().mean().sqrt()) / (2 * torch.finfo(x.dtype).eps)
        assert moved <= (1 + 0.29 * math.sqrt(steps / n)) * (4 if name == "slowmo" else 1)


@pytest.mark.parametrize("name", ["stochastic_gradient_push", "push_diging"])
def test_random_column_stochastic_rounds_keep_the_mass_and_the_weighted_sum(name):
    numbers, n, steps = np.random.RandomState(0), 5, 400
    rounds = numbers.rand(3, n, n) * (numbers.rand(3, n, n) < 0.5) + 0.1 * np.eye(n)
    topology = from_matrices("columns", rounds / rounds.sum(1, keepdims=True), needs_push_sum=True)
    algorithm = getattr(df, name)(loss, df.sgd(0.1), topology)
    draw = torch.Generator().manual_seed(0)
    state = started(algorithm, [[1.5 + torch.rand(64, generator=draw)] for _ in range(n)])

    def total(state):
        return (state.params[0].double() * state.memory.weight.double()[:, None]).mean(0)

    before = total(state)
    state = run(df.simulate(algorithm.step, n), state, steps, n)
    eps = torch.finfo(torch.float32).eps
    assert abs(float(state.memory.weight.double().sum()) - n) <= n * eps * math.sqrt(steps)
    assert float((total(state) - before).square().mean().sqrt()) <= 2 * eps * (1 + 0.5 * math.sqrt(steps))
