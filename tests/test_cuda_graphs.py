"""CUDA graphs without a GPU, by a recorder that replays kernels on the memory that they were recorded with."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import decentfn as df
from decentfn.core import trees
from decentfn.core.context import context
from decentfn.engine import compilation, cuda_graphs
from decentfn.testing import problem
from tests import contract, devices, tape


def recorded(step):
    run = cuda_graphs.replayed(tape.in_place(step), lambda: tape.record)
    return step.transformed("donate").transformed("compile", run=run)


def trained(step, state, batches):
    """The state after each step, and its metrics as they are at the end."""
    states, metrics = [], []
    for t, batch in enumerate(batches):
        state, found = step(state, batch, t)
        states.append(trees.map(torch.clone, state))
        metrics.append(found)
    return states, metrics


def batches_of(workers, steps):
    return [problem.stacked([problem.batch(i, t) for i in range(workers)]) for t in range(steps)]


def require_same(found, wanted):
    for a, b in zip(trees.leaves(found), trees.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


@pytest.mark.thorough
@pytest.mark.one_in(4)
@pytest.mark.parametrize("row", contract.ROWS)
def test_replayed_steps_are_those_that_run(row):
    """Bit for bit, each in its own round, over two periods and a run, a recording and replays; also random rounds."""
    subject = contract.ROWS[row]
    n = subject.num_workers
    algorithm = subject.build()
    steps = 2 * (algorithm.topology.period or 4) + 4
    step, start = df.simulate(algorithm.step, n), subject.start(algorithm, range(n), stacked=True)
    batches = batches_of(n, steps)
    if step.own_steps:
        with pytest.raises(ValueError, match="sorted by the host.*without a mode"):
            trained(recorded(step), start, batches)
        return
    wanted = trained(step, start, batches)
    require_same(trained(recorded(step), trees.map(torch.clone, start), batches), wanted)


def stochastic(n):
    compressed = {"compressor": df.compressors.quantize(4, stochastic=True), "gamma": 0.3}
    return replace(contract.ROWS["choco_sgd"], hyperparameters=compressed).build(n)


def scheduled(n):
    subject = contract.ROWS["adapt_while_communicate"]
    rate = df.schedules.cosine(0.1, 10)
    return df.guard(subject.build(n, loss_fn=df.dynamic_loss_scale(problem.loss_fn), optimizer=df.adamw(rate)))


def grouped(n):
    def update(grads, state, params, mix):
        rate = 0.1 if not mix.means else 0.1 / (1 + mix.means[0].double().abs().mean())
        return df.kit.each(lambda g: -(rate * g).to(g.dtype), grads), state

    optimizer = df.transforms.MixAware(lambda params: (), update)
    topology = contract.on("alternating-exp-ring", local_world_size=min(n, 2))
    return replace(contract.ROWS["adapt_while_communicate"], topology=topology).build(n, optimizer=optimizer)


@pytest.mark.parametrize("build", [stochastic, scheduled, grouped])
@pytest.mark.parametrize("n", [1, 4])
def test_a_replay_draws_and_counts_anew(build, n):
    """Also one worker alone, whose posts and waits are kernels; other batches, other states, and metrics that are kept."""
    algorithm = build(n)
    one = [algorithm.init(problem.params(0)) for _ in range(n)]
    start, step = problem.stacked(one), df.simulate(algorithm.step, n)
    batches = batches_of(n, 16)
    for t in (2, 6, 7, 11):  # of three samples
        batches[t] = trees.map(lambda x: x[:, :3], batches[t])
    if n == 1:
        start, step, batches = one[0], algorithm.step, trees.map(lambda x: x[0], batches)
    wanted = trained(step, start, batches)
    step, state = recorded(step), trees.map(torch.clone, start)
    states, metrics = trained(step, state, batches[:9])
    require_same(trees.leaves(state), trees.leaves(states[-1]))  # the state passed in is the new one
    moved = trees.map(torch.clone, state)
    for t in range(9, 16):
        moved, found = step(moved, batches[t], t)
        states.append(trees.map(torch.clone, moved))
        metrics.append(found)
    require_same((states, metrics), wanted)


def test_dropout_of_a_replay_is_that_of_its_step():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    params, buffers, loss_fn = df.functional(net, torch.nn.functional.mse_loss)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(0.01), df.topology("complete", 1))
    batches = [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(6)]
    wanted = trained(step, init(params, buffers), batches)
    require_same(trained(recorded(step), init(params, buffers), batches), wanted)


@pytest.mark.thorough
def test_the_mode_replays_a_compiled_step(monkeypatch):
    """The compiled code runs again at every replay, but with the first t, and on the memory of the recording."""
    algorithm = contract.ROWS["gradient_tracking, atc"].build()
    step, start = df.simulate(algorithm.step, 4), problem.stacked([algorithm.init(problem.params(i)) for i in range(4)])
    state, records = trees.map(torch.clone, start), []

    def record(function):
        inputs, before = context.inputs, trees.map(torch.clone, state)
        result = function()
        for x, y in zip(*map(trees.leaves, (state, before)), strict=True):
            x.copy_(y)
        records.append(result)

        def replay():
            with context.having(inputs=inputs):
                for old, new in zip(*map(trees.leaves, (result, function())), strict=True):
                    old.copy_(new)

        return replay, result

    monkeypatch.setattr(compilation, "require_replayable", lambda *_: None)
    monkeypatch.setattr(compilation, "on_device", lambda backend: backend)
    monkeypatch.setattr(compilation, "cuda_recorder", lambda: record)
    batches = batches_of(4, 8)
    wanted = trained(step, start, batches)
    found = trained(df.compile(step, mode="reduce-overhead"), state, batches)
    for a, b in zip(trees.leaves(found), trees.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)
    assert len(records) == 1


# -- refused -------------------------------------------------------------------------------------------------------------


def compiled_for_a_gpu(monkeypatch, step, **options):
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(compilation, "cuda_recorder", lambda: tape.record)
        return df.compile(step, mode="reduce-overhead", **options)


def plain(state, batch, t):
    return state + batch, batch.sum()


@pytest.mark.parametrize(
    ("step", "options", "match"),
    [
        (plain, {"donate": False}, "donate=False"),
        (plain, {"backend": "eager"}, "backend='eager'.*leave backend out"),
        (
            contract.ROWS["all_reduce"].build(loss_fn=df.autograd(problem.loss_fn)).step,
            {},
            "df.autograd.*leave mode out",
        ),
    ],
)
def test_what_no_graph_can_replay_is_refused_when_the_step_is_compiled(monkeypatch, step, options, match):
    with pytest.raises(ValueError, match=match):
        compiled_for_a_gpu(monkeypatch, step, **options)


def test_what_no_graph_can_replay_is_refused_on_the_cpu_and_by_other_names():
    with pytest.raises(ValueError, match="no GPU"):
        df.compile(plain, mode="reduce-overhead")
    with pytest.raises(ValueError, match='None or "reduce-overhead"'):
        df.compile(plain, mode="max-autotune")
    with pytest.raises(ValueError, match='mode="reduce-overhead"'):
        df.compile(plain, **{"triton.cudagraphs": True})


def test_an_optimizer_that_runs_python_is_refused():
    optimizer = df.from_torch(lambda params: torch.optim.Adam(params))
    init, step = contract.ROWS["all_reduce"].build(1, optimizer=optimizer)
    with pytest.raises(ValueError, match="df.from_torch.*leave mode out"):
        recorded(step)(init(problem.params()), problem.batch(0, 0), 0)


def test_batches_of_other_things_than_tensors_are_refused(monkeypatch):
    step = compiled_for_a_gpu(monkeypatch, plain)
    with pytest.raises(ValueError, match="batch=2.*tensors only"):
        step(torch.ones(2), {"x": torch.ones(2), "n": 2}, 0)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_state_on_another_gpu_than_the_current_one_is_refused(monkeypatch):
    """Its kernels would run once, and not be replayed."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    step = compiled_for_a_gpu(monkeypatch, plain)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"cuda:0; call torch.cuda.set_device\(1\)"):
        step(torch.ones(2, device="cuda:1"), torch.ones(2), 0)


