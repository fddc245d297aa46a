"""Buffers, averages over time and over workers, optimizers that see the mix, and who reads which sample."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

import decentfn as df
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.testing import problem
from decentfn.testing.ranks import on_kept_ranks

pytestmark = pytest.mark.thorough

N = 4


def batch_norm():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    module[2].weight.requires_grad_(False)
    with torch.no_grad():
        module[2].weight.mul_(1 / 3)  # a third is not exact, so averaging it would show
    return df.functional(module, nn.functional.mse_loss)


def after_steps(algorithm, steps=3, topology="static-ring", backend=None, average=False):
    params, buffers, loss_fn = batch_norm()
    built = getattr(df, algorithm)(loss_fn, df.sgd(0.05), df.topology(topology, N))
    init, step = df.average_buffers(built, overlap=False) if average else built
    state, step = df.stack(init(params, buffers), N), df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    draw = torch.Generator().manual_seed(0)
    for t in range(steps):
        x = torch.randn(N, 8, 3, generator=draw) * (1 + torch.arange(N).view(-1, 1, 1))
        state, _ = step(state, (x, x[..., :1]), t)
    return state


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_module_may_let_go_of_its_weights_once_the_state_has_them(backend):
    def trained(let_go):
        params, buffers, loss_fn = batch_norm()
        init, step = df.adapt_then_combine(loss_fn, df.sgd(0.05), df.topology("complete", 1))
        step = step if backend is None else df.compile(step, backend=backend)
        state = init(params, buffers)
        if let_go:
            params.clear()
            loss_fn.module.to("meta")
        for t in range(3):
            state, metrics = step(state, (torch.full((8, 3), t - 1.0), torch.ones(8, 1)), t)
        return trees.leaves((state.params, state.buffers, metrics.loss))

    for kept, let_go in zip(trained(False), trained(True), strict=True):
        assert torch.equal(kept, let_go)


def spread(state, name="1.running_var"):
    return state.buffers[name].std(0).max()


@pytest.mark.parametrize("algorithm", ["adapt_while_communicate", "adapt_then_combine", "all_reduce"])
def test_float_buffers_are_mixed_by_choice_and_all_others_left_alone(algorithm):
    own, mixed = after_steps(algorithm), after_steps(algorithm, average=True)
    assert spread(mixed) < 0.8 * spread(own) and spread(own) > 0.1
    assert algorithm != "all_reduce" or spread(mixed) < 1e-6
    start = batch_norm()[1]
    for state in (own, mixed):
        assert state.buffers["1.num_batches_tracked"].tolist() == [3] * N
        assert torch.equal(state.buffers["2.weight"], start["2.weight"].expand(N, 1, 5))


def test_averaging_keeps_the_mean_of_statistics_that_do_not_depend_on_parameters():
    """The first layer's inputs do not depend on x, so b⁺ = W b + Δ and b⁺ = W (b + Δ) keep mean b."""

    def loss_fn(params, buffers, batch):
        new = {"mean": 0.9 * buffers["mean"] + 0.1 * batch.mean(0)}
        return (params * batch).sum(), (new, None)

    means = []
    for algorithm, average in (
        ("adapt_while_communicate", 0),
        ("adapt_while_communicate", 1),
        ("adapt_then_combine", 2),
    ):
        built = getattr(df, algorithm)(loss_fn, df.sgd(0.1), df.topology("ring", N))
        init, step = df.average_buffers(built, overlap=average == 1) if average else built
        state, step = df.stack(init(torch.ones(3), {"mean": torch.zeros(3)}), N), df.simulate(step, N)
        for t in range(5):
            state, _ = step(state, torch.arange(N * 6.0).view(N, 2, 3) * (t + 1), t)
        means.append(df.consensus_buffers(state)["mean"])
    torch.testing.assert_close(means[1], means[0])
    torch.testing.assert_close(means[2], means[0])


def test_mixing_buffers_after_the_step_keeps_a_variance_positive_for_any_number_of_workers():
    """b⁺ = W b' has weights >= 0; b⁺ = b' + (W - I) b has 0.9 + W_ii - 1 for a worker's own b, below 0 for W_ii < 0.1."""

    def loss_fn(params, buffers, batch):
        return (params * batch).sum(), ({"var": 0.9 * buffers["var"] + 0.1 * batch.var()}, None)

    for workers, overlap, is_positive in [(16, False, True), (10, True, True), (16, True, False)]:
        algorithm = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("ring", workers))
        init, step = df.average_buffers(algorithm, overlap=overlap)
        state, step = df.stack(init(torch.ones(3), {"var": torch.ones(())}), workers), df.simulate(step, workers)
        batch = torch.tensor([-1.0, 0.0, 1.0]).repeat(workers, 1)
        outlier = torch.cat([batch[:1] * 30, batch[1:]])
        found = []
        for t in range(3):
            state, _ = step(state, batch if t else outlier, t)
            found.append(df.buffers(state)["var"].min())
        assert bool(min(found) > 0) == is_positive


def test_averaging_buffers_compiled_is_averaging_them_eagerly():
    a = after_steps("adapt_while_communicate", average=True)
    b = after_steps("adapt_while_communicate", average=True, backend="aot_eager")
    for x, y in zip(trees.leaves(a), trees.leaves(b), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def statistics(params, buffers, batch):
    """Running means of many layers, in two dtypes, and a count; they do not depend on the parameters."""
    means = {name: b + 0.1 * (batch.mean(0)[: len(b)].to(b.dtype) - b) for name, b in buffers["means"].items()}
    return (params * batch).sum(), ({"means": means, "count": buffers["count"] + 1}, None)


def running_means():
    means = {f"layer{i}": torch.full((1 + i % 3,), float(i)) for i in range(8)}
    means |= {f"wide{i}": torch.full((2,), float(i), dtype=torch.float64) for i in range(3)}
    return {"means": means, "count": torch.tensor(0)}


def falling(t):
    return 1 / (2 + t)


def averaged(algorithm, topology, steps=4, backend=None, rank=None, copies=True, **how):
    """The buffers after some steps: `[N, ...]` simulated, or those of one rank."""
    init, step = df.average_buffers(getattr(df, algorithm)(statistics, df.sgd(0.1), topology), **how)
    state = init(torch.ones(3), running_means())
    if rank is None:
        state, step = df.stack(state, N), df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    for t in range(steps):
        batch = torch.arange(N * 6.0).view(N, 2, 3).sin() * (t + 1)
        state, _ = step(state, batch if rank is None else batch[rank], t)
    return df.buffers(state) if copies else state.buffers


def averaged_on_this_rank(gamma):
    here = df.init()
    return averaged("adapt_while_communicate", df.topology("one-peer-exp", N), rank=here.rank, gamma=gamma)


@pytest.mark.parametrize(("gamma", "interpreter"), [(0.3, None), (falling, "aot_eager"), (falling, "ranks")])
def test_buffers_are_mixed_by_gamma_as_parameters_are(ranks, gamma, interpreter):
    """`b⁺ = (1 - γ) b + γ W b + (b' - b)`, here in float64."""
    topology = df.topology("one-peer-exp", N)
    if interpreter == "ranks":
        alone = ranks(N).run(averaged_on_this_rank, gamma)
        got = trees.map(lambda *leaves: torch.stack(leaves), *alone)
    else:
        got = averaged("adapt_while_communicate", topology, backend=interpreter, gamma=gamma)
    assert got["count"].tolist() == [4] * N
    for name, start in running_means()["means"].items():
        b = start.double().expand(N, -1)
        for t in range(4):
            seen = (torch.arange(N * 6.0).view(N, 2, 3).sin() * (t + 1)).double().mean(1)[:, : len(start)]
            g, W = (gamma(t) if callable(gamma) else gamma), df.mixing_matrix(topology, t)
            b = (1 - g) * b + g * W @ b + 0.1 * (seen - b)
        torch.testing.assert_close(got["means"][name].double(), b, atol=1e-6, rtol=1e-6)
        assert got["means"][name].dtype == start.dtype


@pytest.mark.parametrize("algorithm", ["adapt_while_communicate", "adapt_then_combine", "all_reduce"])
def test_buffers_travel_in_one_message_for_each_dtype(algorithm, monkeypatch):
    calls = []
    for name in ("exchange", "group_mean"):
        plain = getattr(collectives, name)
        monkeypatch.setattr(
            collectives, name, lambda x, *a, plain=plain, **k: (calls.append(x.dtype), plain(x, *a, **k))[1]
        )
    averaged(algorithm, df.topology("ring", N), steps=1)
    means = ["torch.float64" if algorithm == "all_reduce" else "torch.float32", "torch.float64"]
    assert sorted(map(str, calls)) == ["torch.float32", *means]  # parameters, and two dtypes


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def extremes(dtype):
    """Infinite, NaN, largest, smallest and inexact values, and a zero with a sign."""
    info = torch.finfo(dtype)
    values = [
        -torch.inf,
        torch.inf,
        torch.nan,
        info.min,
        info.max,
        info.tiny,
        info.smallest_normal / 4,
        -0.0,
        0.1,
        1e3 / 3,
    ]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def bits_of(x):
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


TRACED = (("static-ring", False), ("every", True))
"""Messages, and means of groups on a schedule that rests."""


@pytest.mark.parametrize(
    ("name", "overlap", "mode"),
    [
        pytest.param(*cell, mode, marks=[pytest.mark.slow] * (mode == "aot_eager" and cell not in TRACED))
        for cell in itertools.product(("static-ring", "complete", "random-matching", "every"), (True, False))
        for mode in ("eager", "donated", "aot_eager", "ranks")
    ],
)
def test_buffers_that_are_equal_on_all_workers_stay_bit_for_bit(name, overlap, mode):
    """Of any value and dtype; a third of three and of seven equal numbers adds up to another one."""
    for n in ((3,) if overlap else (7,)) if mode == "aot_eager" else (3, 7):
        topology = df.topologies.every(2, df.topology("complete", n)) if name == "every" else df.topology(name, n)
        algorithm = df.adapt_then_combine(lambda p, b, x: (p.sum(), (b, None)), df.sgd(0.0), topology)
        init, step = df.average_buffers(algorithm, overlap=overlap)
        first, start = {str(dtype): extremes(dtype) for dtype in DTYPES}, torch.tensor([-torch.inf, 0.5])

        def train(rank, n=n, init=init, step=step, first=first, start=start):
            state = init(start, first)
            if mode != "ranks":
                state, step = df.stack(state, n), df.simulate(step, n)
                step = df.donate(step) if mode == "donated" else step
                step = df.compile(step, backend=mode) if mode == "aot_eager" else step
            for t in range(3):
                state, _ = step(state, torch.zeros(()) if mode == "ranks" else torch.zeros(n), t)
            consensus = df.consensus_buffers(state), df.consensus_mean(state)
            assert all(torch.equal(bits_of(b), bits_of(first[name])) for name, b in consensus[0].items())
            assert torch.equal(consensus[1], start)
            return df.buffers(state)

        for rows in on_kept_ranks(n, train) if mode == "ranks" else [train(0)]:
            for dtype, its in zip(DTYPES, first.values(), strict=True):
                got = rows[str(dtype)]
                assert torch.equal(bits_of(got), bits_of(its.expand_as(got))), (dtype, got)


def test_an_infinite_buffer_of_one_worker_stays_and_reaches_its_neighbors():
    for name, expected in (("static-ring", [0, 1, 3]), ("complete", [0, 1, 2, 3])):
        algorithm = df.adapt_then_combine(lambda p, b, x: (p.sum(), (b, None)), df.sgd(0.1), df.topology(name, N))
        init, step = df.average_buffers(algorithm)
        state = df.stack(init(torch.ones(2), {"b": torch.zeros(())}), N)
        state.buffers["b"][0] = -torch.inf
        got = df.buffers(df.simulate(step, N)(state, torch.zeros(N), 0)[0])["b"]
        assert got.isneginf().nonzero()[:, 0].tolist() == expected and not got.isnan().any()


@pytest.mark.parametrize("algorithm", ["adapt_while_communicate", "adapt_then_combine"])
def test_averaged_buffers_have_memory_of_their_own(algorithm):
    """As a donated step needs it, although they traveled together."""
    buffers = trees.leaves(averaged(algorithm, df.topology("ring", N), steps=1, copies=False))
    assert len({b.untyped_storage().data_ptr() for b in buffers}) == len(buffers)


def test_a_buffer_without_elements_is_not_sent():
    loss_fn = lambda x, b, batch: ((x - batch).square().mean(), (b, None))  # noqa: E731
    init, step = df.average_buffers(df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("ring", 2)))
    buffers = {"empty": torch.zeros(0), "narrow": torch.ones(2, dtype=torch.bfloat16)}
    state, step = df.stack(init(torch.zeros(3), buffers), 2), df.simulate(step, 2)
    for t in range(2):
        state, _ = step(state, torch.ones(2, 3), t)
    assert {name: list(b.shape) for name, b in state.buffers.items()} == {"empty": [2, 0], "narrow": [2, 2]}


