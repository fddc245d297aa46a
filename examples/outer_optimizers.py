"""Outer steps as arguments of `df.diloco`: MuLoCo with few bits, SNOO, GPA, and momentum that warms up as Pier's.

python examples/outer_optimizers.py

MuLoCo (Thérien et al., 2025) is DiLoCo of Muon whose workers send few bits of their progress, with error feedback. SNOO (Kallusky
et al., 2025) is DiLoCo with one worker. GPA (Defazio et al., 2025) keeps a fast z and a slow x, and trains at y:

    z+ = z - γ Δ;    x+ = μx x + (1 - μx) z+;    y+ = μy x+ + (1 - μy) z+

Pier (Fan, Zhang, 2025) changes the outer rate and momentum over the run. Its first phase, in which the groups average
gradients, is another algorithm (`df.all_reduce`) and not shown. tests/test_small_examples.py checks the equations in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import command_line
import skewed_digits as digits
import torch

import decentfn as df
from decentfn import kit


class Averages(NamedTuple):
    """State of `primal_averaging`."""

    x: kit.Buckets
    z: kit.Buckets


def primal_averaging(learning_rate: float, mu_x: float, mu_y: float) -> df.Transform:
    """GPA as an outer optimizer; `mu_x = mu_y = μ` is Nesterov's momentum μ at the rate (1 - μ) γ."""

    def update(delta, state, y):
        z = kit.each(lambda z, d: z - learning_rate * d, state.z, delta)
        x = kit.each(lambda x, z: mu_x * x + (1 - mu_x) * z, state.x, z)
        return kit.each(lambda x, z, y: mu_y * x + (1 - mu_y) * z - y, x, z, y), Averages(x, z)

    return df.Transform(lambda y: Averages(kit.copy_wide(y), kit.copy_wide(y)), update)


class Momentum(NamedTuple):
    """State of `scheduled_nesterov`."""

    b: kit.Buckets
    count: torch.Tensor


def scheduled_nesterov(rate: Callable, momentum: Callable) -> df.Transform:
    """`b+ = β b + Δ; φ+ = φ - η (Δ + β b+)`, with η and β functions of the number of the outer step."""

    def update(delta, state, phi):
        eta, beta = (torch.as_tensor(f(state.count), dtype=torch.float64) for f in (rate, momentum))
        b = kit.each(lambda b, d: beta * b + d, state.b, delta)
        return kit.each(lambda b, d: -eta * (d + beta * b), b, delta), Momentum(b, state.count + 1)

    return df.Transform(lambda phi: Momentum(kit.zeros_like(phi), torch.zeros((), dtype=torch.int64)), update)


def main(steps: int = 240, num_workers: int = 8) -> dict[str, float]:
    """Returns the held-out accuracy of the workers' mean model with each outer step, every 8 inner steps."""
    command_line.at_least(1, steps=steps)
    everyone, one, rounds = df.topology("complete", num_workers), df.topology("complete", 1), steps // 8
    adamw = df.adamw(0.003)
    muon = df.transforms.partition(
        {True: df.transforms.muon(0.01), False: df.adamw(0.003)}, lambda name, shape: len(shape) == 2
    )
    warm, fade = df.schedules.warmup_cosine(0.7, max(1, rounds // 5), rounds), df.schedules.linear(0.95, 0.8, rounds)
    runs = {
        "DiLoCo": (adamw, everyone, {}),
        "MuLoCo, 2 bits": (muon, everyone, {"compressor": df.compressors.quantize(bits=2), "error_decay": 0.95}),
        "SNOO": (adamw, one, {}),
        "GPA": (adamw, everyone, {"outer_optimizer": primal_averaging(3.0, mu_x=0.8, mu_y=0.8)}),
        "Pier's schedules": (adamw, everyone, {"outer_optimizer": scheduled_nesterov(warm, fade)}),
    }
    held_out, accuracies = digits.load()[1], {}
    for name, (optimizer, topology, options) in runs.items():
        algorithm = df.diloco(digits.loss_fn, optimizer, topology, inner_steps=8, **options)
        state = digits.train(algorithm, topology.num_workers, steps, alpha=10.0)
        accuracies[name] = digits.accuracy(df.consensus_mean(state), held_out)
        print(f"{name:16}: held-out accuracy of the mean of {topology.num_workers} workers {accuracies[name]:.3f}")
    return accuracies


if __name__ == "__main__":
    command_line.run(main)
