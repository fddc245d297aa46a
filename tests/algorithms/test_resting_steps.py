"""Steps in which nothing is due cost a step of the optimizer: counted bytes, untouched memory, graphs, and equal results."""

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import decentfn as df
from decentfn.core import trees
from decentfn.kit import rests

N, D, H = 4, 64, 6


def loss(params, batch):
    return ((batch @ params["w"]).tanh() + params["b"]).square().mean(), {"tokens": batch[0].detach().abs().sum()}


def on(name, n):
    return df.topology("complete" if n == 1 else name, n)


def outer(function, topology="ring", **hyperparameters):
    def build(n, loss=loss, **options):
        return function(loss, df.adamw(0.01), on(topology, n), **{"inner_steps": H} | hyperparameters | options)

    return build


def scheduled(function, topology="ring"):
    def build(n, loss=loss, **options):
        return function(loss, df.adamw(0.01), df.topologies.every(H, on(topology, n)), **options)

    return build


LOOPS = {
    "diloco": outer(df.diloco),
    "diloco, weights": outer(df.diloco, weight=lambda aux: aux["tokens"]),
    "diloco, 4 bits": outer(df.diloco, compressor=df.compressors.quantize(4)),
    "diloco, SPARTA": outer(df.diloco, fraction=0.3),
    "diloco, adam": outer(df.diloco, outer_optimizer=df.adam(0.1)),
    "slowmo, 4 bits": outer(df.slowmo, "one-peer-exp", compressor=df.compressors.quantize(4)),
    "streaming_diloco": outer(df.streaming_diloco, num_fragments=2, delay=0),
    "streaming_diloco, late": outer(df.streaming_diloco, num_fragments=1, delay=3),
    "decoupled_diloco": outer(df.decoupled_diloco, num_fragments=2),
    "streaming_diloco, adam": outer(df.streaming_diloco, num_fragments=2, delay=0, outer_optimizer=df.adam(0.1)),
    "decoupled_diloco, adam": outer(df.decoupled_diloco, num_fragments=2, outer_optimizer=df.adam(0.1)),
    "factored_gossip_diloco, 8 bits": outer(
        df.factored_gossip_diloco, "one-peer-exp", compressor=df.compressors.quantize()
    ),
    "sparse_loco": outer(df.sparse_loco),
    "noloco": outer(df.noloco, "random-matching"),
    "gasloc": outer(df.gasloc, "random-matching"),
    "slowmo": outer(df.slowmo, "one-peer-exp"),
    "factored_gossip_diloco": outer(df.factored_gossip_diloco, "one-peer-exp"),
}
SCHEDULED = {
    "adapt_while_communicate": scheduled(df.adapt_while_communicate),
    "adapt_then_combine": scheduled(df.adapt_then_combine),
    "gradient_tracking": scheduled(df.gradient_tracking),
    "momentum_tracking": scheduled(df.momentum_tracking),
    "quasi_global_momentum": scheduled(df.quasi_global_momentum),
    "stochastic_gradient_push": scheduled(df.stochastic_gradient_push, "one-peer-exp-directed"),
    "asynchronous_diloco": outer(df.asynchronous_diloco, "one-peer-exp"),  # it reads its progress in every step
}
METHODS = LOOPS | SCHEDULED
FIRST = ("diloco", "streaming_diloco, late", "adapt_while_communicate")


def params():
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(D, D, generator=g), "b": torch.randn(D, generator=g)}


def batches(n, steps):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, 2, D, generator=g) for _ in range(steps)]


