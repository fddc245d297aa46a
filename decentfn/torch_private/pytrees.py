"""PyTorch's own pytrees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from decentfn.torch_private.names import PYTREE


def register_node(
    cls: type[Any],
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make `cls` an inner node of torch's own pytrees, which `torch.func` walks."""
    if (register := PYTREE.find()) is not None:
        register(
            cls,
            lambda node: (list(flatten(node)[0]), flatten(node)[1]),
            lambda children, context: unflatten(context, children),
        )