@pytest.mark.thorough
@pytest.mark.parametrize("row", ["adapt_while_communicate", "power_gossip", "diloco"])
def test_a_step_on_another_device_alone_is_accepted(monkeypatch, row):
    """Rounds, t and numbers are inputs on the CPU, but only of this library's operators."""
    seen = []
    monkeypatch.setattr(compilation.compile_cache, "inductor", lambda graph, inputs, **_: seen.append(graph) or graph)
    monkeypatch.setattr(compilation, "require_distinct", lambda *_: None)  # nothing has an address on meta
    step, state, batch = devices.on_another_device(contract.ROWS[row], simulated=True)
    compiled_for_a_gpu(monkeypatch, step)(state, batch, 0)
    assert len(seen) == 1


def by_time(state, batch, t):
    return state + t, batch.sum()


@pytest.mark.parametrize(("step", "computes"), [(by_time, "iadd|add"), (plain, "add")])
def test_computing_on_the_cpu_is_refused(monkeypatch, step, computes):
    """With t, which would be that of the recording in all steps; with a state or a batch that is there."""
    step = compiled_for_a_gpu(monkeypatch, step)
    device = "meta" if step.name == "by_time" else "cpu"
    with pytest.raises(ValueError, match=f"computes .*({computes}).* on the CPU"):
        step(torch.ones(2, device=device), torch.ones(2, device=device), 0)
