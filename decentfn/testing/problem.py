"""Problem for the contract tests: few leaves, different data on every worker, exact gradients.

Each leaf has a quadratic loss in its own dtype, so float64 leaves are computed in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.core import PyTree, trees

BUCKET_MB = 0.002
"""Small, but the leaves of each dtype fit one bucket."""

_SHAPES = {"matrix": (5, 6), "nested": [(7,)], "scalar": ()}
DTYPES = (torch.float32, torch.float64)


def params(worker: int = 0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> PyTree:
    """Return initial parameters: a tree of a few leaves of each dtype, different for every worker."""
    draw = torch.Generator().manual_seed(worker)
    return {str(dtype)[6:]: _normal(draw, dtype) for dtype in dtypes}


def batch(worker: int, t: int, strength: float = 1.0, dtypes: tuple[torch.dtype, ...] = DTYPES) -> PyTree:
    """Return the worker's batch of step t: targets `[4, ...]` per leaf, and sample weights `[4]` (0: no gradient)."""
    draw = torch.Generator().manual_seed(1000 * (t + 1) + worker)
    samples = [{str(dtype)[6:]: _normal(draw, dtype) for dtype in dtypes} for _ in range(4)]
    # Workers have different minima.
    targets = trees.map(lambda *rows: torch.stack(rows) + worker / 4, *samples)
    return targets, torch.full((4,), strength)


def loss_fn(params: PyTree, batch: PyTree) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of squared distances to the targets; aux is the distance of one leaf."""
    targets, weight = batch
    pairs = list(zip(trees.leaves(params), trees.leaves(targets), strict=True))
    losses = [(weight.to(p.dtype) * ((p - y) ** 2).reshape(len(y), -1).mean(1)).mean() for p, y in pairs]
    return torch.stack([loss.float() for loss in losses]).sum(), (pairs[0][0] - pairs[0][1][0]).norm()


def loss_with_buffers(params: PyTree, buffers: PyTree, batch: PyTree) -> tuple[Tensor, tuple[PyTree, Tensor]]:
    """Return the loss with buffers like BatchNorm's: running means of the batch, and a count."""
    targets, _ = batch
    new = {
        "means": trees.map(lambda m, y: 0.9 * m + 0.1 * y.mean(0).to(m.dtype), buffers["means"], targets),
        "count": buffers["count"] + 1,
    }
    loss, aux = loss_fn(params, batch)
    return loss, (new, aux)


def buffers(worker: int = 0) -> PyTree:
    """Return buffers for `loss_with_buffers`."""
    return {"means": params(worker + 100), "count": torch.tensor(worker)}


def stacked(rows: Sequence[Any]) -> Any:
    """Stack the trees of N workers into one with leaves `[N, ...]`."""
    return trees.map(lambda *leaves: torch.stack(leaves), *rows)


def _normal(draw: torch.Generator, dtype: torch.dtype) -> PyTree:
    def leaf(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    return {key: [leaf(s) for s in shape] if isinstance(shape, list) else leaf(shape) for key, shape in _SHAPES.items()}
