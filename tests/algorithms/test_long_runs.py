"""Long runs without gradients: what rounding moves, and how it grows.

A step that rounds numbers between 1.5 and 2.5 moves the mean of N workers by at most some 0.29 / √N units u = 2 eps (rms), and as a random
walk so many steps of them by √steps times that: 4.6 u in 1,000 steps of 4 workers. What is measured is the root mean square over the
elements of how far each one's mean has moved: where workers go round in a cycle of roundings, each element's mean drifts in a direction
of its own, and the mean over elements hides it (DecentLaM did: 14 u in 1,000 steps, 178 u in 10,000).
"""

import math

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import trees

pytestmark = pytest.mark.thorough

D = 64
RANDOM = {"compressor": compressors.random_k(0.5), "gamma": 0.3}

PARAMETERS = {
    "adapt_while_communicate": ("static-ring", 4, {}),
    "adapt_while_communicate, groups of three": ("complete", 3, {}),
    "adapt_then_combine": ("static-ring", 5, {}),
    "all_reduce": ("complete", 3, {}),
    "gradient_tracking": ("static-ring", 4, {}),
    "momentum_tracking": ("static-ring", 5, {}),
    "quasi_global_momentum": ("static-ring", 4, {}),
    "decentlam": ("static-ring", 4, {}),
    "power_gossip": ("static-ring", 4, {}),
    "noloco": ("static-ring", 4, {"inner_steps": 2}),
    "deep_squeeze": ("static-ring", 4, RANDOM),
    "deep_squeeze, quantize": ("static-ring", 4, {"compressor": compressors.quantize(8), "gamma": 0.3}),
    "choco_sgd": ("static-ring", 4, {"compressor": compressors.quantize(8), "gamma": 0.3}),
    "stochastic_gradient_push": ("static-exp", 5, {}),
    "push_diging": ("static-exp", 5, {}),
    "relay_sgd": ("binary-tree", 6, {}),
    "diloco": ("complete", 3, {"inner_steps": 2}),
    "streaming_diloco": ("complete", 3, {"inner_steps": 4}),
    "slowmo": ("static-ring", 4, {"inner_steps": 3}),
    "gasloc": ("static-ring", 4, {"inner_steps": 2}),
    "d2": ("static-ring", 4, {}),  # unequal starts persist
    "exact_diffusion": ("static-ring", 4, {}),
    "extra": ("static-ring", 5, {}),
}
"""An algorithm that promises its mean -> a topology, workers and hyperparameters."""

STARTS_EQUAL = {"all_reduce", "relay_sgd", "diloco", "streaming_diloco"}

AMPLIFIED = {"slowmo": 4, "quasi_global_momentum": 4, "gasloc": 8}
"""Momentum carries on what early roundings left, for 1 / (1 - β) steps; both then rest: 9 and 8 u after 300 steps and after 1,000."""

SIXTEEN = {
    "adapt_while_communicate",
    "gradient_tracking",
    "d2",
    "decentlam",
    "stochastic_gradient_push",
    "diloco",
    "relay_sgd",
}
"""One of each family in 16 bits too, where all are not tried."""


def loss(params, batch):
    return sum(0.0 * p.float().sum() for p in trees.leaves(params))


def built(name, **options):
    topology, n, hyperparameters = PARAMETERS[name]
    algorithm = getattr(df, name.split(",")[0])
    return algorithm(loss, df.sgd(0.1), df.topology(topology, n), **hyperparameters, **options), n


def started(algorithm, n, dtypes, equal=False):
    draw = torch.Generator().manual_seed(0)
    rows = [[(1.5 + torch.rand(D, generator=draw, dtype=torch.float64)).to(d) for d in dtypes] for _ in range(n)]
    rows = [algorithm.init([x.clone() for x in rows[0 if equal else i]]) for i in range(n)]
    return trees.map(lambda *leaves: torch.stack(leaves), *rows)


def means(params):
    return [bucket.double().mean(0) for bucket in params]


def assert_stays(name, n, x, was, steps):
    moved = float((x.double().mean(0) - was).square().mean().sqrt()) / (2 * torch.finfo(x.dtype).eps)
    bound = (1 + 0.29 * math.sqrt(steps / n)) * AMPLIFIED.get(name, 1)
    assert moved <= bound, f"{name}: the mean of {x.dtype} moved by {moved:.3g} units, more than {bound:.3g}"


