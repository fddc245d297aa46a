"""PyTorch's own pytrees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch.utils import _pytree


def register_node(
    cls: type[Any],
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make `cls` an inner node of torch's own pytrees, which `vmap` and Dynamo walk."""
    _pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten(node)[0]), flatten(node)[1]),
        lambda children, context: unflatten(context, children),
    )
