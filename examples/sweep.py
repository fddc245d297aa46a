"""Error against learning rate: six algorithms, thirteen learning rates each, all of an algorithm's runs at once.

    python examples/sweep.py              the table and the picture of docs/heterogeneity.md
    python examples/sweep.py --alone      the same runs one after the other, to compare the time

BlueFog's logistic regression: eight workers on a ring, each with its own 20 samples. At the learning rate 0.1 the errors
after 1,000 steps are published: about 2e-8 for methods that correct the bias, 8.2e-2 and 6.5e-2 for diffusion and DGD.
`main` returns columns: `pandas.DataFrame(main())` is the table.
"""

import time
from pathlib import Path

import command_line
import torch
from matplotlib.figure import Figure
from torch import Tensor

import decentfn as df

N, SAMPLES, DIM, RHO = 8, 20, 5, 0.01
RATES = [0.1 * 2 ** (k / 2) for k in range(-6, 7)]
ALGORITHMS = {
    "DGD": df.adapt_while_communicate,
    "diffusion": df.adapt_then_combine,
    "exact diffusion": df.exact_diffusion,
    "EXTRA": df.extra,
    "gradient tracking": df.gradient_tracking,
    "push-DIGing": df.push_diging,
}


def samples() -> tuple[Tensor, Tensor]:
    """Features `[N, 20, 5]` and labels ±1 `[N, 20]`, drawn in float32 under each worker's own seed."""
    features, labels = [], []
    for worker in range(N):
        draw = torch.Generator().manual_seed(123417 * worker)
        X, w = (torch.randn(*shape, generator=draw).double() for shape in ((SAMPLES, DIM), (DIM, 1)))
        positive = torch.rand(SAMPLES, 1, generator=draw).double() < 1 / (1 + torch.exp(X @ w))
        features.append(X)
        labels.append(2.0 * positive[:, 0].double() - 1)
    return torch.stack(features), torch.stack(labels)


def loss_fn(x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    X, y = batch
    return torch.log1p(torch.exp(-y * (X @ x))).mean() + RHO / 2 * torch.linalg.vector_norm(x)


def optimum(steps: int = 20_000) -> Tensor:
    """The minimum of the mean loss over all samples, by gradient steps of one worker that has them all."""
    X, y = (part.flatten(0, 1) for part in samples())
    x = torch.zeros(DIM, dtype=torch.float64)
    for _ in range(steps):
        residual = -y * torch.sigmoid(-y * (X @ x))
        x = x - 0.1 * (X.T @ residual / len(y) + RHO / 2 * x / x.norm().clamp(min=1e-300))
    return x


def train(name: str, rates: list[float], steps: int) -> Tensor:
    """Worker 0's parameters after so many steps with each learning rate, `[R, 5]`: one sweep."""
    ring, start = df.topology("static-ring", N), torch.zeros(DIM, dtype=torch.float64)
    init, step = ALGORITHMS[name](loss_fn, df.sgd(1.0), ring)
    states = df.stack_runs([df.stack(init(start), N)] * len(rates))
    states = df.set_learning_rate(states, torch.tensor(rates, dtype=torch.float64)[:, None].expand(-1, N))
    step, batches = df.sweep(df.simulate(step, N), len(rates)), df.stack(samples(), len(rates))
    for t in range(steps):
        states, _ = step(states, batches, t)
    return df.params(states)[:, 0]


def picture(table: dict[str, list]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for name in ALGORITHMS:
        rows = [i for i, its in enumerate(table["algorithm"]) if its == name and table["error"][i] < 10]
        x, y = ([table[column][i] for i in rows] for column in ("learning_rate", "error"))
        panel.loglog(x, y, marker="o", markersize=4, label=name)
    panel.plot([0.1] * 3, [2.2e-8, 8.2e-2, 6.5e-2], "k+", markersize=12, label="published")
    panel.set_xlabel("learning rate")
    panel.set_ylabel("distance to the optimum after 1,000 steps")
    panel.grid(color="0.9")
    panel.legend(frameon=False, fontsize=9)
    return figure


def main(steps: int = 1000, alone: bool = False, path: Path = Path("runs/sweep.png")) -> dict[str, list]:
    """Returns columns with a row for each algorithm and learning rate.

    Args:
        steps: of each run.
        alone: train one run after the other.
        path: of the picture.
    """
    command_line.at_least(1, steps=steps)
    table: dict[str, list] = {"algorithm": [], "learning_rate": [], "error": []}
    best, started = optimum(), time.process_time()
    print("learning rate    " + "".join(f"{rate:9.3f}" for rate in RATES))
    for name in ALGORITHMS:
        x = torch.cat([train(name, [rate], steps) for rate in RATES]) if alone else train(name, RATES, steps)
        errors = (x - best).norm(dim=-1).tolist()
        print(f"{name:17}" + "".join(f"{error:9.1e}" for error in errors))
        table["algorithm"] += [name] * len(RATES)
        table["learning_rate"] += RATES
        table["error"] += errors
    print(f"{len(RATES) * len(ALGORITHMS)} runs in {time.process_time() - started:.1f} s of CPU time")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(table).savefig(path, dpi=130)
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line.run(main)
