"""The guard against values that are infinite or NaN: nothing of them is sent, and nobody is pulled by what stands in their place."""

from functools import partial

import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import operators
from decentfn.core import trees
from decentfn.testing import problem
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from decentfn.testing.subjects import assert_close
from tests import bad_values, contract
from tests.bad_values import NAN_PARAMETER, STEPS, N
from tests.quadratics import random_column_stochastic

pytestmark = pytest.mark.thorough

NAN = float("nan")


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_bad_value_stays_with_its_worker_and_the_page_says_what_becomes_of_it(row):
    history, metrics = bad_values.run(row)
    healthy = torch.tensor([True, False, True, True])
    assert all(bad_values.finite(state)[healthy].all() for state in history)
    said = next(line for line in bad_values.lines_of_page() if line.startswith(f"| `{row}` |"))
    assert bad_values.line(row, history) == said
    mended = bad_values.MENDED.get(row) != "not repaired"
    takes_the_mended = row.startswith(("beer", "motef", "asynchronous"))  # they mend the parameters before the gradient
    late = sum(not bad_values.finite(state)[1] for state in history[:-1])  # until all are drawn
    skipped = 2 - takes_the_mended + late if mended else 1 + STEPS - NAN_PARAMETER
    assert metrics.guard.skipped.tolist() == [0, skipped, 1, 1]
    assert metrics.guard.replaced[1] >= mended and metrics.guard.replaced[[0, 3]].sum() == 0
    if mended:
        leaves = [leaf for leaf in trees.leaves(history[-1]) if leaf.is_floating_point()]
        assert all(torch.isfinite(leaf).all() for leaf in leaves)


ON_RANKS = {
    "adapt_while_communicate": "inductor",
    "all_reduce": "inductor",
    "d2": "aot_eager",
    "stochastic_gradient_push, delayed": "aot_eager",
    "deep_squeeze": "aot_eager",
    "power_gossip": "aot_eager",
    "relay_sgd, models": "aot_eager",
    "streaming_diloco": "aot_eager",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", ON_RANKS)
def test_on_ranks_nothing_bad_leaves_and_all_is_as_the_simulator_says(row, compiled, monkeypatch):
    """Looked at where the process group gets it; compiled with the state donated."""
    subject, finite = contract.ROWS[row], []
    algorithm = df.guard(subject.build())
    send, reduce = operators.send, operators.reduce

    def watched_send(here, call, peers, x, slots):
        finite.append(bool(x.isfinite().all()))
        return send(here, call, peers, x, slots)

    def watched_reduce(here, call, x, own, ranks):
        finite.append(bool(x.isfinite().all()))
        return reduce(here, call, x, own, ranks)

    monkeypatch.setattr(operators, "send", watched_send)
    monkeypatch.setattr(operators, "reduce", watched_reduce)
    step = df.compile(algorithm.step, backend=ON_RANKS[row]) if compiled else algorithm.step

    def start(rank):
        return subject.start(algorithm, range(rank, rank + 1), stacked=False)

    def train(rank):
        state = start(rank)
        for t in range(STEPS):
            state = bad_values.spoilt(state, t, torch.tensor([rank]))
            state, _ = step(state, bad_values.batch(rank, t), t)
        return state.params

    if compiled:
        state = on_kept_ranks(N, start)[0]
        with alone_as_rank_of(N):
            step(state, bad_values.batch(0, 0), 0)
    history, _ = bad_values.run(row)
    for rank, params in enumerate(on_kept_ranks(N, train)):
        for mine, theirs in zip(params, history[-1].params, strict=True):
            torch.testing.assert_close(mine, theirs[rank], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert len(finite) >= N * STEPS and all(finite)


def without(w, bad):
    """The mixing matrix among good workers, and what the bad one hears, written from the rule."""
    w, good = w.clone(), [i for i in range(len(w)) if i != bad]
    for i in good:
        w[i, i], w[i, bad] = w[i, i] + w[i, bad], 0
    w[bad, bad] = 0
    w[bad] /= w[bad].sum()
    return w


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("topology", ["static-ring", "one-peer-exp-directed", "random-matching"])
def test_neighbors_keep_the_weight_of_a_bad_worker_which_takes_theirs(topology, wire):
    schedule = df.topology(topology, N)
    # By one step of size 0; every value is a bfloat16 number. What one worker takes from another, of 2.5 / 3 or less, has 8 bits.
    algorithm = df.guard(df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.0), schedule, wire_dtype=wire))
    x = torch.arange(N * 5.0).view(N, 5) / 4
    state = problem.stacked([algorithm.init(row) for row in x])
    state.params[0][1, 2] = NAN
    clean = x.clone()
    clean[1] = 0
    new, metrics = df.simulate(algorithm.step, N)(state, torch.ones(N, 5), 0)
    expected = without(df.mixing_matrix(schedule, 0), 1) @ clean.double()
    atol = 1e-6 if wire is None else 2.0**-9
    torch.testing.assert_close(df.params(new).double(), expected, atol=atol, rtol=0)
    assert metrics.guard.replaced.tolist() == [0, 1, 0, 0]


