"""Side channel of the graph: values of this thread, represented inside by a number; and weights, read from one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, by_handle, context, handle_of, operator, sent, trees
from decentfn.core.buckets import sum_within_worker
from decentfn.gradient.result import Gradient
from decentfn.torch_private.autograd import surroundings


class SideChannel:
    """Value outside the graph: a pytree node of one leaf, the number under which `value` finds it."""

    def __init__(self, number: Tensor) -> None:
        self.number = number  # 0-d int64 on the CPU; [N], all equal, for N workers


trees.register_node(SideChannel, lambda node: ((node.number,), None), lambda _, children: SideChannel(*children))


class Outcome(NamedTuple):
    """Values of an evaluation of the loss that use the side channel."""

    loss_dtype: torch.dtype
    aux: Any
    of_workers: list[Any]  # aux of each worker here


_BATCH = SideChannel(torch.zeros((), dtype=torch.int64))  # batch of the step, which is its first value


def put(value: Any) -> int:
    """Keep a value until the step ends; return its number."""
    context.outside.append(value)
    return len(context.outside) - 1


def value(number: Tensor) -> Any:
    """Return the value with this number, in this thread and step."""
    return context.outside[int(number if number.dim() == 0 else number[0])]


def with_side_channel(run: Callable[..., tuple[Any, Any]], state: Any, batch: Any, t: Tensor) -> tuple[Any, Any]:
    """Take a step with its batch and aux through the side channel."""
    outer = context.outside, context.dispatching
    values = [batch]
    context.outside, context.dispatching = values, surroundings()
    try:
        new, metrics = run(state, _BATCH, t)
        if isinstance(metrics.aux, SideChannel):
            outcome = values[int(metrics.aux.number.view(-1)[0])]
            metrics = metrics._replace(loss=metrics.loss.to(outcome.loss_dtype), aux=outcome.aux)
        return new, metrics
    finally:
        context.outside, context.dispatching = outer


# -- a worker's weight, from the loss's aux on both gradient paths -------------------------------------------------------


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


_weight = operator(
    # `aux` is the number of the gradient's outcome.
    "weight(Tensor token, Tensor function, Tensor aux, int workers) -> Tensor",
    _kernel,
    lambda token, handle, aux, workers: token.new_empty((workers,) if workers else (), dtype=torch.float64),
    ("token",),
)
