"""`df.resize`: 4 -> 3 -> 5 workers, for every algorithm of the contract."""

import re
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing import problem
from decentfn.testing.ranks import on_kept_ranks
from decentfn.testing.subjects import assert_close
from tests.contract import ROWS
from tests.test_examples import load

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parent.parent / "docs" / "resizing.md"
SIZES = (4, 3, 5)
F64 = torch.float64
each_row = pytest.mark.parametrize("row", ROWS)


def build(row, n, loss_fn, optimizer, **options):
    """The row's algorithm of n workers; where its topology does not have so many, on another that has."""
    subject = ROWS[row]
    try:
        topology = subject.topology(n)
    except ValueError:
        topology = df.topology("static-exp", n)
    options = {"bucket_mb": problem.BUCKET_MB, **subject.hyperparameters, **options}
    return subject.algorithm(loss_fn, optimizer, topology, **options)


def with_everything(row, n):
    """With momentum, buffers, a loss scale, an EMA and, where the algorithm takes them, averaged buffers."""
    loss_fn = df.dynamic_loss_scale(problem.loss_with_buffers, init_scale=2.0**10)
    algorithm = build(row, n, loss_fn, df.adam(0.01))
    try:
        algorithm = df.average_buffers(algorithm)
    except ValueError:
        assert "push" in row or row.startswith("asynchronous")
    return df.ema(algorithm, 0.8)


def batches(n, t):
    return problem.stacked([problem.batch(i, t) for i in range(n)])


def train(algorithm, state, steps, batch_at):
    step = df.simulate(algorithm.step, len(state.params[0]))
    for t in steps:
        state, _ = step(state, batch_at(len(state.params[0]), t), t)
    return state


def assert_same(a, b):
    for (name, x), y in zip(trees.named_leaves(a), trees.leaves(b), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name


def expected_mean(tree, n):
    """n times the mean of the rows in float64, or of integers the largest, written without the code's help."""

    def one(leaf):
        wide = leaf.double().mean(0) if leaf.is_floating_point() else leaf.amax(0)
        return torch.stack([wide.to(leaf.dtype)] * n)

    return trees.map(one, tree)


# -- every algorithm --------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@each_row
def test_every_worker_starts_from_the_mean_of_all_and_the_invariants_hold(row):
    subject = ROWS[row]
    algorithm = with_everything(row, 4)
    state = subject.start(algorithm, range(4), stacked=True, with_buffers=True)
    # Worker 1 has one update less than the others, and half their loss scale.
    state = train(algorithm, state, range(2), batches)
    targets, weight = batches(4, 2)
    weight[1] = float("inf")
    state, _ = df.simulate(algorithm.step, 4)(state, (targets, weight), 2)
    for n in SIZES[1:]:
        algorithm, old = with_everything(row, n), state
        state = df.resize(old, algorithm)
        for of in (df.params, lambda s: s.local.opt, df.ema_params, lambda s: s.buffers):
            close = zip(trees.leaves(of(state)), trees.leaves(expected_mean(of(old), n)), strict=True)
            for mine, theirs in close:
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        assert_same(state.local.scale, df.stack(trees.map(lambda x: x.amin(0), old.local.scale), n))
        places = [leaf.data_ptr() for leaf in trees.leaves(state) if leaf.numel()]
        assert len(set(places)) == len(places)  # as donation needs it
        _assert_laws(subject, algorithm, state)
        state = train(algorithm, state, range(n, n + 3), batches)
        assert all(bool(torch.isfinite(leaf).all()) for leaf in trees.leaves(df.params(state)))


def _assert_laws(subject, algorithm, state):
    """Assert that invariants have their values of a new run, and keep them with gradients."""
    inner = lambda s: s._replace(memory=s.memory.inner)  # noqa: E731
    fresh = algorithm.init(trees.map(lambda x: x[0], df.params(state)), problem.buffers())
    fresh = df.stack(fresh, len(state.params[0]))
    for law in subject.laws:
        expected = law.quantity(inner(fresh), algorithm.topology, 0)
        ends = [(7, state)]
        if law.with_gradients:  # without them, momentum goes on
            ends.append((10, train(algorithm, state, range(7, 10), batches)))
        for t, end in ends:
            for x, is_now, was in zip(
                end.params, law.quantity(inner(end), algorithm.topology, t), expected, strict=True
            ):
                bound = 60 * torch.finfo(x.dtype).eps * max(1.0, float(x.abs().max()))
                assert float((is_now - was).abs().max()) <= bound, law.name


@each_row
def test_as_many_workers_as_before_go_on_bit_for_bit(row):
    algorithm = with_everything(row, 4)
    state = ROWS[row].start(algorithm, range(4), stacked=True, with_buffers=True)
    state = train(algorithm, state, range(3), batches)
    assert_same(df.resize(state, with_everything(row, 4)), state)


@each_row
def test_a_checkpoint_of_four_workers_is_restored_as_what_resize_makes_of_them(row, tmp_path):
    four = with_everything(row, 4)
    state = ROWS[row].start(four, range(4), stacked=True, with_buffers=True)
    state = train(four, state, range(3), batches)
    df.checkpoint.save(tmp_path, state, 3)
    for n in SIZES[1:]:
        algorithm = with_everything(row, n)
        template = ROWS[row].start(algorithm, range(n), stacked=True, with_buffers=True)
        assert_same(df.checkpoint.restore(tmp_path, template).state, df.resize(state, algorithm))


NOT_OF_THE_MEAN_ALONE = (
    "asynchronous_gradient_push",
    "asynchronous_diloco",
    "stochastic_gradient_push",
    "stochastic_gradient_push, delayed",
    "push_diging",
    "quasi_global_adam",
    "demo",
    "demuon",
    "sparse_loco",
    "diloco, 4 bits",
    "streaming_diloco, 2 bits",
    "noloco, 8 bits",
    "clipped_gossip",
    "relay_sgd, models",
    "relay_sgd, gradients",
)
"""Algorithms whose mean is not a function of means: unequal weights, squares and signs, clipping, in-flight messages."""


@pytest.mark.parametrize("row", [row for row in ROWS if row not in NOT_OF_THE_MEAN_ALONE])
def test_the_mean_of_the_workers_takes_the_path_that_it_would_have_taken(row):
    """Where curvature is the same everywhere and the mean minimum stays: in the middle of outer rounds, momentum under way."""
    draw = torch.Generator().manual_seed(0)
    mean = torch.randn(5, generator=draw, dtype=F64)

    def minima(n, t):
        b = torch.randn(n, 5, generator=draw.manual_seed(n), dtype=F64)
        return b - b.mean(0) + mean

    loss_fn = lambda p, b: ((p["matrix"].reshape(-1) - b[:4]) ** 2).sum() / 2 + (p["scalar"] - b[4]) ** 2 / 2  # noqa: E731
    four, three = (build(row, n, loss_fn, df.sgd(0.1, momentum=0.5)) for n in (4, 3))
    params = {"matrix": torch.zeros(2, 2, dtype=F64), "scalar": torch.ones((), dtype=F64)}
    went_on = train(four, df.stack(four.init(params), 4), range(5), minima)
    resized = train(three, df.resize(went_on, three), range(5, 12), minima)
    went_on = train(four, went_on, range(5, 12), minima)
    for a, b in zip(trees.leaves(df.params(resized)), trees.leaves(df.params(went_on)), strict=True):
        torch.testing.assert_close(a.mean(0), b.mean(0), atol=1e-12, rtol=0)


EXACT = ("gradient_tracking", "momentum_tracking", "extra", "exact_diffusion", "d2", "push_diging")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", [row for row in ROWS if row.split(",")[0] in EXACT])
def test_exact_methods_reach_the_new_workers_optimum(row):
    """f_i(x) = ½ Σ c_i (x - b_i)², whose mean is smallest at Σ c_i b_i / Σ c_i."""

    def data(n, t=0):
        draw = torch.Generator().manual_seed(n)
        c = 0.7 + 0.6 * torch.rand(n, 3, generator=draw, dtype=F64)
        return c, 3 * torch.randn(n, 3, generator=draw, dtype=F64)

    def distance(state, n):
        c, b = data(n)
        optimum = (c * b).sum(0) / c.sum(0)
        return float((df.params(state) - optimum).abs().max())

    loss_fn = lambda x, batch: (batch[0] * (x - batch[1]) ** 2).sum() / 2  # noqa: E731
    four, t = build(row, 4, loss_fn, df.sgd(0.12)), 30
    state = train(four, df.stack(four.init(torch.zeros(3, dtype=F64)), 4), range(t), data)
    for n in SIZES[1:]:
        algorithm = build(row, n, loss_fn, df.sgd(0.12))
        state = df.resize(state, algorithm)
        assert distance(state, n) > 0.2
        state = train(algorithm, state, range(t, t + 100), data)
        assert distance(state, n) < 0.01
        t += 100


# -- as users run it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "backend"),
    [
        ("gradient_tracking, atc", "aot_eager"),
        pytest.param("choco_sgd", "aot_eager", marks=pytest.mark.slow),
        pytest.param("streaming_diloco", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_resized_state_trains_on_compiled_donated_and_on_ranks(row, backend):
    four, three = (df.ema(build(row, n, problem.loss_fn, df.sgd(0.05)), 0.8) for n in (4, 3))
    state = ROWS[row].start(four, range(4), stacked=True)
    state = df.resize(train(four, state, range(5), batches), three)
    expected = train(three, state, range(5, 9), batches)

    def on_rank(i):
        own = df.worker(state, i)
        for t in range(5, 9):
            own, _ = three.step(own, problem.batch(i, t), t)
        return own

    on_ranks = problem.stacked(on_kept_ranks(3, on_rank))
    compiled = df.compile(df.simulate(three.step, 3), backend=backend)
    for t in range(5, 9):
        state, _ = compiled(state, batches(3, t), t)
    for end in (state, on_ranks):
        assert_close(end, expected)


@pytest.mark.parametrize("row", ["noloco", "relay_sgd, models"])
def test_ranks_go_on_as_more_and_as_fewer_ranks_from_a_checkpoint(row, tmp_path):
    """4 -> 3 -> 5 gloo ranks, other buckets from the second on, against the simulator."""
    ended, t = None, 0
    for k, n in enumerate(SIZES):
        options = {"bucket_mb": 1e-4} if k else {}
        algorithm = df.ema(build(row, n, problem.loss_with_buffers, df.adam(0.01), **options), 0.8)

        def job(i, algorithm=algorithm, first=t, goes_on=k > 0):
            own = ROWS[row].start(algorithm, range(i, i + 1), stacked=False, with_buffers=True)
            if goes_on:
                own, first, *_ = df.checkpoint.restore(tmp_path, own)
            start = trees.map(torch.clone, own)
            for t in range(first, first + 3):
                own, _ = algorithm.step(own, problem.batch(i, t), t)
            df.checkpoint.save(tmp_path, own, first + 3)
            return start, own

        starts, ends = zip(*on_kept_ranks(n, job), strict=True)
        start = problem.stacked(starts)
        if ended is not None:
            assert_same(df.params(start), expected_mean(df.params(ended), n))
        ended = problem.stacked(ends)
        assert_close(ended, train(algorithm, start, range(t, t + 3), batches))
        t += 3


def test_a_worker_that_is_not_finite_does_not_spread_over_all(tmp_path):
    algorithm = alike(3)
    state = df.stack(alike(4).init(problem.params()), 4)
    state.params[0][1, 2] = float("nan")
    with pytest.raises(df.errors.NonFinite, match="give it its neighbor's"):
        df.resize(state, algorithm)
    df.checkpoint.save(tmp_path, state, 0)

    def refused(rank):
        with pytest.raises(df.errors.NonFinite, match="give it its neighbor's"):
            df.checkpoint.restore(tmp_path, algorithm.init(problem.params()))

    on_kept_ranks(3, refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_the_mean_rounded_once(dtype):
    loss_fn = lambda x, b: ((x - b) ** 2).float().sum()  # noqa: E731
    four, three = (df.diloco(loss_fn, df.adamw(0.1), df.topology("complete", n), inner_steps=4) for n in (4, 3))
    state = df.stack(four.init(torch.zeros(50, dtype=dtype)), 4)
    state = train(four, state, range(3), lambda n, t: torch.randn(n, 50, generator=torch.Generator().manual_seed(t)))
    new = df.resize(state, three)
    assert_same(df.params(new), expected_mean(df.params(state), 3))
    assert_same(new.memory, expected_mean(state.memory, 3))
    assert new.memory.phi[0].dtype == torch.float32


def test_of_integers_of_any_kind_the_largest_is_taken():
    kinds = [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.int64, torch.uint64]
    made = [df.adapt_then_combine(lambda x, b, _: (x.sum(), (b, None)), df.sgd(0.1), df.topology("ring", n)) for n in (2, 4)]  # fmt: skip
    buffers = {str(kind): torch.tensor([0, 1]).to(kind) for kind in kinds}
    state = df.stack(made[0].init(torch.ones(1), buffers), 2)
    for b in state.buffers.values():
        b[1] = torch.tensor([1, 0]).to(b.dtype)
    for kind in kinds:
        assert torch.equal(df.resize(state, made[1]).buffers[str(kind)], torch.ones(4, 2).to(kind))


def test_buffers_that_are_minus_infinity_or_equal_on_all_workers_stay_as_they_are():
    kept = {"mask": torch.full((2, 2), float("-inf")), "frozen": torch.rand(9), "on": torch.tensor([True, False])}
    loss_fn = lambda x, buffers, b: (((x - b) ** 2).sum(), (buffers, None))  # noqa: E731
    one, three = (df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", n)) for n in (7, 3))
    new = df.resize(df.stack(one.init(torch.zeros(3), kept), 7), three)
    assert_same(df.buffers(new), df.stack(kept, 3))


# -- what is refused --------------------------------------------------------------------------------------------------


def alike(n, optimizer=None, **options):
    return df.diloco(problem.loss_fn, optimizer or df.sgd(0.1), df.topology("complete", n), inner_steps=3, **options)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: alike(3, df.adam(0.1)), r"holds .* where the algorithm lays out local.opt"),
        (lambda: alike(3, bucket_mb=1e-6), r"holds bucket 0 .*the options"),
        (lambda: df.ema(alike(3)), "where the algorithm lays out"),
        (lambda: alike(4, df.adam(0.1)), "where the algorithm lays out"),
    ],
    ids=["another optimizer", "other buckets", "another wrapper", "as many workers, another optimizer"],
)
def test_a_state_of_another_algorithm_is_refused(other, said):
    state = df.stack(alike(4).init(problem.params()), 4)
    with pytest.raises(ValueError, match=said):
        df.resize(state, other())


def test_what_is_no_stacked_state_or_no_algorithm_is_refused():
    algorithm = alike(3)
    state = algorithm.init(problem.params())
    with pytest.raises(ValueError, match=r"one worker's; stack it, df.resize\(df.stack\(state, 1\)"):
        df.resize(state, algorithm)
    with pytest.raises(ValueError, match="expected an Algorithm"):
        df.resize(df.stack(state, 3), algorithm.step)
    nameless = df.Algorithm(algorithm.init, lambda *given: algorithm.step(*given))
    with pytest.raises(ValueError, match="how many workers"):
        df.resize(df.stack(state, 3), nameless)


def test_processes_are_sent_to_a_checkpoint():
    def refused(rank):
        algorithm = alike(2)
        with pytest.raises(ValueError, match="2 processes each hold a part.*checkpoint"):
            df.resize(df.stack(algorithm.init(problem.params()), 1), algorithm)

    on_kept_ranks(2, refused)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_of_every_algorithm_what_is_kept_and_what_starts_anew():
    lines = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| [^|]{10,} \|$", PAGE.read_text(encoding="utf-8"), re.M)
    said = {name: tuple(set(re.findall(r"`(\w+)`", cell)) for cell in cells) for name, *cells in lines}
    assert sorted(name for name, *_ in lines) == sorted(df.algorithms.__all__)
    for row in ROWS:
        memory = build(row, 4, problem.loss_fn, df.sgd(0.1)).init(problem.params()).memory
        averaged = set(getattr(memory, "averaged", ()))
        assert said[row.split(",")[0]] == (averaged, set(getattr(memory, "_fields", ())) - averaged), row


def test_the_pages_code_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.slow
def test_the_accuracy_on_digits_stays_within_a_point():
    """examples/digits.py: 300 steps of 4 workers, or 100 of 4, 100 of 3 and 100 of 5, every worker with few of the labels."""
    digits = load("digits")
    data = digits.load_digits()
    images, labels = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    known, held_out = digits.train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    rows = torch.tensor(known)[labels[known].argsort(stable=True)]

    def accuracy(sizes, seed):
        draw, state, t = torch.Generator().manual_seed(seed), None, 0
        params = {"w1": torch.randn(64, 64, generator=draw) / 8, "b1": torch.zeros(64)}
        params |= {"w2": torch.randn(64, 10, generator=draw) / 8, "b2": torch.zeros(10)}
        for n in sizes:
            shards = df.data.fixed_shards(rows.tensor_split(n), batch_size=32, seed=seed)
            optimizer, topology = df.sgd(0.1, momentum=0.9), df.topology("base", n)
            algorithm = df.adapt_while_communicate(digits.loss_fn, optimizer, topology)
            state = df.resize(state, algorithm) if state else df.stack(algorithm.init(params), n)
            seen = lambda n, t, shards=shards: trees.map(lambda x: x[shards.stacked_at(t)], (images, labels))  # noqa: E731
            steps = range(t, t + 300 // len(sizes))
            state, t = train(algorithm, state, steps, seen), steps.stop
        guessed = digits.predict(df.consensus_mean(state), images[held_out]).argmax(1)
        return float((guessed == labels[held_out]).double().mean())

    stayed, resized = ([accuracy(sizes, seed) for seed in range(5)] for sizes in ((4,), SIZES))
    print(f"held-out accuracy, five seeds: 4 workers {stayed}, 4 -> 3 -> 5 {resized}")
    assert abs(sum(stayed) - sum(resized)) / 5 < 0.01


@pytest.mark.parametrize("what", ["moment", "buffer"])
def test_one_workers_bad_moments_or_buffers_are_refused_and_not_spread(what):
    def build(n):
        return df.adapt_while_communicate(
            lambda p, b, x: (((p - x) ** 2).sum(), (b, None)),
            df.adam(0.1),
            df.topology("static-ring", n),
        )

    state = df.stack(build(4).init(torch.zeros(3), {"v": torch.zeros(2)}), 4)
    leaf = state.buffers["v"] if what == "buffer" else state.local.opt[0].nu[0]
    leaf[1, 0] = float("inf")
    with pytest.raises(df.errors.NonFinite, match="buffers.v" if what == "buffer" else "nu.0"):
        df.resize(state, build(3))