class Traffic(TorchDispatchMode):
    """Counts the bytes of all tensors that operators read and write, and notes which memory they touch."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.touched = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in trees.leaves((list(args), dict(kwargs or {}), out if isinstance(out, (tuple, list)) else [out])):
            if isinstance(x, torch.Tensor):
                self.nbytes += x.nbytes
                self.touched.add(x.untyped_storage().data_ptr())
        return out


class Traced:
    """Backend of torch.compile whose graphs count their traffic."""

    def __init__(self):
        self.traffic, self.graphs = Traffic(), 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*arguments):
            with self.traffic:
                return graph.forward(*arguments)

        return run


def last_step(build, n, mode, t):
    """Train to step t; return the memory before it, the state after it, the step's traffic and the number of graphs."""
    init, step = build(n, loss=df.autograd(loss) if mode == "autograd" else loss)
    state, backend, data = init(params()), Traced(), batches(n, t + 1)
    if mode == "simulated":
        state, step = df.stack(state, n), df.simulate(step, n)
    else:
        data = [batch[0] for batch in data]
    step = df.donate(step) if mode == "eager" else df.compile(step, backend=backend)
    for s in range(t):
        state, _ = step(state, data[s], s)
    memory = [(x, x._version, x.clone()) for x in trees.leaves(state.memory) if x.numel() > D]
    traffic = backend.traffic = Traffic()
    with traffic if mode == "eager" else nullcontext():
        state, _ = step(state, data[t], t)
    return memory, state, traffic, backend.graphs


COUNTED = (*LOOPS, "adapt_while_communicate", "adapt_then_combine")


def cases():
    """An outer optimizer and a compressor rest, so the graph without a round of such a form is the plain one's.

    `sparse_loco` is one of `diloco`; `noloco` and `factored_gossip_diloco` gossip as `gasloc` does.
    """
    for name in COUNTED:
        is_like_another = name.endswith((" bits", " adam")) or name in (
            "sparse_loco",
            "noloco",
            "factored_gossip_diloco",
        )
        for mode in ("eager", "traced", "autograd", "simulated"):
            if name == "diloco" or mode in ("eager", "traced"):
                is_first = name in FIRST and mode == "eager" or (name, mode) == ("diloco", "traced")
                tier = pytest.mark.slow if mode == "traced" and is_like_another else pytest.mark.thorough
                yield pytest.param(name, mode, marks=[] if is_first else [tier], id=f"{name}-{mode}")


@lru_cache
def bytes_of_a_plain_step(mode):
    """Return what a step of one worker with the same optimizer reads and writes, and no schedule that rests."""

    def plain(n, loss=loss):
        return df.adapt_while_communicate(loss, df.adamw(0.01), on("complete", n))

    return last_step(plain, 1, mode, t=2)[2].nbytes


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_a_step_without_a_round_costs_a_step_and_leaves_the_memory_of_the_outer_loop_alone(name, mode):
    """It moves as many bytes as a step of one worker with the same optimizer, and neither reads nor writes φ, b and e.

    If it is compiled, it has a graph of its own, and the steps with a round share another.
    """
    memory, state, traffic, graphs = last_step(METHODS[name], N if mode == "simulated" else 1, mode, t=2 * H - 2)
    assert graphs == (0 if mode == "eager" else 2)
    assert traffic.nbytes and bool(memory) == (name in LOOPS)
    for x, version, before in memory:
        assert x.untyped_storage().data_ptr() not in traffic.touched
        assert x._version == version and torch.equal(x, before)
    kept = {id(x) for x in trees.leaves(state.memory)}
    assert all(id(x) in kept for x, _, _ in memory)
    does_more = ("diloco, weights", "diloco, SPARTA")  # checks that the gradient is finite; averages a few values
    if mode != "simulated" and name not in does_more:
        assert traffic.nbytes <= 1.05 * bytes_of_a_plain_step(mode)


@pytest.mark.parametrize("name", LOOPS)
def test_no_round_is_computed_to_learn_that_nothing_is_due(name):
    """Streaming methods have two schedules for each fragment, and a round takes the host a while."""
    init, step = LOOPS[name](N, inner_steps=5_000)
    state, step = df.stack(init(params()), N), df.simulate(step, N)
    state, _ = step(state, batches(N, 1)[0], 0)
    before = [one._rounds.cache_info().misses for one in step.schedules]
    step(state, batches(N, 1)[0], 1)
    assert [one._rounds.cache_info().misses for one in step.schedules] == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "diloco",
        *(
            pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gradient_tracking", "asynchronous_diloco")))
            for name in SCHEDULED
            if name not in COUNTED
        ),
    ],
)
def test_a_thousand_steps_are_two_graphs(name):
    """The graphs of the others are counted above."""
    counter = CompileCounter()
    init, step = METHODS[name](N)
    state = df.stack(init({"w": torch.ones(2, 2), "b": torch.ones(2)}), N)
    step = df.compile(df.simulate(step, N), backend=counter)
    for t in range(1000 if name == "diloco" else 50):
        state, _ = step(state, torch.ones(N, 1, 2), t)
    assert counter.frame_count == 2


