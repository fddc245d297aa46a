"""Your own algorithm, written for one worker, as in a paper.

python examples/custom_algorithm.py

This is momentum SGD with gossip of the momentum (Yu, Jin, Yang, ICML 2019, algorithm 3):

    m' = beta m + g(x)
    x+ = W (x - eta m'),    m+ = W m'

It sends twice as much as D-PSGD, where every worker keeps its own momentum, and the workers stay closer together; here
each of sixteen workers has a few digits. The code does not mention ranks, simulation, buckets on a wire or mixed
precision, and works with all of them. This checks it, in minutes (add `hyperparameters={"beta": 0.5}` to try another β):

    ring = lambda n: df.topology("static-ring" if n > 1 else "complete", n)
    df.testing.check_algorithm(momentum_mixing, ring)

docs/write_your_own.md explains the parts.
"""

from typing import NamedTuple

import command_line
import skewed_digits as digits
from torch.func import vmap

import decentfn as df
from decentfn import kit


class Momentum(NamedTuple):
    """Memory of one worker."""

    m: kit.Buckets
    averaged = ("m",)  # over the old workers, where `df.resize` changes their number

    @classmethod
    def restart(cls, x: kit.Buckets) -> "Momentum":
        return cls(kit.zeros_like(x))


@kit.algorithm
def momentum_mixing(loss_fn, optimizer, topology, *, beta=0.9, **options) -> df.Algorithm:
    """`optimizer` turns m into -eta m: `df.sgd(eta)`, without momentum of its own."""
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_fractions("momentum_mixing", beta=beta)
    kit.require_doubly_stochastic("momentum_mixing", topology)

    def step(state, batch, t):
        x, (m,) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        m_half = g.keep(kit.each(lambda m, g: beta * m + g, m, g.grads), m)  # a bad gradient leaves it as it was
        m_posted = worker.post(m_half, t)
        u, local = worker.update(kit.cast_like(m_half, x), g, local, x)
        return kit.State(worker.mix(kit.add(x, u), t), local, Momentum(kit.collect(m_posted))), g.metrics

    return worker.algorithm(step, Momentum.restart)


class Result(NamedTuple):
    mean: float  # held-out accuracy of the workers' mean model
    workers: float  # of the workers' own models, on average
    distance: float  # between workers and their mean


def main(steps: int = 200, num_workers: int = 16) -> dict[str, Result]:
    """Returns what both algorithms come to."""
    command_line.at_least(0, steps=steps)
    ring = df.topology("static-ring", num_workers)
    _, held_out = digits.load()
    results = {}
    for name, algorithm in {
        "momentum mixed": momentum_mixing(digits.loss_fn, df.sgd(0.2), ring),
        "momentum kept": df.adapt_then_combine(digits.loss_fn, df.sgd(0.2, momentum=0.9), ring),
    }.items():
        state = digits.train(algorithm, num_workers, steps)
        guesses = vmap(digits.predict, in_dims=(0, None))(df.params(state), held_out.images).argmax(-1)
        result = results[name] = Result(
            digits.accuracy(df.consensus_mean(state), held_out),
            (guesses == held_out.labels).float().mean().item(),
            df.consensus_distance(state).item(),
        )
        print(
            f"{name:14}: held-out accuracy of the mean model {result.mean:.3f}, of the workers {result.workers:.3f}, "
            f"consensus distance {result.distance:.2f}"
        )
    return results


if __name__ == "__main__":
    command_line.run(main)