def test_a_mean_over_a_group_is_that_of_its_good_members():
    algorithm = df.guard(df.adapt_then_combine(lambda p, b: (p * b).sum(), df.sgd(0.0), df.topology("complete", N)))
    state = problem.stacked([algorithm.init(torch.full((3,), float(i))) for i in range(N)])
    state.params[0][1, 0] = float("inf")
    new, _ = df.simulate(algorithm.step, N)(state, torch.ones(N, 3), 0)
    torch.testing.assert_close(df.params(new), torch.full((N, 3), 5 / 3))


def test_what_a_narrow_wire_would_make_infinite_does_not_travel():
    options = {"wire_dtype": torch.float16}
    algorithm = df.guard(
        df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.0), df.topology("static-ring", N), **options)
    )
    state = problem.stacked([algorithm.init(torch.full((3,), 1e6 if i == 1 else 1.0)) for i in range(N)])
    new, metrics = df.simulate(algorithm.step, N)(state, torch.ones(N, 3), 0)
    assert (df.params(new) == 1).all() and metrics.guard.replaced.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("around", ["scaled", "accumulated", "autograd", "ema", "buffers"])
def test_it_goes_with_the_other_features(around):
    losses = {"scaled": df.dynamic_loss_scale, "accumulated": df.accumulate, "autograd": df.autograd}
    plain = problem.loss_with_buffers if around == "buffers" else problem.loss_fn
    loss_fn = losses.get(around, lambda f: f)(plain)
    subject = contract.ROWS["adapt_while_communicate"]
    algorithm = subject.build(loss_fn=loss_fn)
    if around == "buffers":
        algorithm = df.average_buffers(algorithm)
    guarded = df.ema(df.guard(df.ema(algorithm, 0.5)), 0.5) if around == "ema" else df.guard(algorithm)
    state = subject.start(guarded, range(N), stacked=True, with_buffers=around == "buffers")
    step = df.simulate(guarded.step, N)
    for t in range(NAN_PARAMETER + 3):
        state = bad_values.spoilt(state, t, torch.arange(N))
        rows = [bad_values.batch(i, t) for i in range(N)]
        batch = problem.stacked(rows)
        batch = trees.map(lambda x: x.unflatten(1, (2, 2)), batch) if around == "accumulated" else batch
        state, metrics = step(state, batch, t)
    assert all(torch.isfinite(leaf).all() for leaf in trees.leaves(state) if leaf.is_floating_point())
    assert metrics.guard.skipped.tolist() == [0, 2, 1, 0]


def is_never_good(w, b):
    return (w * b).sum()


@pytest.mark.parametrize("how", ["eager", "simulated", "compiled"])
def test_after_so_many_bad_steps_in_a_row_it_is_raised_which_worker_and_step(how):
    n = 1 if how == "eager" else 2
    algorithm = df.guard(df.all_reduce(is_never_good, df.sgd(0.1), df.topology("complete", n)), limit=3)
    state, step = algorithm.init(torch.ones(3)), algorithm.step
    batches = torch.ones(6, n, 3)
    batches[0, -1] = batches[2:, -1] = NAN
    if how == "eager":
        batches = batches[:, 0]
    else:
        state, step = df.stack(state, n), df.simulate(step, n)
    step = df.compile(step, backend="eager") if how == "compiled" else step
    for t in range(4):
        state, metrics = step(state, batches[t], t)
    assert metrics.guard.in_a_row.view(-1)[-1] == 2
    with pytest.raises(
        df.errors.NonFinite, match=rf"worker {n - 1} has .* in 3 steps in a row, the last at t=4"
    ) as raised:
        step(state, batches[4], 4)
    assert (raised.value.worker, raised.value.process, raised.value.step) == (n - 1, 0, 4)


def test_what_is_no_algorithm_or_guarded_already_or_never_guarded_is_refused():
    algorithm = df.all_reduce(is_never_good, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"guard\(.*expected an Algorithm"):
        df.guard(is_never_good)
    with pytest.raises(ValueError, match="guarded already"):
        df.guard(df.guard(algorithm))
    with pytest.raises(ValueError, match=r"guard\(limit=0\)"):
        df.guard(algorithm, limit=0)
    with pytest.raises(ValueError, match="is not guarded"):
        df.guard(algorithm).step(algorithm.init(torch.ones(2)), torch.ones(2), 0)


