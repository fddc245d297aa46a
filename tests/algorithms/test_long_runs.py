"""Ten thousand compiled steps without gradients: the workers' mean makes a random walk of roundings, and does not drift.

A step that rounds N D numbers of size x moves their mean, over workers and elements, by some eps |x| / √(12 N D), and so many steps
of them by √steps times that. Weights like 1/3, which do not sum to 1, moved it by eps |x| / 2 in every step.
"""

import math

import torch

import decentfn as df
from decentfn import compressors, trees

N, D, STEPS = 4, 64, 10_000
ONE_MODE = {"compressor": compressors.quantize(8), "gamma": 0.3}

CASES = {
    "adapt_while_communicate": ("static-ring", {}),
    "adapt_then_combine": ("static-ring", {}),
    "gradient_tracking": ("static-ring", {}),
    "momentum_tracking": ("static-ring", {}),
    "quasi_global_momentum": ("static-ring", {}),
    "decentlam": ("static-ring", {}),
    "power_gossip": ("static-ring", {}),
    "slowmo": ("static-ring", {"inner_steps": 3}),
    "noloco": ("static-ring", {"inner_steps": 2}),
    "deep_squeeze": ("static-ring", ONE_MODE),
    "stochastic_gradient_push": ("static-ring", {}),
}
"""An algorithm that promises its mean -> a topology and hyperparameters. D², exact diffusion, EXTRA and CHOCO-SGD keep a sum of
differences, in which a rounding moves the mean in every later step; their docstrings say by how much."""


CARRIED = {"quasi_global_momentum": 10, "decentlam": 10, "deep_squeeze": 10}
"""Momentum carries on a difference of one rounding between workers for 1 / (1 - β) steps, and so does an error that is fed back: the
roundings of one step and the next are not independent."""


def of(dtypes, names, **options):
    """A start and a step of all these algorithms, each on a bucket of each dtype, in one graph."""
    draw = torch.Generator().manual_seed(0)
    starts, steps = {}, {}
    for name in names:
        topology, hyperparameters = CASES[name]
        steps[name] = getattr(df, name)(
            lambda params, batch: sum(0.0 * p.float().sum() for p in trees.leaves(params)),
            df.sgd(0.1),
            df.topology(topology, N),
            **hyperparameters,
            **options,
        )
        rows = [
            steps[name].init([(1.5 + torch.rand(D, generator=draw, dtype=torch.float64)).to(d) for d in dtypes])
            for _ in range(N)
        ]
        starts[name] = trees.map(lambda *leaves: torch.stack(leaves), *rows)

    def step(states, batch, t):
        return {name: steps[name].step(state, batch, t)[0] for name, state in states.items()}, batch

    return starts, step


def assert_walks(names, dtypes, **options):
    starts, step = of(dtypes, names, **options)
    before = {name: [b.double().mean(0) for b in state.params] for name, state in starts.items()}
    step, states = df.compile(df.simulate(step, N)), starts
    batch = torch.zeros(N)
    for t in range(STEPS):
        states, _ = step(states, batch, t)
    for name, state in states.items():
        for x, was in zip(state.params, before[name], strict=True):
            moved = (x.double().mean(0) - was).mean().abs()
            bound = 3 * torch.finfo(x.dtype).eps * 2 * math.sqrt(STEPS / (12 * N * D)) * CARRIED.get(name, 1)
            assert moved <= bound, f"{name}: the mean of {x.dtype} moved by {float(moved):.2g}, more than {bound:.2g}"


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_the_mean_does_not_drift():
    assert_walks(CASES, DTYPES)


def test_nor_does_it_with_a_narrow_wire():
    assert_walks(("adapt_while_communicate", "gradient_tracking"), (torch.float32,), wire_dtype=torch.bfloat16)