def assert_walks(name, dtypes, steps, backend, **options):
    algorithm, n = built(name, **options)
    state = started(algorithm, n, dtypes, equal=name in STARTS_EQUAL)
    before = means(state.params)
    step = df.simulate(algorithm.step, n)
    step = step if backend is None else df.compile(step, backend=backend)
    batch = torch.zeros(n)
    for t in range(steps):
        state, _ = step(state, batch, t)
    for x, was in zip(state.params, before, strict=True):
        assert_stays(name, n, x, was, steps)
    return state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_mean_does_not_drift(name):
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if name in SIXTEEN else (torch.float32,)
    # Cycles of roundings begin where disagreement has shrunk to roundings: after some 300 steps of DecentLaM.
    assert_walks(name, dtypes, 1_000 if name == "decentlam" else 300, None)


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("name", ["d2", "exact_diffusion", "extra"])
def test_a_sum_of_differences_moves_the_mean_once(name, n):
    """Not in each later step: by 7e-6 to 5e-4 in 300, had its rounding a mean. x from N(0, 1), some near 0."""
    algorithm = getattr(df, name)(loss, df.sgd(0.1), df.topology("static-ring", n))
    draw = torch.Generator().manual_seed(0)
    states = [algorithm.init([torch.randn(D, generator=draw)]) for _ in range(n)]
    state, step = trees.map(lambda *leaves: torch.stack(leaves), *states), df.simulate(algorithm.step, n)
    was, moved = means(state.params)[0], []
    for t in range(300):
        state, _ = step(state, torch.zeros(n), t)
        moved.append(float((means(state.params)[0] - was).square().mean().sqrt()))
    assert moved[-1] < 2 * moved[99] < 3e-7
    assert state.memory[0][0].double().mean(0).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_nor_in_ten_thousand_compiled_steps_of_any_dtype(name):
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    # DeepSqueeze drifts in float64, by less than 2e-13; its docstring says so. Sums of differences are exact in float32 only.
    drifts = name.startswith(("deep_squeeze", "d2", "exact_diffusion", "extra"))
    assert_walks(name, dtypes[:3] if drifts else dtypes, 10_000, "inductor")


@pytest.mark.parametrize(
    "name",
    [
        "adapt_then_combine",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("adapt_while_communicate", "gradient_tracking", "momentum_tracking")
        ),
    ],
)
def test_a_narrow_wire_does_not_move_it(name):
    """Disagreement below the wire's resolution stays, and with it a cycle: what rounding takes in each must be nothing."""
    assert_walks(name, (torch.float32,), 1_000, None, wire_dtype=torch.bfloat16)


OUTER = {
    "slowmo": ("static-ring", 4, {"inner_steps": 2}),
    "diloco": ("complete", 3, {"inner_steps": 2}),
    "streaming_diloco": ("complete", 3, {"inner_steps": 2, "num_fragments": 1}),
    "noloco": ("static-ring", 4, {"inner_steps": 2}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OUTER)
def test_slow_momentum_comes_to_rest_without_gradients(name, dtype):
    """The slow parameters are wide and the fast ones narrow: what rounding takes between them is no gradient."""
    topology, n, hyperparameters = OUTER[name]
    pushed = lambda x, strength: (strength * x.float()).sum()  # noqa: E731
    init, step = getattr(df, name)(pushed, df.sgd(0.05), df.topology(topology, n), **hyperparameters)
    x = (1.5 + torch.rand(D, generator=torch.Generator().manual_seed(0))).to(dtype)
    state, step = df.stack(init(x), n), df.simulate(step, n)
    for t in range(240):
        state, _ = step(state, torch.full((n,), float(t < 20)), t)
    was = means(state.params)[0]
    for t in range(240, 300):
        state, _ = step(state, torch.zeros(n), t)
    assert torch.equal(means(state.params)[0], was)


@pytest.mark.parametrize("name", ["stochastic_gradient_push", "push_diging"])
def test_push_sum_weights_keep_their_sum(name):
    state = assert_walks(name, (torch.float32,), 300, None)
    weights = state.memory.weight
    assert abs(float(weights.double().sum()) - len(weights)) < 300 * torch.finfo(weights.dtype).eps


def test_the_moving_average_of_what_rests_rests():
    algorithm, n = built("adapt_while_communicate, groups of three")
    algorithm = df.ema(algorithm, 0.9)
    state = started(algorithm, n, (torch.float32, torch.bfloat16))
    step = df.simulate(algorithm.step, n)
    for t in range(300):
        state, _ = step(state, torch.zeros(n), t)
    averages = trees.leaves(df.ema_params(state))
    for x, average in zip(state.params, averages, strict=True):
        # 1 / (1 - decay) steps are remembered, each rounded.
        bound = 10 * torch.finfo(average.dtype).eps * 2.5
        assert (average.double() - x.double()).abs().max() <= bound


def test_averaged_buffers_of_three_workers_keep_their_mean():
    def of_buffers(params, buffers, batch):
        return 0.0 * params.sum(), (buffers, None)

    algorithm = df.average_buffers(df.adapt_while_communicate(of_buffers, df.sgd(0.1), df.topology("static-ring", 3)))
    draw = torch.Generator().manual_seed(0)
    rows = [algorithm.init(torch.ones(2), {"mean": 1.5 + torch.rand(D, generator=draw)}) for _ in range(3)]
    state = trees.map(lambda *leaves: torch.stack(leaves), *rows)
    step, was = df.simulate(algorithm.step, 3), df.buffers(state)["mean"].double().mean(0)
    for t in range(300):
        state, _ = step(state, torch.zeros(3), t)
    assert_stays("buffers", 3, df.buffers(state)["mean"], was, 300)
