"""Many simulated runs at once: each equals the same run alone."""

import itertools

import pytest
import torch

import decentfn as df
from decentfn.core import trees

N, R, D, STEPS = 4, 3, 5, 7
RATES, GAMMAS = [0.01, 0.02, 0.05], [0.3, 0.6, 1.0]


def loss_fn(params, batch):
    A, b = batch
    noise = torch.randn_like(b)  # the same in all runs, another for each worker
    return ((A @ params["w"] + params["v"] - b) ** 2).mean() + 0.1 * (noise * params["v"]).sum()


CASES = {
    "adapt_while_communicate": lambda gamma: df.adapt_while_communicate(
        loss_fn, df.adamw(1.0), df.topology("random-matching", N), gamma=gamma
    ),
    "diloco": lambda gamma: df.diloco(loss_fn, df.sgd(1.0), df.topology("complete", N), inner_steps=3),
    "choco_sgd": lambda gamma: df.choco_sgd(
        loss_fn, df.sgd(1.0), df.topology("static-ring", N), compressor=df.compressors.random_k(0.5), gamma=0.3
    ),
    "relay_sgd": lambda gamma: df.relay_sgd(loss_fn, df.sgd(1.0), df.topology("chain", N)),
    "diloco, guarded": lambda gamma: df.guard(CASES["diloco"](gamma)),
    "adapt_while_communicate, guarded": lambda gamma: df.guard(CASES["adapt_while_communicate"](gamma)),
}


def data():
    draw = torch.Generator().manual_seed(0)
    A, b, w = (torch.randn(*shape, generator=draw).double() for shape in ((R, N, D, D), (R, N, D), (R, D)))
    return (A, b), [{"w": row, "v": torch.zeros(D).double()} for row in w]


def run(step, state, batch):
    torch.manual_seed(5)
    for t in range(STEPS):
        state, metrics = step(state, batch, t)
    return state, metrics


def made(init, start, rate):
    return df.set_learning_rate(df.stack(init(start), N), rate)


def cases():
    """Compiled, a guarded algorithm is traced with what it guards."""
    for compiled, name in itertools.product((False, True), CASES):
        tier = pytest.mark.slow if f"{name}, guarded" in CASES else pytest.mark.thorough
        yield pytest.param(compiled, name, marks=[tier] * compiled, id=f"{compiled}-{name}")


@pytest.mark.parametrize(("compiled", "name"), list(cases()))
def test_a_run_of_a_sweep_equals_the_same_run_alone(name, compiled):
    """Starts, batches, learning rates and γ differ between the runs."""
    batches, starts = data()
    init, step = CASES[name](df.schedules.per_run(GAMMAS))
    step = df.sweep(df.simulate(step, N), R)
    states = df.stack_runs([made(init, starts[r], RATES[r]) for r in range(R)])
    states, metrics = run(df.compile(step, backend="aot_eager") if compiled else step, states, batches)
    for r in range(R):
        init, step = CASES[name](GAMMAS[r])
        state, its = run(df.simulate(step, N), made(init, starts[r], RATES[r]), trees.map(lambda x, r=r: x[r], batches))
        torch.testing.assert_close(df.worker(states, r).params.tree(), state.params.tree(), rtol=0, atol=1e-12)
        torch.testing.assert_close(metrics.loss[r], its.loss, rtol=0, atol=1e-12)
        assert df.consensus_distance(df.worker(states, r)) == pytest.approx(
            float(df.consensus_distance(state)), abs=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_a_thousand_narrow_shares_is_their_mean(dtype):
    """It was one half: the sum of shares stopped where one more was less than half a unit in its last place."""
    workers = 1000
    init, step = df.all_reduce(lambda x, b: (x * b).sum(), df.sgd(1.0), df.topology("complete", workers))
    state, batch = df.stack(init(torch.zeros(2, dtype=dtype)), workers), torch.ones(workers, 2, dtype=dtype)
    alone = df.simulate(step, workers)
    moved = df.params(alone(state, batch, 0)[0])
    torch.testing.assert_close(moved, -batch, rtol=4e-3, atol=0)
    swept, _ = df.sweep(alone, 2)(df.stack_runs([state] * 2), df.stack_runs([batch] * 2), 0)
    assert all(torch.equal(df.params(df.worker(swept, r)), moved) for r in range(2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda step: df.sweep(step, 2), r"sweep\(.*expected a simulated step, df.sweep\(df.simulate\(step, N\), R\)"),
        (lambda step: df.sweep(df.compile(df.simulate(step, N)), 2), r"the order is df.compile\(df.sweep"),
        (lambda step: df.sweep(df.sweep(df.simulate(step, N), 2), 2), "each at most once"),
        (lambda step: df.simulate(df.sweep(df.simulate(step, N), 2), N), "each at most once"),
        (lambda step: df.sweep(df.simulate(step, N), 0), r"sweep\(num_runs=0\)"),
    ],
)
def test_a_wrong_order_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make(CASES["diloco"](1.0).step)


