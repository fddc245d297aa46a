"""CUDA graphs without a GPU: a recorder of the kernels that a function runs, with the memory that they read and write.

As in a CUDA graph, a replay runs these kernels alone, on the same memory: no Python of the step or of its operators,
and no number that the host has read. Recording changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decentfn.core import trees
from decentfn.core.scalars import kernels
from decentfn.kit.step import Step


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            if function in kernels:
                return kernels[function](*args, **kwargs)
            if (parts := function.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        for argument, x in [*zip(function._schema.arguments, args, strict=False), *_named(function, kwargs)]:
            if argument.is_write and isinstance(x, Tensor):
                self.before.append((x, x.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def undo(self) -> None:
        for x, old in reversed(self.before):
            x.copy_(old)

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            new = function(*args, **kwargs)
            for declared, old, value in zip(function._schema.returns, _several(result), _several(new), strict=False):
                if declared.alias_info is None and isinstance(old, Tensor):
                    old.copy_(value)


def _named(function: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in function._schema.arguments if argument.name in kwargs]


def _several(result: Any) -> Any:
    return result if isinstance(result, (tuple, list)) else [result]


def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A `decentfn.engine.cuda_graphs.Recorder`."""
    with torch.random.fork_rng(), Tape() as tape:
        result = function()
    tape.undo()
    return tape.replay, result


def in_place(step: Step) -> Callable[..., tuple[Any, Any]]:
    """The step as a compiled and donated one runs: the new state is written over the old one."""

    def run(state: Any, batch: Any, t: Tensor) -> tuple[Any, Any]:
        new, metrics = step.run(state, batch, t)
        metrics = trees.map(lambda x: x.clone(), metrics)
        for x, y in [(x, y.clone()) for x, y in zip(trees.leaves(state), trees.leaves(new), strict=True)]:
            x.copy_(y)
        return state, metrics

    return run