def test_averaging_no_buffers_changes_nothing():
    for algorithm in ("adapt_while_communicate", "adapt_then_combine", "all_reduce"):
        topology = df.topology("ring", N)
        init, step = df.average_buffers(getattr(df, algorithm)(lambda p, b: (p * b).sum(), df.sgd(0.1), topology))
        state, _ = df.simulate(step, N)(df.stack(init(torch.ones(3)), N), torch.ones(N, 3), 0)
        assert state.buffers is None and df.params(state).shape == (N, 3)


def test_where_buffers_cannot_be_averaged_it_says_so():
    directed = df.topology("one-peer-exp-directed", N)
    push = df.stochastic_gradient_push(lambda p, b: p.sum(), df.sgd(0.1), directed)
    column_stochastic = df.topologies.from_matrices("shares", [[[0.6, 0.3], [0.4, 0.7]]], needs_push_sum=True)
    pushed = df.stochastic_gradient_push(lambda p, b: p.sum(), df.sgd(0.1), column_stochastic)
    assert df.average_buffers(push)
    with pytest.raises(ValueError, match="once is enough"):
        df.average_buffers(df.ema(df.average_buffers(push)))
    with pytest.raises(ValueError, match=r"'shares' is column-stochastic only.*df\.consensus_buffers"):
        df.average_buffers(pushed)
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        df.average_buffers(push, gamma=1.5)


