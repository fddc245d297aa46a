"""Weight of a worker's step, read from the loss's aux on both gradient paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentfn.core.buckets import sum_within_worker
from decentfn.core.formatting import brief
from decentfn.core.handles import by_handle, handle_of
from decentfn.core.scalars import operator, sent
from decentfn.core.trees import PyTree
from decentfn.gradient.result import Gradient
from decentfn.gradient.side_channel import SideChannel, value


class Weight:
    """Function from a gradient to this worker's weight, 0-d float64 and >= 0; made from one of the loss's aux.

    With `df.autograd` the aux is outside the graph; an operator reads it there. If a worker is several processes, their
    weights are added.
    """

    def __init__(self, of_aux: Callable[[PyTree], Any]) -> None:
        self.of_aux = of_aux
        self._handle = handle_of(self)

    def __call__(self, g: Gradient) -> Tensor:
        """Return the weight of the step whose gradient is `g`."""
        if isinstance(g.aux, SideChannel):
            weight = _weight(g.grads[0], self._handle, g.aux.number, 0)
        else:
            weight = _one(self.of_aux, g.aux)
        return sum_within_worker(weight.view(1), g.grads.plan.processes)[0]


def _one(of_aux: Callable[[PyTree], Any], aux: PyTree) -> Tensor:
    weight = torch.as_tensor(of_aux(aux)).detach().to(torch.float64)
    if weight.numel() != 1:
        raise ValueError(
            f"weight={brief(of_aux)}: for this step's aux it returned {list(weight.shape)} values; a worker's weight is one "
            'number, such as aux["tokens"]; under df.accumulate, whose aux is [M, ...], aux["tokens"].sum().'
        )
    return weight.reshape(())


def _kernel(token: Tensor, handle: Tensor, aux: Tensor, workers: int) -> Tensor:
    of_aux, found = by_handle(handle).of_aux, value(aux)
    weights = torch.stack([_one(of_aux, own).cpu() for own in found.of_workers])
    return sent(weights if workers else weights[0].clone(), token.device)


def _over_workers(
    info: Any, in_dims: Any, token: Tensor, handle: Tensor, aux: Tensor, workers: int
) -> tuple[Tensor, int]:
    return _weight(token.select(in_dims[0], 0), handle, aux.select(in_dims[2], 0), info.batch_size), 0


_weight = operator(
    # `workers`: 0 for one worker alone; N for N stacked ones. `aux` is the number of the gradient's outcome.
    "weight(Tensor token, Tensor function, Tensor aux, int workers) -> Tensor",
    _kernel,
    lambda token, handle, aux, workers: token.new_empty((workers,) if workers else (), dtype=torch.float64),
    _over_workers,
)
