"""Other tensors in the places of a module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module


@contextmanager
def weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module has `tensors` for its parameters and buffers, by name, also where one stands in several places.

    Afterwards it has its own again, and where it put another tensor in a place, that one is in `tensors`. The public
    `torch.func.functional_call` gives a block that is used twice its own weights back in the wrong order.
    """
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield
