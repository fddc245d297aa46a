"""Pytree helpers: the one place that imports optree and registers pytree nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import optree
import torch
from optree import registry
from torch import Tensor

from decentfn import internals

T = TypeVar("T")
PyTree = Any

map = optree.tree_map
leaves = optree.tree_leaves
flatten = optree.tree_flatten


def register_node(
    cls: type[T],
    flatten: Callable[[T], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], T],
) -> None:
    """Make `cls` an inner node of pytrees, for optree and for torch (vmap, Dynamo) alike.

    `flatten` returns (children, static context); `unflatten` takes (context, children).
    """
    optree.register_pytree_node(
        cls,  # type: ignore[arg-type]
        lambda node: (*flatten(node), None),
        unflatten,
        namespace=registry.__dict__["__GLOBAL_NAMESPACE"],
    )
    internals.register_torch_node(cls, flatten, unflatten)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves with their dotted paths, in flattening order.

    >>> named_leaves({"layer": {"weight": 1, "bias": 2}})
    [('layer.bias', 2), ('layer.weight', 1)]
    """
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return [(".".join(str(entry) for entry in path), leaf) for path, leaf in zip(paths, values, strict=True)]


def enumerate_leaves(tree: PyTree) -> PyTree:
    """The same tree with every leaf replaced by its position: a template that is plain data.

    `fill(template, leaves)` is its inverse. Unlike an optree spec it can be used inside a compiled function.
    """
    values, spec = optree.tree_flatten(tree)
    return optree.tree_unflatten(spec, range(len(values)))


def fill(template: PyTree, values: Sequence[T]) -> PyTree:
    """The tree whose leaf positions `template` holds, with `values` at those positions."""
    return optree.tree_map(lambda position: values[position], template)


def tensors(tree: PyTree) -> list[Tensor]:
    """The leaves that are tensors."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
