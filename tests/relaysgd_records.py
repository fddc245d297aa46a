"""RelaySGD's published step counts on random quadratics, replayed by this library's algorithms and topologies.

    python tests/relaysgd_records.py                      all 858 records, with a progress bar (minutes)
    python tests/relaysgd_records.py --algorithm D2       those of one method

Source of the records: Vogels et al., NeurIPS 2021, their experiment on random quadratics. All records of one
(method, topology, number of workers) are trained at once: a worker's parameters are `[R, d]`, one row for each record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import decentfn as df
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.all_reduce import all_reduce
from decentfn.algorithms.d2 import d2
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.relay_sgd import relay_sgd
from decentfn.algorithms.stochastic_gradient_push import stochastic_gradient_push
from decentfn.core import trees

DATA = Path(__file__).parent / "data" / "relaysgd_random_quadratics.json"
DIM, MU, L = 10, 0.5, 1.0
THRESHOLD, FLAT = 1e-6, 1e-8
COMPILED_FROM = 1500  # steps; compiling for a shorter run would take longer than the run
TESTED = sorted({round(v) for v in np.logspace(0, np.log2(20_000), 1000, base=2)})

METHODS: dict[str, Callable[..., Any]] = {
    "Gossip": adapt_then_combine,
    "All-reduce": all_reduce,
    "Gradient tracking": lambda *args: gradient_tracking(*args, form="semi-atc"),
    "D2": d2,
    "SGP": lambda *args: stochastic_gradient_push(*args, rounds=2),
    "RelaySum/Model": relay_sgd,
    "RelaySum/Grad": lambda *args: relay_sgd(*args, relay="gradients"),
}
TOPOLOGIES = {"ring": "static-ring", "chain": "chain", "tree": "binary-tree", "exponential": "one-peer-exp-directed"}
TUNED_FOR_STEPS = {"All-reduce", "D2", "Gradient tracking", "RelaySum/Model", "SGP"}


class Record(NamedTuple):
    """One published run; the names are the file's."""

    algorithm: str
    topology: str
    num_workers: int
    heterogeneity: float
    r0: float
    seed: int
    recorded_lr: float
    steps: int

    @property
    def until_threshold(self) -> bool:
        """True if `steps` counts to an error below 1e-6, else to the end of progress."""
        return self.algorithm in TUNED_FOR_STEPS or self.heterogeneity == 0

    @property
    def lr(self) -> float:
        """The learning rate that was used; the figure halved some of them."""
        return self.recorded_lr * (2 if self.until_threshold else 1)


def records() -> list[Record]:
    return [Record(*row) for row in json.loads(DATA.read_text())["rows"]]


def by_run(chosen: list[Record]) -> list[list[Record]]:
    """Records that can be trained together."""
    runs = defaultdict(list)
    for record in chosen:
        runs[record.algorithm, record.topology, record.num_workers].append(record)
    return list(runs.values())


# -- the problem ------------------------------------------------------------------------------------------------------


def quadratic(record: Record) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`A [n, d, d]`, `B [n, d, 1]` of `f_i(x) = ½‖A_i x - B_i‖²`, and the optimum of their sum `[d, 1]`."""
    n = record.num_workers
    draw = torch.Generator().manual_seed(record.seed)
    A = torch.randn(n, DIM, DIM, dtype=torch.float64, generator=draw)
    U, _, V = torch.linalg.svd(A)
    A = U @ torch.diag(torch.linspace(MU, L, DIM, dtype=torch.float64)) @ V
    directions = torch.randn(n, DIM, 1, dtype=torch.float64, generator=draw)
    B = _spread(A, directions, record.heterogeneity)
    offset = torch.randn(DIM, 1, dtype=torch.float64, generator=draw)
    offset = offset * record.r0 / offset.norm()
    B = B + A @ offset
    return A, B, _optimum(A, B)


def _optimum(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lstsq(A.reshape(-1, DIM), B.reshape(-1, 1)).solution


def _spread(A: torch.Tensor, directions: torch.Tensor, heterogeneity: float) -> torch.Tensor:
    """`B` with the optimum at 0 and the workers' gradients there of mean squared norm `heterogeneity`."""
    B = torch.zeros_like(directions)
    scale, low, high, current = 1.0, 0.0, None, 0.0
    while abs(current - heterogeneity) > 1e-5:
        B = A @ (scale * directions)
        B = B - A @ _optimum(A, B)
        gradients = A.transpose(1, 2) @ (A @ _optimum(A, B) - B)
        current = float((gradients**2).sum((1, 2)).mean())
        if current < heterogeneity:
            low = max(low, scale)
        elif high is None or scale < high:
            high = scale
        scale = scale * 2 if high is None else (low + high) / 2
    return B


# -- the replay -------------------------------------------------------------------------------------------------------


class Descent:
    """u = -g: every record's learning rate stands in its loss."""

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        return trees.map(torch.neg, grads), opt_state


def loss_fn(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`Σ_r η_r · ½‖A_r x_r - B_r‖²`, of which each row's gradient is its record's alone."""
    A, B, lr = batch
    return (lr * ((A @ x[..., None] - B)[..., 0] ** 2).sum(-1)).sum() / 2


def replay(run: list[Record], progress: Callable[[int], object] = lambda steps: None) -> list[int | None]:
    """The step counts that this library finds for records of one run; None if a record never stops."""
    n, rows = run[0].num_workers, len(run)
    problems = [quadratic(record) for record in run]
    A, B = (torch.stack([p[k] for p in problems], dim=1) for k in (0, 1))
    optimum = torch.stack([p[2] for p in problems])
    lr = torch.tensor([record.lr for record in run], dtype=torch.float64).repeat(n, 1)

    def objective(x: torch.Tensor) -> torch.Tensor:
        """`[R, d, 1] -> [R]`."""
        return ((A @ x - B) ** 2).sum((0, 2, 3)) / n

    best = objective(optimum)
    topology = df.topology(TOPOLOGIES[run[0].topology], num_workers=n)
    init, step = METHODS[run[0].algorithm](loss_fn, Descent(), topology)
    state = df.stack(init(torch.zeros(rows, DIM, dtype=torch.float64)), n)
    step = df.simulate(step, n)
    if max(record.steps for record in run) > COMPILED_FROM:
        step = df.compile(step)

    found: list[int | None] = [None] * rows
    errors: list[torch.Tensor] = []
    for t in range(TESTED[-1]):
        state, _ = step(state, (A, B, lr), t)
        if t + 1 not in _TESTED:
            continue
        errors.append(objective(state.params.tree().mean(0)[..., None]) - best)
        recent = torch.stack(errors[-3:])
        below = (errors[-1] < THRESHOLD).tolist()
        still = ((recent - recent.mean(0)).abs() < FLAT).all(0).tolist() if len(recent) == 3 else [False] * rows
        for r, record in enumerate(run):
            if found[r] is None and (below if record.until_threshold else still)[r]:
                found[r] = t + 1
                progress(record.steps)
        if None not in found:
            break
    return found


_TESTED = set(TESTED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=METHODS, help="only this method's records")
    chosen = [record for record in records() if parser.parse_args().algorithm in (None, record.algorithm)]
    torch.set_num_threads(1)
    exact = 0
    with tqdm(total=sum(record.steps for record in chosen), unit="step", unit_scale=True, smoothing=0) as bar:
        for run in by_run(chosen):
            bar.set_description(f"{run[0].algorithm}, {run[0].topology}, n={run[0].num_workers}")
            for record, steps in zip(run, replay(run, bar.update), strict=True):
                exact += steps == record.steps
                if steps != record.steps:
                    tqdm.write(f"{record}: replayed {steps}")
    print(f"{exact} of {len(chosen)} records replayed to the step")
    return int(exact < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
