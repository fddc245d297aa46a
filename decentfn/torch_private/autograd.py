"""Autograd inside an operator."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set", "_ForceDispatchKeyGuard")

missing = [name for name in _NAMES if not hasattr(torch._C, name)]
"""What `surroundings` and `dispatching_as` need of torch._C and this version of PyTorch does not have."""


def surroundings() -> tuple[Any, Any]:
    """What PyTorch's dispatcher does here: autograd, autocast, torch.func. Compiled code switches most of it off inside.

    The public `torch.inference_mode(False)` switches autograd on, but AOTAutograd, which watches the first call of compiled code,
    also has views untracked there, and torch.func and conjugates off: gradients would be wrong in that call.
    """
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


dispatching_as = getattr(torch._C, "_ForceDispatchKeyGuard", None)
"""`with dispatching_as(*surroundings):` within an operator's kernel, autograd and all else is as it was there."""


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore[reportAttributeAccessIssue]
