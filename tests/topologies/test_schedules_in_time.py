"""Schedules that change over time: few messages early, one global merge at the end, rounds in random order."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.topologies import complete, every, from_matrices, mixing_matrix, ring, shuffled, until
from tests.quadratics import Sgd, build, loss, problem, run, static_ring

N, T = 4, 12


def test_until_is_one_schedule_and_then_the_other():
    made = until(5, every(2, ring(N)), complete(N))
    for t in range(12):
        expected = every(2, ring(N)) if t < 5 else complete(N)
        assert torch.equal(mixing_matrix(made, t), mixing_matrix(expected, t))
        assert made.round(t).is_active == expected.round(t).is_active


def test_one_global_merge_at_the_end_leaves_all_workers_at_the_mean():
    p, topology = problem(N), from_matrices("given", static_ring(N))
    merged = run(df.adapt_then_combine(loss, Sgd(0.1), until(T - 1, topology, complete(N))), p, T)
    alone = run(build(df.adapt_then_combine, p, static_ring(N)), p, T)
    np.testing.assert_allclose(merged[-2], alone[-2], atol=1e-14)
    np.testing.assert_allclose(merged[-1], np.tile(alone[-1].mean(0), (N, 1)), atol=1e-14)


def test_shuffled_rounds_are_those_of_the_schedule_each_about_as_often():
    rounds = [mixing_matrix(ring(N), t) for t in range(2)]
    drawn = [mixing_matrix(shuffled(ring(N), seed=1), t) for t in range(200)]
    counts = [sum(torch.equal(one, this) for this in drawn) for one in rounds]
    assert sum(counts) == 200 and min(counts) > 70
    other = [mixing_matrix(shuffled(ring(N), seed=2), t) for t in range(200)]
    assert any(not torch.equal(one, two) for one, two in zip(drawn, other, strict=True))


def test_preconditions_say_what_to_do():
    with pytest.raises(ValueError, match=r"until.*\[4, 5\] workers"):
        until(3, ring(N), complete(5))
    with pytest.raises(ValueError, match=r"shuffled.*drawn already"):
        shuffled(df.topology("random-matching", N))
