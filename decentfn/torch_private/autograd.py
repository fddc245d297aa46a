"""Autograd inside an operator."""

from __future__ import annotations

from typing import Any

import torch

from decentfn.torch_private import functorch
from decentfn.torch_private.names import DISPATCH

_included, _excluded, dispatching_as = (private.find() for private in DISPATCH)
"""`with dispatching_as(*surroundings()):` within an operator's kernel, autograd and all else is as it was there."""

missing = [private.name for private in DISPATCH if private.find() is None]
"""What this needs and this version of PyTorch does not have."""


def surroundings() -> tuple[Any, Any]:
    """What PyTorch's dispatcher does here: autograd, autocast, torch.func. Compiled code switches most of it off inside.

    The public `torch.inference_mode(False)` switches autograd on, but AOTAutograd, which watches the first call of compiled code,
    also has views untracked there, and torch.func and conjugates off: gradients would be wrong in that call.
    """
    return _included(), _excluded()


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    hooks = torch.autograd.graph.disable_saved_tensors_hooks("")
    functorch.outside_transforms(hooks.__enter__)  # in a thread where they are allowed
    hooks.__exit__(None, None, None)  # and so allows them here
