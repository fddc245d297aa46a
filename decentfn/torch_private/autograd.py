"""Autograd inside an operator, and a module's weights while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module


def surroundings() -> tuple[Any, Any]:
    """What PyTorch's dispatcher does here: autograd, autocast, torch.func. Compiled code switches most of it off inside."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def enabled(around: tuple[Any, Any]) -> Iterator[None]:
    """Within an operator's kernel, autograd and all else is as it was `around`."""
    with torch._C._ForceDispatchKeyGuard(*around), torch.enable_grad():
        yield


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module has `tensors` for its parameters and buffers, by name, also where one stands in several places.

    Afterwards it has its own again, and where it put another tensor in a place, that one is in `tensors`.
    """
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield
