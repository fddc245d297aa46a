"""Effect of label skew on decentralized training: sixteen simulated workers on scikit-learn's digits.

    python examples/heterogeneity.py                 the table and the picture of docs/heterogeneity.md
    python examples/heterogeneity.py --tune          the learning rates that it uses, chosen again
    python examples/heterogeneity.py --help

Every worker's labels follow a Dirichlet distribution: α = 10 is nearly even, at 0.1 workers have a few digits each.
D-PSGD on a ring loses accuracy as α shrinks. Methods that correct its bias, or relay every worker's contribution to all,
do not (as in RelaySGD's table: Vogels et al., NeurIPS 2021).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from skewed_digits import Data, accuracy, load, loss_fn, predict, start
from torch import Tensor
from torch.func import vmap
from tqdm import tqdm

import decentfn as df

MOMENTUM = 0.9
GRID = (0.025, 0.05, 0.1, 0.2, 0.4)
TUNED_AT = 1.0


class Method(NamedTuple):
    """An algorithm, where it runs, and its learning rate: the best of GRID at α = 1 (`--tune`)."""

    algorithm: Callable[..., df.Algorithm]
    topology: str
    learning_rate: float
    momentum: float = MOMENTUM  # the optimizer's; none where the method has its own


METHODS = {
    "all-reduce": Method(df.all_reduce, "complete", 0.4),
    "D-PSGD": Method(df.adapt_while_communicate, "static-ring", 0.4),
    "QG momentum": Method(df.quasi_global_momentum, "static-ring", 0.4, momentum=0.0),
    "gradient tracking": Method(df.gradient_tracking, "static-ring", 0.4),
    "exact diffusion": Method(df.exact_diffusion, "static-ring", 0.4),
    "D²": Method(df.d2, "static-ring", 0.4),
    "SGP": Method(df.stochastic_gradient_push, "one-peer-exp-directed", 0.4),
    "RelaySGD": Method(df.relay_sgd, "binary-tree", 0.4),
}


@dataclass(frozen=True)
class Config:
    """The whole experiment."""

    steps: int = 300
    alphas: tuple[float, ...] = (10.0, 1.0, 0.1)
    """Dirichlet concentrations; smaller is more heterogeneous."""
    methods: tuple[Literal[tuple(METHODS)], ...] = tuple(METHODS)
    """Rows of the table."""
    seeds: int = 3
    """Runs of each cell: other shards, another start and other batches."""
    num_workers: int = 16
    batch_size: int = 16
    """Images per worker and step."""
    tune: bool = False
    """Try the learning rates of GRID at α = 1 and print what is best, instead of the table."""
    picture: Path = Path("runs/heterogeneity.png")
    """Where the table is drawn."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 0, "seeds": 1, "num_workers": 1, "batch_size": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it is at least {least}.")
        for name, values in (("methods", self.methods), ("alphas", self.alphas)):
            if not values:
                raise ValueError(f"--{name}: the table needs at least one of them.")
        unknown = set(self.methods) - set(METHODS)
        if unknown:
            raise ValueError(f"--methods {' '.join(unknown)}: known are {', '.join(METHODS)}.")
        if self.picture.suffix != ".png":
            raise ValueError(f"--picture {self.picture}: the name of a file that ends in .png.")
        labels = load()[0].labels
        for alpha in self.alphas:
            df.data.dirichlet_shards(labels, self.num_workers, alpha)


class Result(NamedTuple):
    """Accuracies in [0, 1]."""

    consensus: float  # held out, of the mean of all workers' parameters
    local: float  # held out, of every worker's own parameters, averaged over workers
    worst: float  # held out, of the worker that knows least
    train: float  # as `local`, on the union of all shards


def topology(name: str, num_workers: int) -> df.Topology:
    """By name; where nodes matter, of four workers each."""
    nodes = {"local_world_size": 4} if name in ("alternating-exp-ring", "hierarchical") else {}
    return df.topology(name, num_workers, **nodes)


