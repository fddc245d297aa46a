"""Means weighted by tokens, in all_reduce and DiLoCo, against float64 loops, and what a weight of 0 means."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import on_kept_ranks
from tests.quadratics import Sgd, flat, loss, problem, start

N, H, STEPS, LR = 4, 3, 40, 0.1


def weighed(params, batch):
    A, b, tokens = batch
    return loss(params, (A, b)), tokens


def tokens_at(t, n=N):
    """Another number on every worker in every step."""
    return 1.0 + (3 * np.arange(n) + 5 * t) % 7


def batch_at(p, t, tokens=None):
    return torch.tensor(p.A), torch.tensor(p.b), torch.tensor(tokens_at(t, len(p.A)) if tokens is None else tokens)


def run(algorithm, p, tokens=tokens_at):
    step, state = df.simulate(algorithm.step, len(p.start)), start(algorithm, p)
    xs = [flat(state.params)]
    for t in range(STEPS):
        state, _ = step(state, batch_at(p, t, tokens(t)), t)
        xs.append(flat(state.params))
    return np.stack(xs)


def built(algorithm, n=N, **options):
    options = {"weight": lambda tokens: tokens, **options}
    return algorithm(weighed, Sgd(LR), df.topology("complete", n), bucket_mb=1e-9, **options)


def all_reduce_loop(p):
    x, xs = p.start, [p.start]
    for t in range(STEPS):
        x = x - LR * np.average(p.gradients(x), axis=0, weights=tokens_at(t))
        xs.append(x)
    return np.stack(xs)


def diloco_loop(p):
    theta, phi, b, w, xs = p.start, p.start, 0.0, 0.0, [p.start]
    for t in range(STEPS):
        theta, w = theta - LR * p.gradients(theta), w + tokens_at(t)
        if (t + 1) % H == 0:
            delta = phi - np.average(theta, axis=0, weights=w)
            b, w = 0.9 * b + delta, 0.0
            theta = phi = phi - 0.7 * (delta + 0.9 * b)
        xs.append(theta)
    return np.stack(xs)


LOOPS = [(df.all_reduce, {}, all_reduce_loop), (df.diloco, {"inner_steps": H}, diloco_loop)]
each_method = pytest.mark.parametrize(("algorithm", "options", "loop"), LOOPS, ids=["all_reduce", "diloco"])


@pytest.mark.thorough
@each_method
def test_the_mean_is_weighted_by_tokens_simulated_and_on_ranks(algorithm, options, loop):
    p = problem(N, starts_equal=True)
    expected = loop(p)
    np.testing.assert_allclose(run(built(algorithm, **options), p), expected, rtol=0, atol=1e-10)
    made = built(algorithm, **options)
    first = start(made, p).params.tree()
    compiled = df.compile(made.step, backend="aot_eager")

    def train(rank):
        state = made.init(trees.map(lambda leaf: leaf[rank].clone(), first))
        for t in range(STEPS):
            state, _ = compiled(state, trees.map(lambda leaf: leaf[rank], batch_at(p, t)), t)
        return torch.cat([leaf.flatten() for leaf in trees.leaves(state.params.tree())]).numpy()

    np.testing.assert_allclose(np.stack(on_kept_ranks(N, train)), expected[-1], rtol=0, atol=1e-10)


@each_method
def test_equal_weights_of_any_size_are_no_weights(algorithm, options, loop):
    p = problem(N, starts_equal=True)
    plain = run(built(algorithm, weight=None, **options), p)
    for size in (1.0, 1000.0):
        same = run(built(algorithm, **options), p, lambda t, size=size: np.full(N, size))
        np.testing.assert_allclose(same, plain, rtol=0, atol=1e-12)


@each_method
def test_a_worker_of_weight_0_is_left_out(algorithm, options, loop):
    p = problem(N, starts_equal=True)
    others = p._replace(A=p.A[:3], b=p.b[:3], start=p.start[:3])
    without = run(built(algorithm, 3, **options), others, lambda t: tokens_at(t)[:3])
    zero = run(built(algorithm, **options), p, lambda t: tokens_at(t) * (np.arange(N) < 3))
    np.testing.assert_allclose(zero[::H, :3], without[::H], rtol=0, atol=1e-12)
    nobody = run(built(algorithm, **options), p, lambda t: np.zeros(N))
    np.testing.assert_allclose(nobody[-2 if algorithm is df.diloco else -1], p.start, atol=1e-14)


@each_method
def test_a_weight_that_cannot_be_computed_is_refused(algorithm, options, loop):
    name = algorithm.__name__
    with pytest.raises(ValueError, match=rf"{name}\(weight=3.0\): expected a function"):
        built(algorithm, weight=3.0, **options)
    with pytest.raises(ValueError, match=rf"{name}\(df.autograd\(loss_fn\), weight=...\)"):
        algorithm(df.autograd(weighed), Sgd(LR), df.topology("complete", N), weight=lambda tokens: tokens, **options)
