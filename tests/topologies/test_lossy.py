"""Schedules that lose links: each round against its equation, conserved means, and ranks against the simulator."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.core import draws
from decentfn.testing import on_ranks
from decentfn.topologies import certificate, cut, from_matrices, lossy, mixing_matrix
from tests.quadratics import Sgd, flat, loss, problem, random_column_stochastic, random_symmetric, states

N = 6
UNDIRECTED = {
    "static-ring": lambda: df.topology("static-ring", N),
    "base": lambda: df.topology("base", N),
    "random-matching": lambda: df.topology("random-matching", N, seed=3),
    "weighted": lambda: from_matrices("weighted", random_symmetric(N, 3, seed=1)),
}
DIRECTED = {
    "directed": lambda: df.topology("one-peer-exp-directed", N),
    "columns": lambda: from_matrices("columns", random_column_stochastic(N, 2, seed=4), needs_push_sum=True),
}
undirected = st.sampled_from(sorted(UNDIRECTED)).map(lambda name: UNDIRECTED[name]())
schedules = st.sampled_from(sorted(UNDIRECTED | DIRECTED)).map(lambda name: (UNDIRECTED | DIRECTED)[name]())
some_steps = st.integers(0, 200)
seeds = st.integers(0, 2**31 - 1)


def drawn_mask(seed):
    return lambda t: draws.uniform(seed, t, 0, (N, N)) < 0.4


def by_the_equation(w, lost):
    """The sender keeps what is lost."""
    lost = np.asarray(lost) & ~np.eye(N, dtype=bool)
    w = np.asarray(w)
    return w * ~lost + np.diag((w * lost).sum(0))


@given(part=schedules, seed=seeds, t=some_steps)
def test_cut_is_the_schedule_without_the_named_messages(part, seed, t):
    lost, made = drawn_mask(seed), cut(part, drawn_mask(seed), both_ways=False)
    w = mixing_matrix(made, t).numpy()
    np.testing.assert_allclose(w, by_the_equation(mixing_matrix(part, t), lost(t)), rtol=0, atol=1e-15)
    np.testing.assert_allclose(w.sum(0), 1, rtol=0, atol=1e-12)
    this = made.round(t)
    told = {(int(i), j) for j in range(N) for i in this.destinations[j] if i >= 0}
    heard = {(i, int(j)) for i in range(N) for j in this.sources[i] if j >= 0}
    assert told == heard and not any(lost(t)[i, j] for i, j in told)
    assert made.needs_push_sum


@given(part=undirected, seed=seeds, t=some_steps)
def test_links_lost_both_ways_leave_a_symmetric_schedule_doubly_stochastic(part, seed, t):
    made = cut(part, drawn_mask(seed))
    mask = drawn_mask(seed)(t)
    w = mixing_matrix(made, t)
    np.testing.assert_allclose(w, by_the_equation(mixing_matrix(part, t), mask | mask.T), rtol=0, atol=1e-15)
    np.testing.assert_allclose(w.sum(1), 1, rtol=0, atol=1e-12)
    torch.testing.assert_close(w, w.T, rtol=0, atol=0)


@given(part=undirected, probability=st.floats(0, 1), seed=seeds, t=some_steps)
def test_lossy_loses_whole_links_and_stays_doubly_stochastic(part, probability, seed, t):
    whole, w = mixing_matrix(part, t), mixing_matrix(lossy(part, probability, seed=seed), t)
    np.testing.assert_allclose(w, by_the_equation(whole, (w == 0) & (whole > 0)), rtol=0, atol=1e-15)
    np.testing.assert_allclose(w.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(w.sum(0), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("both_ways", [True, False])
def test_as_many_links_are_lost_as_the_probability_says(both_ways):
    made = lossy(df.topology("static-ring", N), 0.3, both_ways=both_ways, seed=5)
    lost = torch.stack([mixing_matrix(made, t) == 0 for t in range(300)])
    ring = torch.arange(N), (torch.arange(N) + 1) % N
    there, back = lost[:, ring[0], ring[1]].float(), lost[:, ring[1], ring[0]].float()
    assert abs(there.mean() - 0.3) < 0.04 and abs(back.mean() - 0.3) < 0.04
    assert abs((there * back).mean() - (0.3 if both_ways else 0.09)) < 0.04
    neighbors = (there[:, 0] * there[:, 1]).mean()  # different links are lost independently, and so are steps
    assert abs(neighbors - 0.09) < 0.04 and abs((there[1:] * there[:-1]).mean() - 0.09) < 0.04


def test_a_worker_that_is_away_trains_alone_and_comes_back():
    p = problem(N)

    def away(t):
        lost = torch.zeros(N, N, dtype=torch.bool)
        lost[2] = t < 10
        return lost

    topology = cut(df.topology("static-ring", N), away)
    algorithm = df.adapt_then_combine(loss, Sgd(0.0), topology, bucket_mb=1e-9)
    x = [flat(state.params) for state in states(algorithm, p, 70)]
    assert (x[10][2] == p.start[2]).all() and not (x[11][2] == p.start[2]).any()
    np.testing.assert_allclose(x[-1], np.tile(p.start.mean(0), (N, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["base", "directed", "columns"])
def test_push_sum_finds_the_mean_although_messages_are_lost(name):
    p, topology = problem(N), lossy((UNDIRECTED | DIRECTED)[name](), 0.3, both_ways=False, seed=1)
    algorithm = df.stochastic_gradient_push(loss, Sgd(0.0), topology, bucket_mb=1e-9)
    history = states(algorithm, p, 80)
    for state in history:
        w = state.memory.weight.numpy()
        assert w.sum() == pytest.approx(N, abs=1e-12)
        mass = (w[:, None] * flat(state.params)).sum(0)
        np.testing.assert_allclose(mass, p.start.sum(0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(flat(history[-1].params), np.tile(p.start.mean(0), (N, 1)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "topology"),
    [
        (df.adapt_while_communicate, lambda: lossy(df.topology("static-ring", 4), 0.4)),
        (df.stochastic_gradient_push, lambda: lossy(df.topology("one-peer-exp-directed", 4), 0.4, both_ways=False)),
    ],
)
def test_the_same_messages_are_lost_on_ranks(build, topology):
    def train(step, state, batches):
        for t, batch in enumerate(batches):
            state, _ = step(state, batch, t)
        return state.params[0]

    def algorithm():
        return build(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1), topology())

    batches = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    init, step = algorithm()
    simulated = train(df.simulate(step, 4), df.stack(init(torch.zeros(3)), 4), batches)

    def on_this_rank(rank):
        init, step = algorithm()
        return train(step, init(torch.zeros(3)), batches[:, rank])

    assert torch.equal(torch.stack(on_ranks(4, on_this_rank)), simulated)


def test_certificates_count_what_is_sent():
    whole, facts = (certificate(x) for x in (df.topology("static-ring", 8), lossy(df.topology("static-ring", 8), 0.5)))
    assert facts.messages_per_step == pytest.approx(whole.messages_per_step / 2, rel=0.1)
    assert facts.is_connected and facts.expected_contraction > (1 - whole.spectral_gap) ** 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lossy(df.topology("complete", 4), 0.1), "lossy.* has no links to lose"),
        (lambda: lossy(df.topology("ring", 4), 1.1), r"lossy\(probability=1.1\)"),
        (lambda: lossy(df.topology("one-peer-exp-directed", 4), 0.1), "one way.*both_ways=False"),
        (lambda: cut(df.topology("ring", 4), 0.1), r"cut\(lost=0.1\): lost is a function"),
        (lambda: cut(df.topology("ring", 4), lambda t: torch.zeros(4, 4)), r"cut.*is \[4, 4\] bool"),
        (lambda: cut(df.topology("ring", 4), lambda t: torch.rand(4, 4) < 0.5), "differ when drawn twice"),
    ],
)
def test_what_cannot_be_lost_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.thorough
def test_a_share_of_the_workers_drawn_by_the_seed_and_the_step_takes_part():
    """Those outside the draw mix with nobody, all matrices are doubly stochastic, and K-GT still nears the optimum."""

    def outside(t):
        is_out = df.draws.uniform(3, torch.tensor(t), 0, (N,)).argsort() >= N // 2
        return is_out[:, None].expand(N, N).clone()

    topology = cut(df.topology("static-ring", N), outside)
    for t in range(20):
        w, is_out = mixing_matrix(topology, t), outside(t)[:, 0]
        assert int(is_out.sum()) == N - N // 2
        assert torch.equal(w[is_out], torch.eye(N, dtype=w.dtype)[is_out])
        torch.testing.assert_close(w.sum(0), torch.ones(N, dtype=w.dtype))
        torch.testing.assert_close(w.sum(1), torch.ones(N, dtype=w.dtype))
    centers = torch.arange(N, dtype=torch.float64)[:, None]
    init, step = df.k_gt(lambda x, c: ((x - c) ** 2).sum() / 2, df.sgd(0.05), topology, inner_steps=3)
    state, run = df.stack(init(torch.zeros(1, dtype=torch.float64)), N), df.simulate(step, N)
    for t in range(900):
        state, _ = run(state, centers, t)
    torch.testing.assert_close(df.params(state), torch.full_like(df.params(state), (N - 1) / 2), rtol=0, atol=0.02)
