"""Signs of healthy and of faulty runs: the same small training, correct and with one fault at a time.

python examples/healthy_run.py              the table of docs/healthy_run.md
python examples/healthy_run.py --steps 50   quicker

Eight simulated workers learn scikit-learn's digits. Every row reports signs that a run can watch while it trains.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import tyro
from skewed_digits import Data, load, loss_fn, predict, start
from torch import Tensor
from torch.func import vmap

import decentfn as df

N, MOMENTUM = 8, 0.9
RING = df.topology("static-ring", N)
ONE_PEER = df.topology("one-peer-exp", N)


def hardly_worker_7() -> df.Topology:
    """A ring that gives worker 7's links almost no weight. (With none at all the library refuses it.)"""
    weights = df.mixing_matrix(RING, 0)
    weights[7], weights[:, 7] = weights[7] / 1e4, weights[:, 7] / 1e4
    weights.fill_diagonal_(0.0)
    return df.topologies.from_matrices("hardly-worker-7", (weights + torch.diag(1 - weights.sum(1)))[None])


def two_rings() -> df.Topology:
    """Workers 0 to 3 and 4 to 7 never meet."""
    ring = df.mixing_matrix(df.topology("static-ring", 4), 0)
    return df.topologies.from_matrices("two-rings", torch.block_diag(ring, ring)[None])


@dataclass(frozen=True)
class Case:
    """One run: by default D-PSGD on a one-peer schedule, data nearly equal."""

    topology: df.Topology = ONE_PEER
    algorithm: Callable[..., df.Algorithm] = df.adapt_while_communicate
    learning_rate: float = 0.1  # of SGD with momentum 0.9
    adamw: bool = False  # AdamW instead
    alpha: float = 10.0
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    same_start: bool = True
    random_labels: bool = False  # worker 7's


HEALTHY = {
    "equal data": Case(),
    "equal data, on a ring": Case(RING),
    "equal data, on a chain": Case(df.topology("chain", N)),
    "equal data, AdamW": Case(learning_rate=1e-2, adamw=True),
    "skewed data": Case(alpha=0.1),
    "skewed data, on a ring": Case(RING, alpha=0.1),
    "skewed data, gradient tracking": Case(alpha=0.1, algorithm=df.gradient_tracking),
    "skewed data, AdamW, gradient tracking": Case(
        learning_rate=1e-2, adamw=True, alpha=0.1, algorithm=df.gradient_tracking
    ),
    "skewed data, D² on a ring": Case(RING, alpha=0.1, algorithm=df.d2),
}
SICK = {
    "worker 7 hardly mixes": Case(hardly_worker_7()),
    "a topology in two parts": Case(two_rings()),
    "nobody mixes (gamma=0)": Case(hyperparameters={"gamma": 0.0}),
    "nobody mixes, AdamW": Case(learning_rate=1e-2, adamw=True, hyperparameters={"gamma": 0.0}),
    "learning rate x 20": Case(learning_rate=2.0),
    "learning rate x 20, skewed data": Case(learning_rate=2.0, alpha=0.1),
    "other starts": Case(same_start=False),
    "other starts, nobody mixes": Case(same_start=False, hyperparameters={"gamma": 0.0}),
    "skewed data, AdamW": Case(learning_rate=1e-2, adamw=True, alpha=0.1),
    "worker 7 has random labels": Case(random_labels=True),
}


class Signs(NamedTuple):
    """Signs that a run can watch, over its last fifth, and its result."""

    distance: float  # consensus distance / norm of the mean parameters
    growth: float  # that distance, over what it was in the fifth before
    steps_apart: float  # consensus distance / how far a worker goes in a step, see `one_step`
    outlier: float  # the worker farthest from the mean, over the median worker
    spread: float  # (highest - lowest worker's loss) / mean loss
    loss: float  # mean over workers, over that of the first fifth
    grad_norm: float  # mean over workers, over that of the first fifth
    mean_model: float  # held-out accuracy of the mean parameters, in [0, 1]
    worst: float  # held-out accuracy of the worst worker


