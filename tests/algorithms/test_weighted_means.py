"""Means weighted by tokens, against float64 loops, and what a weight of 0 means."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from tests.quadratics import Problem, Sgd, flat, loss, problem, start

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


def ends_on_ranks(made, p, step, tokens):
    """`[N, DIM]` after a run of gloo ranks, whose step is compiled once, before they share it."""
    first = start(made, p).params.tree()
    starts = on_kept_ranks(N, lambda rank: made.init(trees.map(lambda leaf: leaf[rank].clone(), first)))

    def train(rank, steps=STEPS):
        state = trees.map(torch.clone, starts[rank])
        for t in range(steps):
            state, _ = step(state, trees.map(lambda leaf: leaf[rank], batch_at(p, t, tokens(t))), t)
        return torch.cat([leaf.flatten() for leaf in trees.leaves(state.params.tree())]).numpy()

    with alone_as_rank_of(N):
        train(0, 2 * H)
    return np.stack(on_kept_ranks(N, train))


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


def gossip_loop(p, matrices=None):
    """Weighted gossip, by default the mean of all in every step."""
    x, xs = p.start, [p.start]
    for t in range(STEPS):
        W = np.full((N, N), 1 / N) if matrices is None else matrices(t)
        w, y = tokens_at(t), x - LR * p.gradients(x)
        x = W @ (w[:, None] * y) / (W @ w)[:, None]
        np.testing.assert_allclose(np.average(x, axis=0, weights=W @ w), np.average(y, axis=0, weights=w))
        xs.append(x)
    return np.stack(xs)


LOOPS = [
    (df.all_reduce, {}, all_reduce_loop),
    (df.diloco, {"inner_steps": H}, diloco_loop),
    (df.adapt_then_combine, {}, gossip_loop),
]
names = ["all_reduce", "diloco", "adapt_then_combine"]
each_method = pytest.mark.parametrize(("algorithm", "options", "loop"), LOOPS, ids=names)


@pytest.mark.thorough
@each_method
def test_the_mean_is_weighted_by_tokens_simulated_and_on_ranks(algorithm, options, loop):
    p = problem(N, starts_equal=True)
    expected = loop(p)
    np.testing.assert_allclose(run(built(algorithm, **options), p), expected, rtol=0, atol=1e-10)
    made = built(algorithm, **options)
    found = ends_on_ranks(made, p, df.compile(made.step, backend="aot_eager"), tokens_at)
    np.testing.assert_allclose(found, expected[-1], rtol=0, atol=1e-10)


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
    if algorithm is df.adapt_then_combine:  # without anybody's weight workers go on alone
        return
    nobody = run(built(algorithm, **options), p, lambda t: np.zeros(N))
    np.testing.assert_allclose(nobody[-2 if algorithm is df.diloco else -1], p.start, atol=1e-14)


@pytest.mark.parametrize("algorithm", [df.all_reduce, df.diloco, df.decoupled_diloco], ids=lambda f: f.__name__)
def test_a_guarded_mean_leaves_out_a_bad_worker_and_its_weight(algorithm):
    p = problem(N, starts_equal=True)
    left = [0, 2, 3]
    options = {"all_reduce": {}, "decoupled_diloco": {"inner_steps": 1, "num_fragments": 1}}
    options = options.get(algorithm.__name__, {"inner_steps": 1})
    ends = []
    for those in (range(N), left):
        some = Problem(*(part[those] for part in p))
        guarded = df.guard(built(algorithm, len(those), **options))
        state, batch = start(guarded, some), batch_at(some, 0, tokens_at(0)[those])
        if len(those) == N:
            (batch[1] if algorithm is df.all_reduce else state.memory.phi[0])[1, 0] = np.nan
        ends.append(flat(df.simulate(guarded.step, len(those))(state, batch, 0)[0].params))
    np.testing.assert_allclose(ends[0][left], ends[1], rtol=0, atol=1e-14)


def of_masked_samples(params, batch):
    """The mean over the samples of a mask; over none of them, 0 / 0."""
    x, mask = batch
    return ((params["w"] - x) ** 2 * mask).sum() / mask.sum(), mask.sum()


AROUND = {
    "traced": lambda loss_fn: loss_fn,
    "by autograd": df.autograd,
    "scaled": df.dynamic_loss_scale,
    "scaled, by autograd": lambda loss_fn: df.dynamic_loss_scale(df.autograd(loss_fn)),
}
METHODS = {
    df.all_reduce: {},
    df.diloco: {"inner_steps": 2},
    df.adapt_then_combine: {},
    df.decoupled_diloco: {"inner_steps": 2, "num_fragments": 1},
}


@pytest.mark.thorough
@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", ["eager", "donated", "aot_eager", "ranks", "donated on ranks"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda f: f.__name__)
def test_a_worker_of_weight_0_whose_gradient_is_nan_moves_nothing(algorithm, around, mode):
    """The others go on as without it, and it takes part again, with a momentum that is finite."""
    x = torch.randn(N, 5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss_fn = around(of_masked_samples)

    def made_of(n):
        weight = lambda tokens: tokens  # noqa: E731
        return algorithm(loss_fn, df.adam(0.1), df.topology("complete", n), weight=weight, **METHODS[algorithm])

    def after(steps, mask_of_last, made, step, *, n=N, on_ranks=False):
        mask = torch.ones(n, 5, 1, dtype=torch.float64)
        first = {"w": torch.zeros(2, dtype=torch.float64)}

        def train(rank):
            state = made.init(first) if on_ranks else df.stack(made.init(first), n)
            for t in range(steps):
                mask[-1] = mask_of_last(t)
                batch = x[:n], mask.clone()
                state, metrics = step(state, tuple(part[rank] for part in batch) if on_ranks else batch, t)
            return df.params(state)["w"], metrics.loss

        rows = on_kept_ranks(n, train) if on_ranks else [train(0)]
        return [torch.stack(part) if on_ranks else part[0] for part in zip(*rows, strict=True)]

    made, others = made_of(N), made_of(N - 1)
    step, on_ranks = made.step if "ranks" in mode else df.simulate(made.step, N), "ranks" in mode
    step = df.donate(step) if "donated" in mode else df.compile(step, backend=mode) if mode == "aot_eager" else step
    with_nan, losses = after(4, lambda t: 0.0, made, step, on_ranks=on_ranks)
    assert losses.isnan().tolist() == [False] * (N - 1) + [True]
    without, _ = after(4, lambda t: 1.0, others, df.simulate(others.step, N - 1), n=N - 1)
    torch.testing.assert_close(with_nan[:-1], without, rtol=0, atol=1e-14)
    again, losses = after(8, lambda t: float(t >= 4), made, step, on_ranks=on_ranks)
    assert again.isfinite().all() and losses.isfinite().all() and not torch.equal(again[:-1], with_nan[:-1])


def test_a_worker_of_weight_0_whose_gradient_is_nan_keeps_its_buffers():
    def loss_fn(params, buffers, batch):
        loss, count = of_masked_samples(params, batch)
        return loss, ({"mean": (batch[0] * batch[1]).sum() / batch[1].sum()}, count)

    topology = df.topology("complete", 1)
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), topology, weight=lambda count: count)
    state = init({"w": torch.zeros(2)}, {"mean": torch.ones(())})
    state, _ = step(state, (torch.ones(5, 1), torch.zeros(5, 1)), 0)
    assert state.buffers["mean"] == 1 and (df.params(state)["w"] == 0).all()


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.dynamic_loss_scale], ids=["plain", "scaled"])
@pytest.mark.parametrize("wrap", [lambda algorithm: algorithm, df.guard], ids=["bare", "guarded"])
def test_a_momentum_rests_while_the_weight_is_0_and_the_gradient_nan(around, wrap):
    topology, optimizer = df.topology("complete", 1), df.sgd(0.1, momentum=0.9)
    init, step = wrap(
        df.diloco(around(of_masked_samples), optimizer, topology, inner_steps=3, weight=lambda tokens: tokens)
    )
    state, _ = step(init({"w": torch.zeros(2)}), (torch.ones(5, 1), torch.ones(5, 1)), 0)
    after, metrics = step(state, (torch.ones(5, 1), torch.zeros(5, 1)), 1)
    assert metrics.loss.isnan() and (df.params(state)["w"] != 0).any()
    torch.testing.assert_close(
        trees.leaves((after.params, after.local.opt)), trees.leaves((state.params, state.local.opt))
    )


@each_method
def test_a_weight_that_cannot_be_computed_is_refused(algorithm, options, loop):
    name = algorithm.__name__
    with pytest.raises(ValueError, match=rf"{name}\(weight=3.0\): expected a function"):
        built(algorithm, weight=3.0, **options)
    p = problem(N, starts_equal=True)
    with pytest.raises(ValueError, match=r"it returned \[2\] values; a worker's weight is one number"):
        run(built(algorithm, weight=lambda tokens: tokens.expand(2), **options), p)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
@each_method
def test_weights_are_read_from_an_aux_outside_the_graph(algorithm, options, loop, compiled):
    """With `df.autograd`, also Python numbers."""

    def loss_of_numbers(params, batch):
        found, tokens = weighed(params, batch)
        return found, {"tokens": [int(tokens), "of this step"]}

    p = problem(N, starts_equal=True)
    topology, weight = df.topology("complete", N), lambda aux: aux["tokens"][0]
    made = algorithm(df.autograd(loss_of_numbers), Sgd(LR), topology, bucket_mb=1e-9, weight=weight, **options)
    step, state = df.simulate(made.step, N), start(made, p)
    step = df.compile(step, backend="aot_eager") if compiled else step
    for t in range(5):
        state, _ = step(state, batch_at(p, t), t)
    np.testing.assert_allclose(flat(state.params), loop(p)[5], rtol=0, atol=1e-10)


def test_weighted_gossip_is_push_sum_of_a_round_and_weighted_local_sgd_between_averages():
    p, topology = problem(N, starts_equal=True), df.topology("random-matching", N)
    made = df.adapt_then_combine(weighed, Sgd(LR), topology, bucket_mb=1e-9, weight=lambda tokens: tokens)
    expected = gossip_loop(p, lambda t: df.mixing_matrix(topology, t).numpy())
    np.testing.assert_allclose(run(made, p), expected, rtol=0, atol=1e-10)
    average = df.topologies.later(H - 1, df.topologies.every(H, df.topology("complete", N)))
    local = df.adapt_then_combine(weighed, Sgd(LR), average, bucket_mb=1e-9, weight=lambda tokens: tokens)
    outer = built(df.diloco, inner_steps=H, outer_learning_rate=1.0, outer_momentum=0.0)
    np.testing.assert_allclose(run(local, p), run(outer, p), rtol=0, atol=1e-10)
    with pytest.raises(
        ValueError, match=r"adapt_then_combine\(weight=..., wire_dtype=torch.bfloat16, gossip_rounds=1\)"
    ):
        built(df.adapt_then_combine, wire_dtype=torch.bfloat16)


def test_a_worker_that_meets_nobody_keeps_its_weight_and_a_weight_of_nan_is_seen():
    p, topology = problem(3, starts_equal=True), df.topology("random-matching", 3)  # in each round, one is alone
    made = df.adapt_then_combine(weighed, Sgd(LR), topology, bucket_mb=1e-9, weight=lambda tokens: tokens)
    x, w = p.start, np.zeros(3)
    for t in range(STEPS):
        W, w, y = df.mixing_matrix(topology, t).numpy(), w + tokens_at(t, 3), x - LR * p.gradients(x)
        x = W @ (w[:, None] * y) / (W @ w)[:, None]
        w = np.where(W.diagonal() == 1, w, 0.0)
    np.testing.assert_allclose(run(made, p, lambda t: tokens_at(t, 3))[-1], x, rtol=0, atol=1e-10)
    outer = {"inner_steps": H}, {"inner_steps": H, "num_fragments": 1}
    diloco, decoupled = (built(f, 3, **o) for f, o in zip((df.diloco, df.decoupled_diloco), outer, strict=True))
    for algorithm in (made, built(df.all_reduce, 3), diloco, decoupled):
        unknown = run(algorithm, p, lambda t: np.where(np.arange(3) + t == 5, np.nan, 1.0))
        assert np.isnan(unknown[-1]).all()
