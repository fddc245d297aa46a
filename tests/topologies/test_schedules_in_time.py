"""Schedules that change over time: few messages early, one global merge at the end, rounds in random order."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.algorithms.a2cid2 import rates
from decentfn.planning import Cluster, Link
from decentfn.planning.methods import of_schedule
from decentfn.topologies import (
    alternate,
    certificate,
    complete,
    every,
    from_matrices,
    hierarchical,
    later,
    lazy,
    lossy,
    mixing_matrix,
    nth_round,
    paused,
    pga,
    relabel,
    ring,
    shuffled,
    until,
)
from tests.quadratics import Sgd, build, loss, problem, run, static_ring
from tests.topologies.test_topologies import every_name, make

N, T = 4, 12
EYE, MEAN = np.eye(N), np.full((N, N), 1 / N)
PLACES = [2, 0, 3, 1]
MATRICES_OF_COMBINATIONS = {
    "every": (lambda s: every(2, s), lambda w, t: EYE if t % 2 else w(t // 2)),
    "later": (lambda s: later(1, s), lambda w, t: w(t - 1) if t else EYE),
    "until": (lambda s: until(6, complete(N), s), lambda w, t: MEAN if t < 6 else w(t)),
    "lazy": (lambda s: lazy(s, 0.25), lambda w, t: 0.25 * EYE + 0.75 * w(t)),
    "relabel": (lambda s: relabel(s, PLACES), lambda w, t: w(t)[np.ix_(np.argsort(PLACES), np.argsort(PLACES))]),
    "alternate": (lambda s: alternate(complete(N), s), lambda w, t: w(t // 2) if t % 2 else MEAN),
    "pga": (lambda s: pga(3, s), lambda w, t: w(t) if t % 3 else MEAN),
    "nth_round": (lambda s: nth_round(1, 2, s), lambda w, t: w(2 * t + 1)),
    "paused": (lambda s: paused(s, every(3, complete(N))), lambda w, t: w(t) if t % 3 else EYE),
    "outer": (
        lambda s: hierarchical(2 * N, local_world_size=2, outer=s),
        lambda w, t: np.kron(w(t // 2), np.eye(2)) if t % 2 else np.kron(EYE, np.full((2, 2), 0.5)),
    ),
    "inner": (
        lambda s: hierarchical(2 * N, local_world_size=N, inner=s, outer="complete"),
        lambda w, t: np.kron(np.full((2, 2), 0.5), EYE) if t % 2 else np.kron(np.eye(2), w(t // 2)),
    ),
}
"""Each combination of a schedule s, and its matrix in step t by those of s, w(t)."""


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


@pytest.mark.thorough
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


@pytest.mark.thorough
@every_name
def test_a_combination_of_a_schedule_with_a_start_has_the_matrices_of_its_definition(name):
    if (part := make(name, N)) is None:
        return

    def w_part(t):
        return mixing_matrix(part, t).numpy()

    first = until(5, part, complete(N)), lambda t: w_part(t) if t < 5 else MEAN
    idle = later(2, part), lambda t: w_part(t - 2) if t >= 2 else EYE
    for schedule, w in (first, idle):
        for combine, definition in MATRICES_OF_COMBINATIONS.values():
            made = combine(schedule)
            expected = [definition(w, t) for t in range(18)]
            for t in range(18):
                np.testing.assert_allclose(mixing_matrix(made, t), expected[t], rtol=0, atol=1e-12, err_msg=made.name)
            if made.period is not None:
                for t in range(made.start, 18 - made.period):
                    np.testing.assert_allclose(expected[t], expected[t + made.period], rtol=0, atol=1e-12)


def test_a_schedule_that_repeats_makes_the_rows_of_each_round_once():
    for made in (later(1, df.topology("one-peer-exp", 8)), until(5, ring(8), every(2, complete(8)))):
        rows = [made.rows(t, torch.device("cpu")) for t in range(made.start + 3 * made.period)]
        assert len({id(row) for row in rows}) <= made.start + made.period


@pytest.mark.parametrize("name", ["base", "static-exp", "complete"])
def test_a_schedule_with_a_start_is_measured_after_it(name):
    whole = df.topology(name, 6)
    for made in (later(2, whole), until(28, every(3, ring(6)), whole), later(1, until(4, ring(6), whole))):
        ours, expected = certificate(made), certificate(whole)
        for fact in ("steps_to_consensus", "spectral_gap", "is_connected", "payloads_per_step", "period"):
            assert getattr(ours, fact) == pytest.approx(getattr(expected, fact)), (made.name, fact)
        cluster = Cluster(6, Link(1))
        assert of_schedule(made, cluster) == pytest.approx(of_schedule(whole, cluster))


LATE = until(50, df.topology("chain", N), df.topology("static-ring", N))
TOP = df.compressors.top_k(0.5)


@pytest.mark.parametrize(
    ("build_on", "rule"),
    [
        (lambda s: df.choco_sgd(loss, Sgd(0.1), s, compressor=TOP, gamma=0.5), "differs before step"),
        (lambda s: df.beer(loss, Sgd(0.1), s, compressor=TOP, gamma=0.5), "differs before step"),
        (lambda s: df.motef(loss, Sgd(0.1), s, compressor=TOP, gamma=0.5), "differs before step"),
        (lambda s: df.extra(loss, Sgd(0.1), s), "differs before step"),
        (lambda s: df.exact_diffusion(loss, Sgd(0.1), s), "differs before step"),
        (lambda s: df.adapt_then_combine(loss, Sgd(0.1), s, gossip_rounds=2), "differs before step"),
        (lambda s: df.d2(loss, Sgd(0.1), s), "has steps that do not repeat"),
        (lambda s: df.power_gossip(loss, Sgd(0.1), s), "has steps that do not repeat"),
        (lambda s: df.relay_sgd(loss, Sgd(0.1), until(20, LATE, df.topology("chain", N))), "not one static graph"),
    ],
)
def test_a_method_for_one_matrix_or_a_period_refuses_a_schedule_with_a_start(build_on, rule):
    for schedule in (LATE, later(1, df.topology("static-ring", N))):
        with pytest.raises(ValueError, match=rule):
            build_on(schedule)


def test_a_method_judges_the_steps_before_and_after_the_start():
    bad = df.topology("one-peer-exp", 16)
    with pytest.raises(ValueError, match="disagreement grows"):
        df.decentlam(loss, Sgd(0.1), until(600, df.topology("static-ring", 16), bad))
    df.decentlam(loss, Sgd(0.1), until(5, bad, df.topology("static-ring", 16)))
    for schedule in (
        until(3, ring(N), df.topology("static-ring", N)),
        until(3, df.topology("static-ring", N), ring(N)),
    ):
        with pytest.raises(ValueError, match="pairs"):
            df.a2cid2(loss, Sgd(0.1), schedule)
    assert rates(later(3, ring(N))) == rates(ring(N))
    forgetful = from_matrices("swap", np.eye(N)[[1, 0, 3, 2]])
    with pytest.raises(ValueError, match="self-weight of 0"):
        df.stochastic_gradient_push(loss, Sgd(0.1), until(3, ring(N), forgetful), delay=1)
    with pytest.raises(ValueError, match="one way"):
        lossy(until(3, ring(N), df.topology("one-peer-exp-directed", N)), 0.1)


def test_noloco_reaches_the_exact_mean_once_its_outer_schedule_does():
    p, schedule = problem(N), until(2, df.topology("static-ring", N), complete(N))
    x = run(df.noloco(loss, Sgd(0.0), schedule, inner_steps=2, alpha=0.0, beta=1.0, gamma=1.0), p, 6)
    np.testing.assert_allclose(x[-1], np.tile(p.start.mean(0), (N, 1)), rtol=0, atol=1e-12)


def test_shuffled_draws_from_the_period():
    made = shuffled(later(3, ring(N)))
    assert all(made.round(t).is_active for t in range(20))