def train(method: Method, config: Config, alpha: float, seed: int, learning_rate: float | None = None) -> Result:
    """One run."""
    data, held_out = load()
    n = config.num_workers
    # Of a seed all methods get the same shards, batches and start.
    shards = df.data.fixed_shards(df.data.dirichlet_shards(data.labels, n, alpha, seed), config.batch_size, seed)
    optimizer = df.sgd(learning_rate or method.learning_rate, momentum=method.momentum)
    init, decent_step = method.algorithm(loss_fn, optimizer, topology(method.topology, n))
    state, decent_step = df.stack(init(start(seed)), n), df.simulate(decent_step, n)
    for t in range(config.steps):
        rows = shards.stacked_at(t)
        state, _ = decent_step(state, data.take(rows), t)

    def local(data: Data) -> Tensor:
        logits = vmap(predict, in_dims=(0, None))(df.params(state), data.images)
        return (logits.argmax(-1) == data.labels).float().mean(-1)

    workers, trained = local(held_out), local(data).mean().item()
    return Result(accuracy(df.consensus_mean(state), held_out), workers.mean().item(), workers.min().item(), trained)


def tune(config: Config) -> dict[str, float]:
    """For each method the learning rate of GRID whose workers know the training data best at α = 1."""
    best = {}
    for name in config.methods:
        found = {
            rate: [train(METHODS[name], config, TUNED_AT, seed, rate) for seed in range(config.seeds)] for rate in GRID
        }
        scores = {rate: mean(result.train for result in results) for rate, results in found.items()}
        best[name] = max(GRID, key=lambda rate: scores[rate])
        print(f"{name}: {best[name]}  { ({rate: round(score, 4) for rate, score in scores.items()}) }", flush=True)
    return best


def table(results: dict[str, dict[float, list[Result]]]) -> str:
    """Markdown: per α the accuracy of the consensus mean and of single workers, in percent, ± over seeds."""

    def cell(values: list[float]) -> str:
        spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * mean(values):.1f}{spread}"

    alphas = list(next(iter(results.values())))
    heads = ["method", "topology", "learning rate"]
    heads += [f"α = {alpha:g}: {what}" for alpha in alphas for what in ("mean model", "workers")]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for name, row in results.items():
        method = METHODS[name]
        cells = [name, method.topology, f"{method.learning_rate:g}"]
        for alpha in alphas:
            cells += [cell([r.consensus for r in row[alpha]]), cell([r.local for r in row[alpha]])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(results: dict[str, dict[float, list[Result]]]) -> Figure:
    """The table: a row per method, a dot per α, bars of one standard deviation over seeds."""
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(results)), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    alphas = list(next(iter(results.values())))
    shades = ["#56B4E9", "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#000000"]
    for panel, field, title in zip(
        panels, ("local", "consensus"), ("each worker's own model", "the mean model"), strict=True
    ):
        for number, alpha in enumerate(alphas):
            cells = [[100 * getattr(result, field) for result in row[alpha]] for row in results.values()]
            shift = 0.22 * (number - (len(alphas) - 1) / 2) if len(alphas) < 5 else 0.0
            panel.errorbar(
                [mean(cell) for cell in cells],
                [row + shift for row in range(len(cells))],
                xerr=[stdev(cell) if len(cell) > 1 else 0.0 for cell in cells],
                fmt="o",
                markersize=5,
                linewidth=1.2,
                color=shades[number % len(shades)],
                label=f"α = {alpha:g}",
            )
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("held-out accuracy, %")
        panel.grid(axis="x", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(results)), [f"{name}, {METHODS[name].topology}" for name in results])
    panels[0].invert_yaxis()
    panels[1].legend(title="labels, less even as α falls", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def main(config: Config) -> dict[str, Any]:
    """Run it all; returns the results (or, tuning, the learning rates) by method."""
    if config.tune:
        return tune(config)
    runs = [(name, alpha, seed) for name in config.methods for alpha in config.alphas for seed in range(config.seeds)]
    results: dict[str, dict[float, list[Result]]] = {name: {a: [] for a in config.alphas} for name in config.methods}
    for name, alpha, seed in tqdm(runs, disable=None):
        results[name][alpha].append(train(METHODS[name], config, alpha, seed))
    print(table(results))
    ordered = sorted(config.methods, key=lambda name: -mean(r.local for r in results[name][config.alphas[-1]]))
    print(f"\nBy the workers' accuracy at α = {config.alphas[-1]:g}: {' > '.join(ordered)}")
    config.picture.parent.mkdir(parents=True, exist_ok=True)
    picture(results).savefig(config.picture, dpi=130)
    print(f"The picture: {config.picture}")
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Config))