def test_on_a_column_stochastic_graph_averaging_would_drive_equal_buffers_apart():
    """Why it is refused there: b⁺ = b + (A - I) b keeps the mean, but A 1 is not 1."""
    topology = df.topologies.from_matrices("shares", [[[0.6, 0.3], [0.4, 0.7]]], needs_push_sum=True)
    A, b = df.mixing_matrix(topology, 0), torch.ones(2, dtype=torch.float64)
    for _ in range(50):
        b = b + (A - torch.eye(2)) @ b
    torch.testing.assert_close(b.mean(), torch.ones((), dtype=torch.float64))
    assert b.max() - b.min() > 0.25


def consensus_on_this_rank():
    here = df.init()
    buffers = {
        "mean": torch.tensor([float(here.rank), 1 / 3, float("-inf"), -0.0]),
        "count": torch.tensor(7 + here.rank),
    }
    init, _ = df.adapt_then_combine(lambda p, b, x: (p, (b, None)), df.sgd(0.1), df.topology("complete", here.size))
    state = init(torch.ones(2), buffers)
    return df.consensus_buffers(state)


def test_consensus_buffers_are_the_same_on_every_rank_and_equal_ones_exact(ranks):
    for got in ranks(4).run(consensus_on_this_rank):
        assert got["mean"].tolist() == [1.5, torch.tensor(1 / 3).item(), float("-inf"), 0.0] and got["count"] == 7
        assert got["mean"][3].signbit()


