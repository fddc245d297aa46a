"""Decoupled DiLoCo against a float64 loop written from its equation, and its laws."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import on_kept_ranks
from tests.algorithms.test_weighted_means import LR, STEPS, N, batch_at, built, run, tokens_at
from tests.quadratics import Sgd, flat, loss, problem, start
from tests.quadratics import run as run_plain

H, P = 4, 2
OPTIONS = {"inner_steps": H, "num_fragments": P}
FRAGMENTS = [np.array([0, 2, 3]), np.array([1, 4])]
"""The leaves are a bucket each, of 2 and of 3 elements, cut into equal parts."""


def tokens_of(t):
    """Worker 1 trains in the first half alone, and worker 2 in every second step."""
    return tokens_at(t) * [1, t < STEPS // 2, t % 2, 1]


def is_in_time(t, worker):
    """Worker 0 is late for every second of its merges, the others at random."""
    drawn = df.draws.uniform(3, t, 0, (), worker=worker)
    return torch.where(worker == 0, t // H % 2 == 0, drawn < 0.7)


def loop(p, quorum, late=False):
    theta, phi, b = (np.array(z) for z in (p.start, p.start, np.zeros_like(p.start)))
    tokens, steps, xs = np.zeros((P, N)), np.zeros((P, N)), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        tokens, steps = tokens + tokens_of(t), steps + (tokens_of(t) > 0)
        here = np.array([not late or bool(is_in_time(torch.tensor(t), torch.tensor(i))) for i in range(N)])
        for f, mine in enumerate(FRAGMENTS):
            if (t + 1) % H == (f + 1) * H // P % H and ((steps[f] > 0) & here).sum() >= quorum:
                w = here * tokens[f] ** 2 / np.maximum(steps[f], 1)
                delta = np.average(phi[:, mine] - theta[:, mine], axis=0, weights=w)
                b[:, mine] = 0.9 * b[:, mine] + delta
                phi[:, mine] -= 0.7 * (delta + 0.9 * b[:, mine])
                theta[np.ix_(here, mine)] = phi[np.ix_(here, mine)]
                tokens[f, here], steps[f, here] = 0, 0
        xs.append(theta.copy())
    return np.stack(xs)


@pytest.mark.parametrize(("quorum", "late"), [(1, False), (4, False), (2, True)])
def test_decoupled_diloco_follows_its_equation(quorum, late):
    p = problem(N, starts_equal=True)
    made = built(df.decoupled_diloco, quorum=quorum, arrives=is_in_time if late else None, **OPTIONS)
    np.testing.assert_allclose(run(made, p, tokens_of), loop(p, quorum, late), rtol=0, atol=1e-10)


@pytest.mark.thorough
def test_ranks_are_late_as_simulated_workers_are():
    p = problem(N, starts_equal=True)
    made = built(df.decoupled_diloco, arrives=is_in_time, **OPTIONS)
    expected, first = run(made, p, tokens_at)[-1], start(made, p).params.tree()

    def train(rank):
        state = made.init(trees.map(lambda leaf: leaf[rank].clone(), first))
        for t in range(STEPS):
            state, _ = made.step(state, trees.map(lambda leaf: leaf[rank], batch_at(p, t)), t)
        return torch.cat([leaf.flatten() for leaf in trees.leaves(state.params.tree())]).numpy()

    np.testing.assert_allclose(np.stack(on_kept_ranks(N, train)), expected, rtol=0, atol=1e-10)


def test_with_equal_weights_it_is_diloco_and_in_fragments_streaming_diloco():
    p, topology = problem(N, starts_equal=True), df.topology("complete", N)

    def path(algorithm, **options):
        return run_plain(algorithm(loss, Sgd(LR), topology, inner_steps=H, bucket_mb=1e-9, **options), p, STEPS)

    np.testing.assert_allclose(path(df.decoupled_diloco, num_fragments=1), path(df.diloco), rtol=0, atol=1e-12)
    fragments = path(df.streaming_diloco, num_fragments=P, delay=0, alpha=0.0)
    np.testing.assert_allclose(path(df.decoupled_diloco, num_fragments=P), fragments, rtol=0, atol=1e-12)


def test_an_absent_worker_changes_only_the_members_of_the_mean():
    p = problem(N, starts_equal=True)
    others = p._replace(A=p.A[:3], b=p.b[:3], start=p.start[:3])
    absent = run(built(df.decoupled_diloco, **OPTIONS), p, lambda t: tokens_at(t) * (np.arange(N) < 3))
    without = run(built(df.decoupled_diloco, 3, **OPTIONS), others, lambda t: tokens_at(t)[:3])
    np.testing.assert_allclose(absent[:, :3], without, rtol=0, atol=1e-12)


def test_a_worker_without_tokens_keeps_the_error_of_what_it_sent_before():
    p = problem(N, starts_equal=True)
    made = built(df.decoupled_diloco, inner_steps=H, num_fragments=1, compressor=df.compressors.quantize(2))
    step, state = df.simulate(made.step, N), start(made, p)
    for t in range(2 * H):
        before, trains = flat(state.memory.error), np.array([1.0, 1.0, 1.0, t // H != 1])
        state, _ = step(state, batch_at(p, t, trains), t)
        if t == 2 * H - 1:
            np.testing.assert_array_equal(flat(state.memory.error)[3], before[3])
            assert np.abs(before[3]).max() > 1e-3


def test_what_is_not_shared_of_a_worker_without_tokens_is_left_out_too():
    """Its progress counts neither in the mean nor in its own outer parameters, as in `diloco`."""
    p = problem(N, starts_equal=True)
    options = {"inner_steps": H, "num_fragments": 1, "outer_momentum": 0.0, "shared": "!head"}
    made = built(df.decoupled_diloco, **options)
    step, state = df.simulate(made.step, N), start(made, p)
    for t in range(H):
        state, _ = step(state, batch_at(p, t, np.array([1.0, 1.0, 1.0, 0.0])), t)
    own = state.memory.phi.tree()["head"].reshape(N, -1).numpy()
    np.testing.assert_array_equal(own[3], p.start[3, : own.shape[1]])
    assert (np.abs(own[:3] - p.start[:3, : own.shape[1]]).max(1) > 1e-3).all()


def test_a_round_in_which_nobody_trains_is_no_bad_message_to_the_guard():
    p = problem(N, starts_equal=True)
    made = df.guard(built(df.decoupled_diloco, **OPTIONS))
    step, state = df.simulate(made.step, N), start(made, p)
    for t in range(2 * H):
        state, _ = step(state, batch_at(p, t, np.zeros(N)), t)
    assert state.local.guard.replaced.tolist() == [0] * N
    np.testing.assert_array_equal(flat(state.memory.phi), p.start)


def test_preconditions_say_what_to_do():
    with pytest.raises(ValueError, match=r"decoupled_diloco\(.*quorum=5\).*there are 4 workers"):
        built(df.decoupled_diloco, quorum=5, **OPTIONS)
    for wrong in (0.9, lambda t: t > 0):
        with pytest.raises(ValueError, match=r"decoupled_diloco\(arrives=.*\): a function \(t, worker\)"):
            built(df.decoupled_diloco, arrives=wrong, **OPTIONS)
    with pytest.raises(ValueError, match=r"num_fragments=5.*num_fragments <= inner_steps"):
        built(df.decoupled_diloco, inner_steps=4, num_fragments=5)


def test_a_late_worker_whose_parameters_are_no_numbers_moves_nobody_else():
    """It has the weight 0, and 0 times infinity is no number."""
    options = {"arrives": lambda t, worker: worker != 0, "inner_steps": 2, "num_fragments": 1}
    built = df.decoupled_diloco(lambda x, b: (b * x).sum(), df.sgd(0.1), df.topology("complete", 3), **options)
    state, step = df.stack(built.init(torch.ones(4)), 3), df.simulate(built.step, 3)
    for t in range(4):
        state, _ = step(state, torch.tensor([[torch.inf], [1.0], [3.0]]), t)
    found = df.params(state)
    assert not found[0].isfinite().any() and found[1:].isfinite().all() and (found[1:] < 1).all()
    assert torch.equal(state.memory.phi[0], state.memory.phi[0][:1].expand(3, 4))