def test_what_differs_between_runs_has_a_row_for_each():
    batches, starts = data()
    init, step = CASES["adapt_while_communicate"](df.schedules.per_run([0.5, 1.0]))
    sweep, states = df.sweep(df.simulate(step, N), R), df.stack_runs([df.stack(init(starts[0]), N)] * R)
    with pytest.raises(ValueError, match=r"sweep\(num_runs=3\): leaf .* of the batches .* must be the 3 runs"):
        sweep(states, trees.map(lambda x: x[:2], batches), 0)
    with pytest.raises(ValueError, match=r"per_run\(\[0.5, 1.0\]\): 2 values, and the sweep has 3 runs"):
        sweep(states, batches, 0)
    with pytest.raises(
        ValueError, match=r"stack_runs: run 1 has the leaf v torch.float64 \[6\] where run 0 has v torch.float64 \[5\]"
    ):
        df.stack_runs([starts[0], starts[1] | {"v": torch.zeros(D + 1).double()}])
    with pytest.raises(ValueError, match=r"per_run\(values=\[\]\): a list, one number per run"):
        df.schedules.per_run([])
    by_autograd = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", N))
    with pytest.raises(ValueError, match=r"sweep\(step of df.autograd\(loss_fn\), R\)"):
        df.sweep(df.simulate(by_autograd.step, N), R)
    of_torch = df.all_reduce(loss_fn, df.from_torch(torch.optim.Adagrad), df.topology("complete", N))
    states = df.stack_runs([df.stack(of_torch.init(starts[0]), N)] * R)
    with pytest.raises(ValueError, match=r"df.from_torch updates one worker after the other"):
        df.sweep(df.simulate(of_torch.step, N), R)(states, batches, 0)


def test_a_sweep_that_cannot_be_traced_is_not_blamed_on_its_loss():
    """Without the compiler, the loss is tried on the workers of one run."""
    batches, starts = data()
    reads = lambda grads, state, params: (trees.map(lambda g: -g * float(g.sum()), grads), state)  # noqa: E731
    optimizer = df.Transform(lambda params: (), reads)
    init, step = df.adapt_then_combine(loss_fn, optimizer, df.topology("ring", N))
    step = df.compile(df.sweep(df.simulate(step, N), R), backend="eager")
    with pytest.raises(RuntimeError, match="torch.compile could not trace the step"):
        step(df.stack_runs([df.stack(init(start), N) for start in starts]), batches, 0)


def test_runs_are_not_taken_for_workers():
    """Their mean would be that of other runs, or none."""
    _, starts = data()
    init, _ = CASES["adapt_while_communicate"](1.0)
    states = df.stack_runs([df.stack(init(start), N) for start in starts])
    for read in (df.consensus_mean, df.consensus_distance, df.distance_to_consensus):
        assert trees.leaves(read(df.worker(states, 1)))[0].dim() < 3
    for read in (
        *(df.consensus_mean, df.consensus_distance, df.distance_to_consensus, df.check_replicas, df.consensus_buffers),
        lambda states: df.mean(states, {"loss": torch.rand(R, N)}),
        lambda states: df.resize(states, CASES["adapt_while_communicate"](1.0)),
        lambda states: df.evaluate_replicas(lambda params, batch: params["w"].mean(), states, [torch.ones(2)]),
    ):
        with pytest.raises(ValueError, match=r"several runs \(df.sweep\); take one of them, df.worker\(states, r\)"):
            read(states)
    assert df.params(states)["w"].shape == (R, N, D)


def test_every_run_is_checked_as_it_would_be_alone():
    batches, starts = data()
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", N))
    state = df.stack(init(starts[0]), N)
    apart = state._replace(params=trees.map(lambda x: x + torch.arange(N)[:, None], state.params))
    with pytest.raises(ValueError, match="replicas must start equal"):
        df.sweep(df.simulate(step, N), R)(df.stack_runs([state, state, apart]), batches, 0)
