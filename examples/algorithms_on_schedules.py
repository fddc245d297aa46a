"""Every algorithm on every time-varying schedule; docs/heterogeneity.md has a part of the tables.

    python examples/algorithms_on_schedules.py          makes the runs missing in runs.jsonl, and prints the tables

The experiment is the hardest of heterogeneity.py: sixteen simulated workers on digits, labels skewed by α = 0.1. A
method whose mean model falls below 80 % on a schedule is repeated with smaller learning rates.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import tyro
from heterogeneity import MOMENTUM, Method, topology, train
from heterogeneity import Config as Experiment
from tqdm import tqdm

import decentfn as df

ALPHA, FAILS = 0.1, 0.8
STATIC = "static-ring"
SLOWER = (1 / 4, 1 / 16)
EVERYONE = ("all_reduce", "decoupled_diloco", "demo", "diloco", "sparse_loco", "streaming_diloco")
"""They average over all workers whatever the topology is: run once."""

COMPRESSED = {"compressor": df.compressors.top_k(0.25), "gamma": 0.4}
OPTIONS: dict[str, dict[str, Any]] = {
    "asynchronous_diloco": {"inner_steps": 10},
    "beer": COMPRESSED,
    "choco_sgd": COMPRESSED,
    "deep_squeeze": COMPRESSED,
    "decoupled_diloco": {"inner_steps": 20},
    "diloco": {"inner_steps": 10},
    "factored_gossip_diloco": {"inner_steps": 10},
    "gasloc": {"inner_steps": 10},
    "k_gt": {"inner_steps": 10},
    "led": {"inner_steps": 10},
    "motef": COMPRESSED,
    "noloco": {"inner_steps": 10},
    "sparse_loco": {"inner_steps": 10},
    "streaming_diloco": {"inner_steps": 20},
}
"""Hyperparameters without a default, and outer steps often enough for a short run."""
OWN_MOMENTUM = ("decentlam", "demo", "demuon", "momentum_tracking", "quasi_global_adam", "quasi_global_momentum")
RATES = {"quasi_global_adam": 0.003, "demo": 0.01, "demuon": 0.01}
"""Those that step by the gradient's sign or so; all others take 0.2."""


@dataclass(frozen=True)
class Config:
    """Settings of a run; the defaults are the page's."""

    steps: int = 300
    seeds: int = 1
    runs: Path = Path("runs.jsonl")
    """A line for each run; those that it holds are not run again."""
    algorithms: tuple[str, ...] = ()
    """Rows of the tables; all, if none is named."""
    schedules: tuple[str, ...] = ()
    """Columns of the tables; all, if none is named."""

    def __post_init__(self) -> None:
        Experiment(steps=self.steps, seeds=self.seeds)
        if not self.runs.absolute().parent.is_dir():
            raise ValueError(f"--runs {self.runs}: there is no folder {self.runs.parent}.")
        known = {"algorithms": methods(), "schedules": df.topologies.topology_names()}
        for option, names in known.items():
            for name in getattr(self, option):
                if name not in names:
                    raise ValueError(f"--{option} {name}: known are {', '.join(names)}.")


def methods() -> dict[str, Method]:
    made = {name: partial(getattr(df, name), **OPTIONS.get(name, {})) for name in df.algorithms.__all__}
    made |= {f"gradient_tracking, {form}": partial(df.gradient_tracking, form=form) for form in ("semi-atc", "awc")}
    return {
        name: Method(made[name], STATIC, RATES.get(name, 0.2), 0.0 if name in OWN_MOMENTUM else MOMENTUM)
        for name in sorted(made)
    }


def schedules(num_workers: int) -> dict[str, list[str]]:
    """A static one, and all that vary; with each the names of those that are the same with so many workers."""
    found: dict[str, list[str]] = {STATIC: []}
    seen: dict[str, torch.Tensor] = {}
    names = sorted(
        set(df.topologies.topology_names()) - {"graph"}, key=lambda name: (not name.startswith("one-peer"), name)
    )
    for name in names:
        made = topology(name, num_workers)
        if made.period != 1:
            seen[name] = torch.stack([df.mixing_matrix(made, t) for t in range(made.period or 8)])
            same = [other for other in found if other in seen and torch.equal(seen[other], seen[name])]
            found.setdefault(same[0], []).append(name) if same else found.setdefault(name, [])
    return found


def refusal(method: Method, schedule: str, num_workers: int) -> str | None:
    try:
        method.algorithm(lambda params, batch: params.sum(), df.sgd(0.1), topology(schedule, num_workers))
    except ValueError as error:
        return str(error)
    return None


Key = tuple[str, str, float, int]  # algorithm, schedule, learning rate, seed


class Runs:
    """Results by key, kept in a file."""

    def __init__(self, config: Config) -> None:
        self.config, self.experiment = config, Experiment(steps=config.steps)
        lines = config.runs.read_text().splitlines() if config.runs.exists() else []
        self.done: dict[Key, list[float]] = {tuple(line[0]): line[1] for line in map(json.loads, lines)}

    def cell(self, name: str, method: Method, schedule: str, rate: float) -> tuple[float, float]:
        """Accuracy of the mean model and of the worst worker, on average over the seeds."""
        results = []
        for seed in range(self.config.seeds):
            key = (name, schedule, rate, seed)
            if key not in self.done:
                result = train(method._replace(topology=schedule), self.experiment, ALPHA, seed, rate)
                self.done[key] = [result.consensus, result.worst]
                with self.config.runs.open("a") as file:
                    file.write(json.dumps([key, self.done[key]]) + "\n")
            results.append(self.done[key])
        return mean(result[0] for result in results), mean(result[1] for result in results)


def shown(accuracies: tuple[float, float]) -> str:
    text = " / ".join(f"{100 * value:.0f}" for value in accuracies)
    return f"**{text}**" if accuracies[0] < FAILS else text


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])


def main(config: Config) -> None:
    runs, rows, failed, refused = Runs(config), [], [], {}
    experiment = runs.experiment
    known = schedules(experiment.num_workers)
    columns = list(config.schedules or known)
    chosen = {name: m for name, m in methods().items() if not config.algorithms or name in config.algorithms}
    for name, method in tqdm(chosen.items(), disable=None):
        row, rate = [f"`{name}`"], method.learning_rate
        for schedule in columns:
            why = refusal(method, schedule, experiment.num_workers)
            if why is not None:
                refused.setdefault(name, why)
                row.append("refused")
            elif name in EVERYONE and schedule != columns[0]:
                row.append("same")
            else:
                accuracies = runs.cell(name, method, schedule, rate)
                row.append(shown(accuracies))
                if accuracies[0] < FAILS:
                    slower = [shown(runs.cell(name, method, schedule, rate * factor)) for factor in SLOWER]
                    failed.append([f"`{name}`", f"`{schedule}`", shown(accuracies), *slower])
        rows.append(row)
    print(table(["algorithm", *(f"`{schedule}`" for schedule in columns)], rows))
    for name in columns:
        if known.get(name):
            print(f"\n`{name}` is also {', '.join(f'`{other}`' for other in known[name])}.")
    print("\n" + table(["fails", "on", "at its rate", *(f"at {factor:g} of it" for factor in SLOWER)], failed))
    print("\n" + "\n".join(f"- {why}" for why in refused.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Config))
