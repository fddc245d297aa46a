"""A small network with data of its own for every worker, and the contract's algorithms on it: what tests run in every interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import decentfn as df
from decentfn.core import trees
from decentfn.testing import Subject
from tests.contract import ROWS, on

CORE = ("adapt_while_communicate", "adapt_then_combine", "all_reduce")
"""The algorithms that run on every topology."""


def subject(row: str) -> Subject:
    """A row of the contract; or a core algorithm on a topology: "adapt_then_combine on ring"."""
    algorithm, _, topology = row.partition(" on ")
    if not topology:
        return ROWS[row]
    arguments = {"local_world_size": 2} if topology == "alternating-exp-ring" else {}
    return Subject(getattr(df, algorithm), on(topology, **arguments))


def build(row: str, num_workers: int, optimizer: Any = None, loss: Any = None, **options: Any) -> df.Algorithm:
    """The row's algorithm with a small network's loss; with its usual optimizer where none is given."""
    # Adam would turn the rounding of a small gradient into a whole step.
    plain = " on " not in row or "wire_dtype" in options
    optimizer = optimizer or (df.sgd(0.05) if plain else df.adamw(0.01, weight_decay=0.1))
    chosen = subject(row)
    options = {"bucket_mb": 0.002, **chosen.hyperparameters, **options}
    return chosen.build(num_workers, loss or loss_fn, optimizer, **options)


def params() -> dict[str, Any]:
    """Several buckets and two dtypes; a scalar; every gradient is different from zero."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return 0.3 * torch.randn(shape, generator=random).to(dtype)

    return {
        "hidden": {"weight": normal(12, 24), "bias": normal(24)},
        "output": [normal(24, 6), normal(6, dtype=torch.float64)],
        "scale": torch.tensor(0.7),
    }


def loss_fn(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    hidden = torch.tanh(inputs @ params["hidden"]["weight"] + params["hidden"]["bias"])
    output = hidden @ params["output"][0] * params["scale"] + params["output"][1].to(torch.float32)
    error = ((output - targets) ** 2).mean()
    return error, output.mean()


def batches(num_workers: int, t: int) -> tuple[Tensor, Tensor]:
    """Every worker's own data of step t, `[N, 8, 12]` and `[N, 8, 6]`, heterogeneous."""
    random = torch.Generator().manual_seed(1000 + t)
    shift = torch.arange(num_workers).view(-1, 1, 1) / num_workers
    inputs = torch.randn(num_workers, 8, 12, generator=random) + shift
    return inputs, torch.sin(inputs[..., :6] * (1 + shift)) + 0.1 * torch.randn(num_workers, 8, 6, generator=random)


def simulated(row: str, num_workers: int, steps: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """All leaves of the stacked state after `steps`, and the losses `[steps, N]`."""
    init, step = build(row, num_workers, **options)
    state = df.stack(init(params()), num_workers)
    step = df.simulate(step, num_workers)
    losses = []
    for t in range(steps):
        state, metrics = step(state, batches(num_workers, t), t)
        losses.append(metrics.loss)
    return trees.leaves(state), losses


def on_this_rank(
    row: str, steps: int, local: int = 1, backend: str | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The same under the process group: the leaves of this rank's state and its losses."""
    here = df.init()
    init, step = build(row, here.size * local, **options)
    state = init(params())
    if local > 1:
        state, step = df.stack(state, local), df.simulate(step, local)
    step = df.compile(step, backend=backend) if backend else step
    rows = slice(here.rank * local, (here.rank + 1) * local) if local > 1 else here.rank
    losses = []
    for t in range(steps):
        batch = tuple(x[rows] for x in batches(here.size * local, t))
        state, metrics = step(state, batch, t)
        losses.append(metrics.loss)
    return [leaf.clone() for leaf in trees.leaves(state)], losses