def test_consensus_buffers_of_a_stacked_state():
    state = after_steps("adapt_while_communicate")
    got = df.consensus_buffers(state)
    torch.testing.assert_close(got["1.running_var"], state.buffers["1.running_var"].mean(0))
    assert torch.equal(got["2.weight"], state.buffers["2.weight"][0]) and got["1.num_batches_tracked"] == 3


# -- EMA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_ema_is_torchs_and_its_consensus_the_mean_over_workers(backend):
    topology, decay = df.topology("ring", N), 0.8
    init, step = df.ema(
        df.adapt_while_communicate(lambda p, b: ((p["w"] - b) ** 2).sum(), df.sgd(0.1), topology), decay
    )
    state, step = df.stack(init({"w": torch.zeros(3)}), N), df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    parameter = nn.Parameter(torch.zeros(N, 3))
    expected = torch.optim.swa_utils.AveragedModel(
        nn.ParameterList([parameter]), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    expected.update_parameters(nn.ParameterList([parameter]))
    for t in range(6):
        state, _ = step(state, torch.arange(12.0).view(N, 3), t)
        parameter.data = df.params(state)["w"]
        expected.update_parameters(nn.ParameterList([parameter]))
    (mine,) = expected.module
    torch.testing.assert_close(df.ema_params(state)["w"], mine.data)
    torch.testing.assert_close(df.consensus_mean(df.ema_state(state))["w"], mine.data.mean(0))
    assert df.consensus_distance(df.ema_state(state)) > 0


# -- the mix as an argument --------------------------------------------------------------------------------------------


def recorder():
    """An optimizer that pulls toward what it heard and remembers whom it heard."""

    def init(params):
        return {"sources": torch.zeros(1, dtype=torch.int64)}

    def update(grads, state, params, mix):
        heard = mix.inboxes or mix.means
        pull = [0.5 * (h[0] if mix.inboxes else h) - 0.5 * x for h, x in zip(heard, params, strict=True)]
        new = {"sources": mix.sources[:1] if mix.inboxes else state["sources"] - 1}
        return df.kit.Buckets(pull, grads.plan), new

    return df.transforms.MixAware(init, update)


def test_the_state_of_an_average_has_a_copy_of_the_buffers():
    algorithm = df.ema(df.all_reduce(problem.loss_with_buffers, df.sgd(0.1), df.topology("complete", 1)))
    state = algorithm.init(problem.params(), problem.buffers(3))
    copied, own = df.ema_state(state).buffers, state.buffers
    assert copied["count"] == 3 and copied["count"] is not own["count"]
    torch.testing.assert_close(copied["means"], own["means"], rtol=0, atol=0)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_optimizer_sees_whom_it_is_mixed_with_and_what_they_said(chained, backend):
    optimizer = df.chain(df.transforms.scale(1.0), recorder()) if chained else recorder()
    loss_fn = df.dynamic_loss_scale(lambda p, b: (p * b).sum()) if chained else lambda p, b: (p * b).sum()
    topology = df.topology("one-peer-exp", N)
    init, step = df.adapt_while_communicate(loss_fn, optimizer, topology)
    state = df.stack(init(torch.zeros(2)), N)
    x = torch.tensor([[0.0, 0], [1, 10], [2, 20], [4, 40]])
    state = state._replace(params=df.kit.Buckets([x.clone()], state.params.plan))
    step = df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend, donate=False)
    for t in range(2):
        new, _ = step(state, torch.ones(N, 2), t)
        inner = new.local.opt[1] if chained else new.local.opt
        partners = inner["sources"][:, 0]
        W = df.mixing_matrix(topology, t)
        assert all(W[i, partners[i]] == 0.5 and partners[i] != i for i in range(N))
        torch.testing.assert_close(df.params(new), W.float() @ x + 0.5 * x[partners] - 0.5 * x)


