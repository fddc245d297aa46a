"""Autograd inside an operator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from decentfn.torch_private.names import DISPATCH

_included, _excluded, dispatching_as = (private.find() for private in DISPATCH)
"""Context `dispatching_as(*surroundings())` restores, within an operator's kernel, the dispatcher's outer state."""

missing = [private.name for private in DISPATCH if private.find() is None]
"""Needed names that this version of PyTorch lacks."""


def version(x: Any) -> Any:
    """Return a number that PyTorch raises whenever a tensor is written in place; None for a tensor without."""
    return None if x.is_inference() else x._version


def surroundings() -> tuple[Any, Any]:
    """Return the state of PyTorch's dispatcher: autograd, autocast, torch.func. Compiled code turns most of it off.

    In AOTAutograd, the public `torch.inference_mode(False)` would leave views untracked, and so gradients wrong.
    """
    return _included(), _excluded()


def allow_saved_tensors_hooks() -> None:
    """Allow activation checkpointing again on this thread: a failed compilation of torch.func.grad disables it."""
    hooks = torch.autograd.graph.disable_saved_tensors_hooks("")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(hooks.__enter__).result()  # in a thread where they are allowed
    hooks.__exit__(None, None, None)  # and so allows them here
