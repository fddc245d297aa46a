"""Weights of a module in compiled code."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from decentfn.torch_private.names import WEIGHTS

_reparametrized = WEIGHTS.find()


def traced_weights(module: nn.Module, tensors: dict[str, Any]) -> AbstractContextManager[None]:
    """Replace `lending.weights` while a step is traced; names are the module's own."""
    return _reparametrized(module, tensors, tie_weights=True, stack_weights=True)