def test_an_optimizer_sees_the_mean_of_its_group():
    init, step = df.adapt_while_communicate(lambda p, b: (p * b).sum(), recorder(), df.topology("complete", N))
    state = df.stack(init(torch.zeros(2)), N)
    x = torch.arange(2.0 * N).view(N, 2)
    state = state._replace(params=df.kit.Buckets([x], state.params.plan))
    new, _ = df.simulate(step, N)(state, torch.ones(N, 2), 0)
    torch.testing.assert_close(df.params(new), x.mean(0) + 0.5 * x.mean(0) - 0.5 * x)


def test_an_optimizer_that_wants_the_mix_where_there_is_none_yet_is_an_error():
    with pytest.raises(
        ValueError, match="does not show its optimizer the neighbors' messages.*adapt_while_communicate"
    ):
        df.adapt_then_combine(lambda p, b: p.sum(), recorder(), df.topology("ring", N))
    with pytest.raises(ValueError, match="sees all buckets"):
        df.transforms.by_leaf(recorder())


# -- data --------------------------------------------------------------------------------------------------------------


def test_an_epoch_shows_every_sample_once_to_one_worker_and_the_next_in_another_order():
    dealt = df.data.shards(50, num_workers=4, batch_size=3, seed=5)
    epochs = [torch.cat([dealt.stacked_at(e * 4 + k).flatten() for k in range(4)]) for e in range(2)]
    assert dealt.steps_per_epoch == 4
    assert all(epoch.unique().numel() == 48 for epoch in epochs) and not torch.equal(*epochs)
    again = df.data.shards(50, num_workers=4, batch_size=3, seed=5)
    assert torch.equal(again.batch_at(6, 2), dealt.batch_at(6, 2))
    assert not torch.equal(df.data.shards(50, 4, 3, seed=6).batch_at(6, 2), dealt.batch_at(6, 2))


def test_uneven_shards_give_every_worker_a_full_batch_in_every_step():
    parts = [torch.arange(2), torch.arange(2, 13), torch.arange(13, 100)]
    read = df.data.fixed_shards(parts, batch_size=4, seed=1)
    for worker, part in enumerate(parts):
        stream = torch.cat([read.batch_at(t, worker) for t in range(60)])
        assert stream.shape == (240,)
        counts = torch.bincount(stream, minlength=100)[part]
        assert counts.sum() == 240 and counts.max() - counts.min() <= 1


def test_a_fixed_part_is_read_in_another_order_each_time_and_by_each_worker():
    read = df.data.fixed_shards([torch.arange(20)] * 2, batch_size=20, seed=1)
    orders = [read.batch_at(t, worker).tolist() for t in range(3) for worker in range(2)]
    assert len(set(map(tuple, orders))) == 6 and {tuple(sorted(order)) for order in orders} == {tuple(range(20))}


def test_a_batch_of_indices_may_be_written_to():
    for dealt in (df.data.shards(8, 1, 8), df.data.fixed_shards([torch.arange(8)], 8)):
        before = dealt.batch_at(0, 0).clone()
        dealt.batch_at(0, 0).zero_()
        assert torch.equal(dealt.batch_at(0, 0), before)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 1000.0])
def test_dirichlet_shards_are_a_partition_more_skewed_the_smaller_alpha(alpha):
    labels = torch.arange(1000) % 10
    parts = df.data.dirichlet_shards(labels, 8, alpha, seed=3)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000)) and all(len(part) for part in parts)
    largest = torch.stack([torch.bincount(labels[p], minlength=10).max() / len(p) for p in parts]).mean()
    assert {0.05: largest > 0.5, 1.0: 0.15 < largest < 0.6, 1000.0: largest < 0.15}[alpha]


def test_names_of_classes_are_shared_out_as_their_numbers():
    numbers = torch.arange(40) % 3
    names = [["cat", "dog", "owl"][i] for i in numbers]
    for given in (names, np.array(names), np.array(names, dtype=object)):
        parts = df.data.dirichlet_shards(given, 4, 0.1, seed=3)
        assert all(map(torch.equal, parts, df.data.dirichlet_shards(numbers, 4, 0.1, seed=3)))


