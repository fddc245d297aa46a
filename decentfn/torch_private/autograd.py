"""Autograd inside an operator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import increment_version


def surroundings() -> tuple[Any, Any]:
    """What PyTorch's dispatcher does here: autograd, autocast, torch.func. Compiled code switches most of it off inside."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


class Enabled:
    """Within an operator's kernel, autograd and all else is as it was `around`."""

    __slots__ = ("_around", "_guard", "_was_enabled")

    def __init__(self, around: tuple[Any, Any]) -> None:
        self._around = around

    def __enter__(self) -> None:
        self._guard = torch._C._ForceDispatchKeyGuard(*self._around)
        self._guard.__enter__()
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)
        self._guard.__exit__(*error)


def leaves_of(views: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
    """The views that a function makes, each a leaf to autograd."""
    # Below autograd a view is a tensor of its own, as after `detach`.
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS), torch._C._AutoDispatchBelowAutograd():
        return [x.requires_grad_() for x in views()]


def renew(leaves: list[Tensor]) -> None:
    """Their values are others now, so what was computed of the old ones must not be used again: as after an optimizer's step."""
    increment_version(leaves)
    torch.clear_autocast_cache()


def run_backward(loss: Tensor) -> None:
    """`loss.backward()`. On the CPU without the context that PyTorch keeps for the threads of other devices.

    The engine copies it for every node of the graph: for one that is a recurrent network, 1 to 5 % of the backward pass.
    """
    if _engine is None or type(loss) is not Tensor or loss.device.type != "cpu" or _log.isEnabledFor(logging.DEBUG):
        return loss.backward()
    _engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    return None


def is_backward() -> bool:
    """Return True if this thread runs a backward pass."""
    return _graph_task() != -1


_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_engine = getattr(Variable, "_execution_engine", None)
_log = logging.getLogger("torch.autograd.graph")
"""At level DEBUG PyTorch says which nodes it runs."""


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore[reportAttributeAccessIssue]
