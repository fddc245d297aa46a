"""The program that launchers start: two workers, five steps, and the law that they follow.

python tests/others/program.py FOLDER     writes FOLDER/RANK.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import decentfn as df

STEPS, RATE = 5, 0.1
TARGETS = ((1.0, -2.0), (3.0, 0.5))  # of each worker


def train(folder: str, **options: object) -> None:
    """Train this process's worker on a quadratic of its own."""
    world = df.init(**options)  # type: ignore[arg-type]
    init, step = df.adapt_then_combine(distance, df.sgd(RATE), df.topology("ring", world.num_workers))
    state = init({"w": torch.zeros(2, dtype=torch.float64)})
    target = torch.tensor(TARGETS[world.worker], dtype=torch.float64)
    for t in range(STEPS):
        state, _ = step(state, target, t)
    Path(folder, f"{world.worker}.json").write_text(json.dumps(df.params(state)["w"].tolist()))


def distance(params: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Half the squared distance to the worker's target."""
    return (params["w"] - target).square().sum() / 2


def law() -> torch.Tensor:
    """All workers' parameters after the run: x <- W (x - rate (x - target))."""
    x, target = torch.zeros(2, 2, dtype=torch.float64), torch.tensor(TARGETS, dtype=torch.float64)
    topology = df.topology("ring", 2)
    for t in range(STEPS):
        x = df.mixing_matrix(topology, t) @ (x - RATE * (x - target))
    return x


if __name__ == "__main__":
    train(sys.argv[1])
