"""What travels beside the graph: a value of this thread, known inside by a number."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from decentfn.core import trees
from decentfn.core.scalars import integer
from decentfn.torch_private.autograd import surroundings


class Beside:
    """A value that is not in the graph: a pytree node of one leaf, the number under which `value` finds it."""

    def __init__(self, number: Tensor) -> None:
        self.number = number  # 0-d int64 on the CPU; [N], all equal, of N workers

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"batch.{name}: within a step whose loss is df.autograd(loss_fn) the batch cannot be looked at; pass it to "
            "worker.gradient as it came."
        )


trees.register_node(Beside, lambda node: ((node.number,), None), lambda _, children: Beside(*children))


class Outcome(NamedTuple):
    """Values beside the graph of an evaluation of the loss."""

    loss_dtype: torch.dtype
    aux: Any


class _Here(threading.local):
    values: dict[int, Any] | None = None
    around: tuple[Any, Any] | None = None


_here = _Here()
_numbers = itertools.count()


def put(value: Any) -> int:
    """The number of a value, which is kept until the step ends."""
    assert _here.values is not None
    number = next(_numbers)
    _here.values[number] = value
    return number


def value(number: Tensor) -> Any:
    """What was put under this number, in this thread and step."""
    return (_here.values or {})[int(number if number.dim() == 0 else number[0])]


def around() -> tuple[Any, Any]:
    """What surrounded the step, where it was called: see `torch_private.autograd`."""
    assert _here.around is not None
    return _here.around


def passing_beside(function: Callable[[Beside], Any], batch: Any) -> Any:
    """`function(batch)`, a step or a gradient, whose batch goes in beside the graph, as `aux` comes out.

    What it returns, or the last part of it, has a loss and an aux.
    """
    outer = _here.values, _here.around
    _here.values, _here.around = {}, surroundings()
    try:
        returned = function(Beside(integer(put(batch))))
        return (returned[0], _arrived(returned[1])) if type(returned) is tuple else _arrived(returned)
    finally:
        _here.values, _here.around = outer


def _arrived(reported: Any) -> Any:
    """Metrics, or a gradient, with the loss in its own dtype and its aux, where the operator's number for both can be read."""
    if not isinstance(reported.aux, Beside):
        return reported
    outcome = value(reported.aux.number)
    return reported._replace(loss=reported.loss.to(outcome.loss_dtype), aux=outcome.aux)
