"""Side channel of the graph: values of this thread, represented inside by a number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import trees
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
    of_workers: list[Any]
    """Aux of each worker here."""


class _Here(threading.local):
    values: list[Any] | None = None
    around: tuple[Any, Any] | None = None


_here = _Here()
_BATCH = SideChannel(torch.zeros((), dtype=torch.int64))
"""Batch of the step, which is its first value."""


def put(value: Any) -> int:
    """Keep a value until the step ends; return its number."""
    assert _here.values is not None
    _here.values.append(value)
    return len(_here.values) - 1


def value(number: Tensor) -> Any:
    """Return the value with this number, in this thread and step."""
    assert _here.values is not None
    return _here.values[int(number if number.dim() == 0 else number[0])]


def around() -> tuple[Any, Any]:
    """Return the dispatcher's state at the call of the step; see `torch_private.autograd`."""
    assert _here.around is not None
    return _here.around


def with_side_channel(function: Callable[..., Any], first: Any, batch: Any, *others: Any) -> Any:
    """Call `function(first, batch, *others)`, a step or a gradient, with `batch` and `aux` through the side channel.

    Its result, or the last part of it, has a loss and an aux.
    """
    outer = _here.values, _here.around
    values = [batch]
    _here.values, _here.around = values, surroundings()
    try:
        returned = function(first, _BATCH, *others)
        reported = returned[1] if type(returned) is tuple else returned
        if isinstance(reported.aux, SideChannel):
            outcome = values[int(reported.aux.number.view(-1)[0])]
            reported = reported._replace(loss=reported.loss.to(outcome.loss_dtype), aux=outcome.aux)
        return (returned[0], reported) if type(returned) is tuple else reported
    finally:
        _here.values, _here.around = outer