def test_torchs_distributed_sampler_serves_workers_too():
    data = torch.arange(16.0)
    init, step = df.all_reduce(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.5), df.topology("complete", N))
    samplers = [DistributedSampler(data, num_replicas=N, rank=i, seed=1) for i in range(N)]
    state, step = df.stack(init(torch.zeros(())), N), df.simulate(step, N)
    rows = torch.stack([data[list(sampler)] for sampler in samplers])
    state, _ = step(state, rows, 0)
    torch.testing.assert_close(df.params(state), data.mean().expand(N))


def test_numbers_without_sense_are_errors():
    for wrong, message in [
        (lambda: df.data.shards(10, 4, 3), "needs 12 samples"),
        (lambda: df.data.fixed_shards([[1], []], 2), "part 1 is tensor"),
        (lambda: df.data.fixed_shards([torch.tensor([True, False])], 2), r"mask\.nonzero"),
        (lambda: df.data.fixed_shards([[0.5, 1.5]], 2), "sample indices"),
        (lambda: df.data.dirichlet_shards([1.0, float("nan")], 2, 0.1), "labels are integers"),
        (lambda: df.data.dirichlet_shards([1, 2, 3], 2, 0.0), "α is positive"),
        (lambda: df.data.shards(10, 2, 2).batch_at(0, 2), "there are 2 workers"),
        (lambda: df.ema(lambda: None), "expected an Algorithm"),
        (lambda: df.topology(4, "ring"), r"topology\('ring', 4\)"),
        (lambda: df.mixing_matrix("ring", 0), r"mixing_matrix\(topology='ring'\): expected a topology"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_gamma_follows_the_learning_rate_inside_the_step():
    rate = df.schedules.warmup_cosine(0.1, 4, 24)
    gamma = df.schedules.gamma_from_learning_rate(rate, power=0.5, start=0.25, total=24)
    for t in (0, 5, 6, 15, 23):
        expected = 1.0 if t < 6 else float(rate(torch.tensor(t)) / 0.1) ** 0.5
        assert abs(float(gamma(torch.tensor(t))) - expected) < 1e-9
    init, step = df.adapt_while_communicate(
        lambda p, b: (p * b).sum(), df.sgd(rate), df.topology("ring", N), gamma=gamma
    )
    df.compile(df.simulate(step, N), backend="eager")(df.stack(init(torch.ones(3)), N), torch.ones(N, 3), 7)


# -- buffers in an OrderedDict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "compiled", "accumulated", "averaged"])
def test_buffers_keep_their_names_where_the_loss_returns_another_kind_of_dict(how):
    """A dict has its leaves in the order of its keys, an OrderedDict as they were put in."""

    def loss(params, buffers, batch):
        return ((params - batch) ** 2).mean(), ({"a": buffers["a"] + 100, "b": buffers["b"] + 1}, None)

    algorithm = df.adapt_while_communicate(
        df.accumulate(loss) if how == "accumulated" else loss, df.sgd(0.1), df.topology("complete", 2)
    )
    init, step = df.average_buffers(algorithm) if how == "averaged" else algorithm
    state = df.stack(init(torch.zeros(2), OrderedDict(b=torch.zeros(1), a=torch.zeros(1))), 2)
    step = df.simulate(step, 2)
    step = df.compile(step, backend="aot_eager") if how == "compiled" else step
    micro = 2 if how == "accumulated" else 1
    for t in range(3):
        state, _ = step(state, torch.zeros(2, 2, 2) if how == "accumulated" else torch.zeros(2, 2), t)
    got = df.buffers(state)
    assert got["a"].tolist() == [[300.0 * micro]] * 2 and got["b"].tolist() == [[3.0 * micro]] * 2


def test_a_loss_returns_the_buffers_that_it_was_given():
    def loss(params, buffers, batch):
        return params.sum(), ({"mean": buffers["mean"]}, None)

    init, step = df.adapt_while_communicate(loss, df.sgd(0.1), df.topology("complete", 1))
    state = init(torch.zeros(2), {"mean": torch.zeros(1), "count": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"returned buffers \['mean'\] where it was given .*'count'.*return all of them"
    ):
        step(state, torch.zeros(1), 0)