@pytest.mark.thorough
def test_batches_of_thirty_sizes_are_three_compilations():
    """Both graphs know which sizes change."""
    counter = CompileCounter()
    init, step = METHODS["diloco"](1)
    state, step = init(params()), df.compile(step, backend=counter)
    for t in range(30):
        state, _ = step(state, torch.ones(2 + t, D), t)
    assert counter.frame_count == 3


WRAPPED = {
    "plain": lambda algorithm: algorithm,
    "guard": df.guard,
    "ema": df.ema,
    "mix_state": lambda algorithm: df.mix_state(algorithm, {"mu": df.topologies.every(2 * H, on("ring", N))}),
}


def trained(algorithm, knows, finish=lambda step: step, steps=3 * H):
    init, step = algorithm
    step = finish(df.simulate(step if knows else replace(step, schedules=()), N))
    state, found = df.stack(init(params()), N), []
    for t, batch in enumerate(batches(N, steps)):
        state, metrics = step(state, batch, t)
        found.append([x.clone() for x in trees.leaves((state, metrics))])
    return found


def pairs():
    for name in METHODS:
        for wrapper in WRAPPED if name in FIRST else ("plain",):
            is_first = name in FIRST and wrapper == "plain"
            yield pytest.param(name, wrapper, marks=[] if is_first else [pytest.mark.thorough], id=f"{name}-{wrapper}")


@pytest.mark.parametrize(("name", "wrapper"), list(pairs()))
def test_a_step_that_knows_that_it_rests_returns_the_same_bits_as_one_that_does_not(name, wrapper):
    algorithm = WRAPPED[wrapper](METHODS[name](N))
    expected = trained(algorithm, knows=False)
    for finish in (lambda step: step, df.donate):
        for mine, theirs in zip(trained(algorithm, True, finish), expected, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name for name in LOOPS if name not in ("sparse_loco", "diloco, weights") and "bits" not in name]
)
def test_so_it_does_with_a_narrow_wire(name):
    algorithm = METHODS[name](N, wire_dtype=torch.bfloat16)
    for mine, theirs in zip(trained(algorithm, knows=True), trained(algorithm, knows=False), strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FIRST)
def test_a_users_own_trace_and_a_tensor_t_give_the_same_training(name):
    """In a trace t has no value, so one graph computes the outer step always."""
    algorithm, counter = METHODS[name](N), CompileCounter()
    traced = torch.compile(df.simulate(algorithm.step, N), backend=counter, fullgraph=True)
    expected = trained(algorithm, knows=True)
    for finish in (
        lambda step: lambda s, b, t: traced(s, b, torch.tensor(t)),
        lambda step: lambda s, b, t: step(s, b, torch.tensor(t)),
    ):
        for mine, theirs in zip(trained(algorithm, True, finish), expected, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                torch.testing.assert_close(x, y)
    assert counter.frame_count == 1


def test_missing_workers_are_refused_in_the_first_step_although_nothing_is_due():
    init, step = df.diloco(loss, df.adamw(0.01), df.topology("ring", N), inner_steps=500)
    for one in (step, df.donate(step), df.compile(step, backend="eager")):
        with pytest.raises(ValueError, match=rf"num_workers={N}.*df\.simulate"):
            one(init(params()), torch.ones(2, D), 0)


def test_a_step_of_ones_own_can_ask_whether_its_schedule_rests():
    asked, topology = [], df.topologies.every(3, df.topology("complete", 1))
    worker = df.kit.Worker(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1), topology)

    def step(state, batch, t):
        asked.append(rests(topology))
        g, local = worker.gradient(state.params, state.local, batch, t)
        return df.kit.State(state.params, local), g.metrics

    init, step = worker.algorithm(step)
    state = init(torch.ones(2))
    for t in range(4):
        step(state, torch.ones(2), t)
    assert asked == [False, True, True, False]
    assert not rests(topology)
