"""Autograd inside an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore[reportAttributeAccessIssue]