@pytest.mark.parametrize(
    "row", ["adapt_while_communicate", "all_reduce", "d2", "deep_squeeze", "push_diging", "slowmo"]
)
def test_with_nothing_bad_the_state_is_bit_for_bit_that_without_the_guard(row):
    subject, ends = contract.ROWS[row], []
    for wrap in (df.guard, lambda algorithm: algorithm):
        algorithm = wrap(subject.build())
        state, step = subject.start(algorithm, range(N), stacked=True), df.simulate(algorithm.step, N)
        for t in range(4):
            state, _ = step(state, problem.stacked([problem.batch(i, t) for i in range(N)]), t)
        ends.append(trees.leaves(state._replace(local=state.local._replace(guard=None))))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


def with_a_buffer(p, buffers, b):
    return ((p["w"] - 1) ** 2).sum(), ({"f": buffers["f"] + b, "c": buffers["c"] + b}, None)


@pytest.mark.parametrize("name", ["adapt_while_communicate", "all_reduce", "gradient_tracking"])
def test_what_a_loss_makes_bad_beside_its_gradient_is_counted_and_raised(name):
    buffers = {"f": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex64)}
    algorithm = df.guard(getattr(df, name)(with_a_buffer, df.sgd(0.1), df.topology("static-ring", N)), limit=3)
    state, step = df.stack(algorithm.init({"w": torch.zeros(2)}, buffers), N), df.simulate(algorithm.step, N)
    batch = torch.zeros(N, 2)
    for t in range(2):
        batch[1] = NAN
        state, metrics = step(state, batch, t)
    assert metrics.guard.skipped.tolist() == [0, 2, 0, 0]
    assert all(x.isfinite().all() for x in trees.leaves((state.params, state.buffers)))
    with pytest.raises(df.errors.NonFinite) as caught:
        step(state, batch, 2)
    assert (caught.value.worker, caught.value.step, caught.value.next_step) == (1, 2, 2)
    with pytest.raises(df.errors.NonFinite) as caught:
        df.donate(step)(state, batch, 2)
    assert caught.value.next_step == 3  # the state has been written over


def test_a_mask_of_infinite_values_is_no_bad_buffer():
    def loss_fn(p, buffers, b):
        return (p["w"] * b).sum(), (buffers, None)

    init, step = df.guard(df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1)), limit=1)
    state, metrics = step(init({"w": torch.zeros(2)}, {"mask": torch.tensor([0.0, -torch.inf])}), torch.ones(2), 0)
    assert metrics.guard.skipped == 0 and state.buffers["mask"][1] == -torch.inf


