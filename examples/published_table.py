"""RelaySGD's table of heterogeneous data (Vogels et al., NeurIPS 2021) with our numbers next to the paper's.

    python examples/published_table.py
    python examples/published_table.py --help

The paper trains VGG-11 on CIFAR-10, sixteen workers whose labels follow a Dirichlet distribution of α = 1, 0.1 and 0.01.
Here the data are scikit-learn's digits and the network has two layers, as in `heterogeneity.py`, so compare how much a
method loses as α falls, not the numbers. For each cell the learning rate is the one that fits the training data best,
over all seeds. All learning rates, values of α and seeds of a method are one sweep.
"""

from statistics import mean, stdev
from typing import NamedTuple

import command_line
import torch
from heterogeneity import METHODS
from skewed_digits import Data, load, loss_fn, predict, start
from torch import Tensor
from torch.func import vmap

import decentfn as df

ALPHAS = (1.0, 0.1, 0.01)
PUBLISHED = {
    "all-reduce": (87.0, 87.0, 87.0),  # the paper has one number, as its shards do not matter
    "D-PSGD": (87.4, 79.9, 53.9),
    "QG momentum": (89.5, 84.8, 63.3),
    "D²": (87.2, 84.0, 38.2),
    "SGP": (87.4, 86.7, 86.7),
    "RelaySGD": (87.4, 86.9, 84.6),
}


class Run(NamedTuple):
    alpha: float
    rate: float
    seed: int


def accuracies(states: df.State, runs: list[Run], data: Data) -> Tensor:
    """Accuracies of each run, averaged over the workers' own models, in percent."""
    params = [df.params(df.worker(states, r)) for r in range(len(runs))]
    logits = [vmap(predict, in_dims=(0, None))(its, data.images) for its in params]
    return torch.stack([100 * (its.argmax(-1) == data.labels).float().mean() for its in logits])


def train(name: str, runs: list[Run], steps: int, num_workers: int, batch_size: int) -> df.State:
    """The states of all runs of a method, `[R, N, ...]`: one sweep."""
    method, (data, _) = METHODS[name], load()
    shards = [
        df.data.fixed_shards(
            df.data.dirichlet_shards(data.labels, num_workers, run.alpha, run.seed), batch_size, run.seed
        )
        for run in runs
    ]
    optimizer = df.sgd(df.schedules.per_run([run.rate for run in runs]), momentum=method.momentum)
    init, step = method.algorithm(loss_fn, optimizer, df.topology(method.topology, num_workers))
    states = df.stack_runs([df.stack(init(start(run.seed)), num_workers) for run in runs])
    step = df.sweep(df.simulate(step, num_workers), len(runs))
    for t in range(steps):
        states, _ = step(states, data.take(torch.stack([its.stacked_at(t) for its in shards])), t)
    return states


def main(
    steps: int = 300,
    num_workers: int = 16,
    batch_size: int = 16,
    seeds: int = 3,
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4),
    methods: tuple[str, ...] = tuple(PUBLISHED),
) -> dict[str, list[list[float]]]:
    """Returns for each method and α the held-out accuracies of its seeds, in percent.

    Args:
        steps: of each run.
        num_workers: the paper has 16.
        batch_size: images per worker and step.
        seeds: runs of each cell: other shards, another start and other batches.
        rates: learning rates to choose from.
        methods: rows of the table.
    """
    command_line.at_least(1, steps=steps, num_workers=num_workers, batch_size=batch_size, seeds=seeds)
    data, held_out = load()
    heads = "".join(f"{f'α = {alpha:g}':>12}{'ours':>19}" for alpha in ALPHAS)
    print(f"{'method':14}{'topology':24}{heads}")
    table: dict[str, list[list[float]]] = {}
    for name in methods:
        runs = [Run(alpha, rate, seed) for alpha in ALPHAS for rate in rates for seed in range(seeds)]
        states = train(name, runs, steps, num_workers, batch_size)
        shape = len(ALPHAS), len(rates), seeds
        fits = accuracies(states, runs, data).nan_to_num(0).view(shape).mean(-1)
        found, best = accuracies(states, runs, held_out).view(shape), fits.argmax(1)
        table[name] = [found[a, int(best[a])].tolist() for a in range(len(ALPHAS))]
        cells = ""
        for theirs, ours, chosen in zip(PUBLISHED[name], table[name], best.tolist(), strict=True):
            spread = f" ± {stdev(ours):.1f}" if len(ours) > 1 else ""
            cells += f"{theirs:12.1f}{f'{mean(ours):.1f}{spread} ({rates[chosen]:g})':>19}"
        print(f"{name:14}{METHODS[name].topology:24}{cells}", flush=True)
    print("Paper: VGG-11 on CIFAR-10, in percent. Ours: digits, two layers; (the learning rate).")
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line.run(main)
