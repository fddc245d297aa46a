"""`df.mix_state` against a float64 loop of DES-LOC, simulated and on ranks."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.core.buckets import Buckets
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from tests.quadratics import batch, flat, loss, problem, start, states

N, STEPS, LR, B1, B2, EPS = 4, 40, 0.05, 0.8, 0.9, 1e-3
PERIODS = {"params": 2, "mu": 3, "nu": 6}
EVERYONE = df.topology("complete", N)


def des_loc(periods=PERIODS, topology=EVERYONE):
    schedules = {name: df.topologies.every(K, topology) for name, K in periods.items()}
    algorithm = df.adapt_then_combine(loss, df.adam(LR, B1, B2, EPS), schedules.pop("params"), bucket_mb=1e-9)
    return df.mix_state(algorithm, schedules)


def loop(p):
    """Adam on every worker; after step t, each state whose period divides t is averaged."""
    x, m, v, xs = p.start, np.zeros_like(p.start), np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        g = p.gradients(x)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        x = x - LR * (m / (1 - B1 ** (t + 1))) / (np.sqrt(v / (1 - B2 ** (t + 1))) + EPS)
        x, m, v = (
            np.tile(z.mean(0), (N, 1)) if t % K == 0 else z for z, K in zip((x, m, v), PERIODS.values(), strict=True)
        )
        xs.append(x)
    return np.stack(xs)


@pytest.mark.thorough
def test_des_loc_follows_its_equation_simulated_and_on_ranks():
    p, expected = problem(N), loop(problem(N))
    history = states(des_loc(), p, STEPS)
    np.testing.assert_allclose(np.stack([flat(s.params) for s in history]), expected, rtol=0, atol=1e-10)

    built, stacked = des_loc(), start(des_loc(), p)
    compiled = df.compile(built.step, backend="aot_eager")

    starts = on_kept_ranks(N, lambda rank: built.init(trees.map(lambda leaf: leaf[rank], stacked.params.tree())))

    def train(rank):
        state = trees.map(torch.clone, starts[rank])
        for t in range(STEPS):
            state, _ = compiled(state, trees.map(lambda leaf: leaf[rank], batch(p)), t)
        return state.params.tree()

    with alone_as_rank_of(N):  # compiled once, before all run it
        train(0)
    for rank, end in enumerate(on_kept_ranks(N, train)):
        x = torch.cat([end["head"].flatten(), end["tail"]]).numpy()
        np.testing.assert_allclose(x, expected[-1, rank], rtol=0, atol=1e-10)


def test_replicas_that_average_everything_in_every_step_stay_equal():
    end = states(des_loc(dict.fromkeys(PERIODS, 1)), problem(N, starts_equal=True), 20)[-1]
    for leaf in trees.leaves((end.params, end.local.opt)):
        assert torch.equal(leaf, leaf[:1].expand_as(leaf))


def test_mixing_preserves_the_mean_of_every_mixed_part():
    p, ring = problem(N), df.topology("static-ring", N)
    alone, mixed = (
        states(df.mix_state(df.adapt_then_combine(loss, df.adam(0.0), ring), {"mu": schedule}), p, 10)[-1]
        for schedule in (df.topologies.idle(N), ring)
    )
    [(before, after)] = [(s.local.opt[0].mu, m.local.opt[0].mu) for s, m in [(alone, mixed)]]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one.mean(0), other.mean(0), rtol=0, atol=1e-14)
        assert other.std(0).max() < 0.9 * one.std(0).max()


def test_a_name_is_a_whole_field_and_a_path_its_end():
    """Of fields `mu` and `slow_mu` in both parts of `partition`, "mu" is not the other one's end."""

    class Means(NamedTuple):
        mu: Any
        slow_mu: Any

    def update(grads, state, params):
        new = Means(*(trees.map(lambda m, g: m + g, m, grads) for m in state))
        return trees.map(lambda g: -0.01 * g, grads), new

    transform = df.Transform(lambda x: Means(*(trees.map(torch.zeros_like, x) for _ in range(2))), update)
    groups = dict.fromkeys(("a", "b"), transform)
    optimizer = df.transforms.partition(groups, lambda name, shape: "a" if name == "head" else "b")
    for name, mixed in (
        ("mu", {("0", "mu"), ("1", "mu")}),
        ("1.mu", {("1", "mu")}),
        ("slow_mu", {("0", "slow_mu"), ("1", "slow_mu")}),
    ):
        algorithm = df.mix_state(df.adapt_then_combine(loss, optimizer, EVERYONE), {name: EVERYONE})
        end = states(algorithm, problem(N), 1)[-1]
        nodes = {
            tuple(path.split(".")[-2:]): node
            for path, node in trees.named_leaves(end.local.opt, Buckets)
            if isinstance(node, Buckets)
        }
        assert len(nodes) == 4
        assert {path for path, node in nodes.items() if all(torch.equal(b[0], b[1]) for b in node)} == mixed


def test_what_cannot_be_mixed_is_refused():
    algorithm = df.adapt_then_combine(loss, df.adam(LR), EVERYONE)
    with pytest.raises(ValueError, match=r"mix_state.*no 'momentum'; it has 0\.mu, 0\.nu"):
        start(df.mix_state(algorithm, {"momentum": EVERYONE}), problem(N))
    with pytest.raises(ValueError, match=r"mix_state.*has 4 workers, and 'complete' has 5"):
        df.mix_state(algorithm, {"mu": df.topology("complete", 5)})
    with pytest.raises(ValueError, match=r"mix_state\(.*pass schedules by name"):
        df.mix_state(algorithm, {})


def test_a_group_of_an_optimizer_without_parameters_has_nothing_to_mix():
    groups = {"all": df.sgd(0.1, momentum=0.9), "none": df.sgd(0.2, momentum=0.9)}
    optimizer = df.transforms.partition(groups, lambda name, shape: "all")
    algorithm = df.adapt_then_combine(lambda x, b: ((x - b) ** 2).sum(), optimizer, df.topology("complete", 2))
    init, step = df.mix_state(algorithm, {"momentum": df.topology("complete", 2)})
    state, _ = df.simulate(step, 2)(df.stack(init(torch.ones(2)), 2), torch.tensor([[0.0], [1.0]]), 0)
    torch.testing.assert_close(state.local.opt[0][0].momentum[0], torch.ones(2, 2))