def one_step(case: Case, grad_norm: Tensor) -> Tensor:
    """Return one worker's step length: η / (1 - momentum) of its gradient for SGD, about η per parameter for AdamW."""
    size = sum(leaf.numel() for leaf in start(0).values())
    return (
        torch.tensor(case.learning_rate * size**0.5) if case.adamw else case.learning_rate / (1 - MOMENTUM) * grad_norm
    )


def train(case: Case, steps: int = 300, seed: int = 0) -> Signs:
    """One run of N workers, 16 images each per step."""
    data, held_out = load()
    parts = df.data.dirichlet_shards(data.labels, N, case.alpha, seed)
    shards = df.data.fixed_shards(parts, batch_size=16, seed=seed)

    optimizer = df.adamw(case.learning_rate) if case.adamw else df.sgd(case.learning_rate, momentum=MOMENTUM)
    init, step = case.algorithm(loss_fn, optimizer, case.topology, **case.hyperparameters)
    state, step = df.stack(init(start(seed)), N), df.simulate(step, N)
    if not case.same_start:
        starts = [start(seed + worker) for worker in range(N)]
        state = df.with_params(state, {name: torch.stack([one[name] for one in starts]) for name in starts[0]})

    seen = []  # per step: losses, gradient norms and distances of the workers, norm of the mean
    noise = torch.Generator().manual_seed(seed)
    for t in range(steps):
        sample = shards.stacked_at(t)
        targets = data.labels[sample]
        if case.random_labels:
            targets[7] = torch.randint(0, 10, targets[7].shape, generator=noise)
        state, metrics = step(state, Data(data.images[sample], targets), t)
        mean = df.consensus_mean(state)
        norm = torch.stack([leaf.double().norm() for leaf in mean.values()]).norm()
        seen.append((metrics.loss, metrics.grad_norm, df.distance_to_consensus(state), norm))

    losses, grads, away, norms = (torch.stack(column).double() for column in zip(*seen, strict=True))
    _, _, _, before, last = torch.arange(steps).tensor_split(5)
    first = slice(0, len(last))
    distance = away.square().mean(1).sqrt()  # [steps], df.consensus_distance of each
    loss, apart = losses[last].mean(0), away[last].mean(0)  # [N]
    accuracies = (vmap(predict, (0, None))(df.params(state), held_out.images).argmax(-1) == held_out.labels).float()
    known = predict(df.consensus_mean(state), held_out.images).argmax(-1) == held_out.labels
    found = Signs(
        distance=(distance[last] / norms[last]).mean(),
        growth=distance[last].mean() / distance[before].mean(),
        steps_apart=distance[last].mean() / one_step(case, grads[last].mean()),
        outlier=apart.max() / apart.median(),
        spread=(loss.max() - loss.min()) / loss.mean(),
        loss=losses[last].mean() / losses[first].mean(),
        grad_norm=grads[last].mean() / grads[first].mean(),
        mean_model=known.float().mean(),
        worst=accuracies.mean(1).min(),
    )
    return Signs(*(value.item() for value in found))


def table(results: dict[str, Signs]) -> str:
    """Markdown, a row for each run."""
    heads = ["run", "distance / norm", "its growth", "distance in steps", "farthest / median worker", "loss spread"]
    heads += ["loss, end / start", "gradient norm, end / start", "mean model, %", "worst worker, %"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, signs in results.items():
        cells = [f"{value:.2g}" for value in signs[:-2]] + [f"{100 * value:.1f}" for value in signs[-2:]]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main(steps: int = 300, seed: int = 0) -> None:
    """Print both tables."""
    if steps < 5:
        print(
            f"healthy_run: --steps {steps}: the signs are means over a fifth of the steps, so at least 5.",
            file=sys.stderr,
        )
        sys.exit(2)
    for title, cases in (("Healthy", HEALTHY), ("Sick", SICK)):
        print(f"{title}\n\n{table({name: train(case, steps, seed) for name, case in cases.items()})}\n", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