def test_memory_that_would_become_bad_stays_and_what_was_bad_before_starts_again():
    init, step = df.guard(df.diloco(is_never_good, df.sgd(1e38), df.topology("complete", 1), inner_steps=1))
    state = init(torch.ones(3))
    state.memory.b[0].copy_(torch.tensor([0.0, 3.4e38, NAN]))
    state, _ = step(state, torch.ones(3), 0)
    assert state.memory.b[0].tolist() == pytest.approx([1e38, 3.4e38, 0.0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("row", "with_buffers"),
    [("adapt_while_communicate", True), ("all_reduce", False), ("gradient_tracking, atc", True)],
)
def test_accumulated_simulated_and_compiled_it_counts_what_it_counts_eager(row, with_buffers):
    loss_fn = problem.loss_with_buffers if with_buffers else problem.loss_fn
    subject = contract.ROWS[row]
    algorithm = df.guard(subject.build(loss_fn=df.accumulate(loss_fn)))
    step, ends = df.simulate(algorithm.step, N), []
    for run in (step, df.compile(step, backend="aot_eager")):
        state = subject.start(algorithm, range(N), stacked=True, with_buffers=with_buffers)
        for t in range(3):
            batch = problem.stacked([problem.batch(i, t) for i in range(N)])
            batch[1][1] = NAN if t == 1 else 1.0  # the weights of worker 1's samples
            state, metrics = run(state, trees.map(lambda x: x.unflatten(1, (2, 2)), batch), t)
        ends.append((state, metrics.guard))
    (eager, counts), (compiled, its_counts) = ends
    assert_close(compiled, eager)
    assert counts.skipped.tolist() == its_counts.skipped.tolist() == [0, 1, 0, 0]
    assert counts.replaced.tolist() == its_counts.replaced.tolist()


@pytest.mark.parametrize("name", ["adapt_while_communicate", "all_reduce"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_in_which_all_gradients_are_bad_is_none_for_the_optimizer(name, scaled):
    loss_fn = df.dynamic_loss_scale(is_never_good, 2.0) if scaled else is_never_good
    algorithm = df.guard(getattr(df, name)(loss_fn, df.adam(0.1), df.topology("complete", N)))
    state, step = df.stack(algorithm.init(torch.zeros(3)), N), df.simulate(algorithm.step, N)
    for t in range(5):
        state, metrics = step(state, torch.full((N, 3), NAN), t)
    assert metrics.guard.skipped.tolist() == [5] * N
    state, _ = step(state, torch.ones(N, 3), 5)
    torch.testing.assert_close(df.params(state), torch.full((N, 3), -0.1))  # Adam's first step


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_whose_norm_is_no_number_is_bad_with_a_scaled_loss_too(scaled):
    loss_fn = df.dynamic_loss_scale(is_never_good, 2.0) if scaled else is_never_good
    algorithm = df.guard(df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("static-ring", N)))
    state, step = df.stack(algorithm.init(torch.zeros(3)), N), df.simulate(algorithm.step, N)
    state, metrics = step(state, torch.tensor([1.0, 1.0, 3e30, 1.0]).view(N, 1).expand(N, 3), 0)
    assert metrics.guard.skipped.tolist() == [0, 0, 1, 0] and metrics.grad_norm[2] == float("inf")
    assert df.params(state).abs().max() <= 0.1


def test_where_gradients_are_averaged_large_finite_ones_are_an_update():
    algorithm = df.guard(df.all_reduce(is_never_good, df.sgd(1e-30), df.topology("complete", N)))
    state, step = df.stack(algorithm.init(torch.zeros(3)), N), df.simulate(algorithm.step, N)
    state, metrics = step(state, torch.full((N, 3), 3e30), 0)
    assert metrics.guard.skipped.tolist() == [0] * N
    torch.testing.assert_close(df.params(state), torch.full((N, 3), -3.0))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["pure", "donated", "compiled"])
def test_after_it_is_raised_a_rank_takes_no_other_step(how):
    """The others have its messages of a step that it did not keep."""

    def job(rank):
        init, step = df.guard(df.gradient_tracking(is_never_good, df.sgd(0.1), df.topology("static-ring", N)), limit=1)
        step = {"pure": lambda s: s, "donated": df.donate, "compiled": partial(df.compile, backend="aot_eager")}[how](
            step
        )
        state = init(torch.ones(3))
        with pytest.raises(df.errors.NonFinite):
            step(state, torch.full((3,), NAN), 0)
        with pytest.raises(RuntimeError, match=f"rank {rank} cannot go on, because its step t=0 raised NonFinite"):
            step(state, torch.ones(3), 1)

    df.testing.on_ranks(N, job)


def test_in_groups_of_unequal_size_a_bad_worker_leaves_the_mean_of_its_group():
    edge = df.topologies.Edge
    phases = [[edge([0, 1]), edge([2, 3, 4])], [edge([1, 2]), edge([0, 3, 4])]]
    topology = df.topologies.from_groups("two and three", phases, 5)
    init, step = df.guard(df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.0), topology))
    state = df.stack(init(torch.zeros(1)), 5)
    state.params[0].copy_(torch.tensor([[10.0], [11.0], [12.0], [13.0], [float("nan")]]))
    state, _ = df.simulate(step, 5)(state, torch.ones(5, 1), 0)
    assert df.params(state)[:, 0].tolist() == pytest.approx([10.5, 10.5, 12.5, 12.5, 12.5])


@pytest.mark.parametrize(
    "make",
    [
        df.stochastic_gradient_push,
        partial(df.stochastic_gradient_push, rounds=2),
        partial(df.stochastic_gradient_push, delay=2),
        partial(df.stochastic_gradient_push, delay=2, least_delay=0),
        df.push_diging,
    ],
)
def test_an_update_that_overflows_keeps_all_mass_of_push_sum(make):
    """What is left is the mean of all values and of the other updates, to which workers without gradients go."""
    topology = df.topologies.from_matrices("given", random_column_stochastic(N, 2, seed=0), needs_push_sum=True)
    init, step = df.guard(make(lambda params, batch: (params["x"] * batch).sum(), df.sgd(1e200), topology))
    values, updates = torch.tensor([[0.1, 1.7, 0.2, 0.0], [0.1, 0.2, -0.3, 0.0]], dtype=torch.float64)
    state = df.with_params(df.stack(init({"x": values[:1]}), N), {"x": 1e308 * values[:, None]})
    step = df.simulate(step, N)
    for t in range(150):
        state, metrics = step(state, -1e108 * updates * (t == 0), t)
    assert metrics.guard.replaced.tolist() == [0, 1, 0, 0]
    found, expected = state.params.tree()["x"] / 1e308, (values.sum() + updates[[0, 2, 3]].sum()) / N
    torch.testing.assert_close(found, expected.expand(N, 1), atol=1e-6, rtol=0)
