"""Autograd inside an operator, and a module's weights while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

_KEYS = [
    key
    for name in dir(torch._C.DispatchKey)
    if isinstance(key := getattr(torch._C.DispatchKey, name), torch._C.DispatchKey) and not name.startswith("Autocast")
]
"""What a kernel's surroundings switch off, and PyTorch outside of one does not: autograd, torch.func, nested tensors."""


_without_keys: dict[int, Any] = {}


@contextmanager
def enabled() -> Iterator[None]:
    """Autograd sees what an operator's kernel does, which runs below it."""
    around: Any = torch._C._dispatch_tls_local_exclude_set()
    excluded = _without_keys.get(around.raw_repr())
    if excluded is None:
        excluded = around
        for key in _KEYS:
            excluded = excluded.remove(key)
        _without_keys[around.raw_repr()] = excluded
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


@contextmanager
def weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module has `tensors` for its parameters and buffers, by name, also where one stands in several places.

    Afterwards it has its own again, and where it put another tensor in a place, that one is in `tensors`.
    """
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield
