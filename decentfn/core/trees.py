"""Pytree helpers: the one place that imports optree and registers pytree nodes."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import optree
import torch
from optree import registry

from decentfn.torch_private.names import PYTREE

T = TypeVar("T")
PyTree = Any

_LEAVES = (torch.Tensor, int)
"""Types that are recognized as leaves without a look-up, so that Dynamo has less to trace."""

_DICTS = (dict, OrderedDict, defaultdict)

flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten


def leaves(tree: PyTree) -> list[Any]:
    """Return the leaves in flattening order (dicts by sorted key); None is not a leaf."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_leaves(tree)
    if isinstance(tree, _LEAVES):
        return [tree]
    node = _open(tree)
    return [tree] if node is None else [leaf for child in node[0] for leaf in leaves(child)]


def map(function: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Apply `function` to each leaf of `tree` and the corresponding parts of `others`."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_map(function, tree, *others)
    node = None if isinstance(tree, _LEAVES) else _open(tree)
    return function(tree, *others) if node is None else _rebuilt(map, function, node, others)


def _rebuilt(visit: Callable[..., Any], function: Callable[..., Any], node: Any, others: Sequence[PyTree]) -> PyTree:
    """Rebuild an opened node from `visit(function, ...)` of its children and the corresponding ones of `others`."""
    children, close = node
    opened = [_open(other) for other in others]
    rest = [() if other is None else other[0] for other in opened]
    return close([visit(function, *parts) for parts in zip(children, *rest, strict=True)])


def children(tree: dict[Any, Any]) -> list[Any]:
    """Return the values of a dict in the order of its leaves."""
    return [tree[key] for key in _ordered(tree)]


def cloned(tree: PyTree) -> PyTree:
    """Return the tree with every tensor cloned, as an autograd leaf."""

    def clone(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return map(clone, tree)


def _open(tree: PyTree) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
    """Return a node's children and the function that rebuilds it from new children; None for a leaf.

    A replacement for optree inside Dynamo, which cannot trace how optree goes through a dict.
    """
    kind = type(tree)
    if tree is None:
        return (), lambda children: None
    if kind in _nodes:
        flatten_node, unflatten_node = _nodes[kind]
        children, context = flatten_node(tree)
        return children, lambda new: unflatten_node(context, new)
    if kind is dict:
        keys = _ordered(tree)
        return [tree[key] for key in keys], lambda new: {key: new[keys.index(key)] for key in tree}
    if kind is list or kind is tuple:
        return tree, kind
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree, lambda new: kind(*new)
    if optree.register_pytree_node.get(kind) is not None:
        children, metadata, _, unflatten_one = optree.tree_flatten_one_level(cast(Any, tree))
        return children, lambda new: unflatten_one(metadata, new)
    return None


def _ordered(tree: dict[Any, Any]) -> list[Any]:
    """Return the keys in optree's order: sorted, by their types first if these differ."""
    kinds = {type(key) for key in tree}
    if len(kinds) < 2 or kinds <= {bool, int, float}:
        return sorted(tree)
    return sorted(tree, key=lambda key: (f"{type(key).__module__}.{type(key).__qualname__}", key))


def nodes(tree: PyTree) -> list[str]:
    """Return the kinds of the inner nodes, outermost first; dicts with their keys."""
    node = _open(tree)
    if node is None or tree is None:
        return []
    kind = type(tree).__name__
    own = f"{kind} of {sorted(tree)}" if isinstance(tree, _DICTS) else kind
    return [own, *(name for child in node[0] for name in nodes(child))]


_nodes: dict[type, tuple[Callable[[Any], tuple[Sequence[Any], Hashable]], Callable[[Any, Iterable[Any]], Any]]] = {}


def register_node(
    cls: type[T],
    flatten: Callable[[T], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], T],
    in_c: Callable[[T], Any] | None = None,
) -> None:
    """Make `cls` an inner node of pytrees, for optree and for torch (vmap, Dynamo) alike.

    `flatten` returns (children, static context); `unflatten` takes (context, children). `in_c` is an implementation of
    `flatten` in C, which Dynamo cannot trace.
    """
    _nodes[cls] = (flatten, unflatten)
    optree.register_pytree_node(
        cast(Any, cls),
        cast(Any, in_c or flatten),
        cast(Any, unflatten),
        namespace=registry.__dict__["__GLOBAL_NAMESPACE"],
    )
    if (register := PYTREE.find()) is not None:  # torch's own pytrees, which torch.func walks
        register(
            cls,
            lambda node: (list(flatten(node)[0]), flatten(node)[1]),
            lambda children, context: unflatten(context, children),
        )


def plain(tree: PyTree) -> PyTree:
    """Return the tree with other mappings replaced by dicts, as pytrees do not treat them as nodes.

    A no-op while tracing: `df.compile` has already done it, and before torch 2.13 Dynamo cannot trace `is not` between
    dicts.
    """
    if torch.compiler.is_dynamo_compiling():
        return tree
    if isinstance(tree, Mapping) and type(tree) not in _DICTS:
        return {key: plain(value) for key, value in tree.items()}
    if type(tree) in _DICTS or type(tree) in (list, tuple) or hasattr(tree, "_fields"):
        return optree.tree_map(plain, cast(Any, tree), is_leaf=lambda node: node is not tree)
    return tree


def map_nodes(kind: type[T], function: Callable[..., T], tree: PyTree, *others: PyTree) -> PyTree:
    """Replace each node of this kind by `function` of it and the corresponding parts of `others`; keep the rest."""
    if isinstance(tree, kind):
        return function(tree, *others)
    node = _open(tree)
    return tree if node is None else _rebuilt(partial(map_nodes, kind), function, node, others)


def named_leaves(tree: PyTree, kind: type | None = None) -> list[tuple[str, Any]]:
    """Return the leaves with their dotted paths, in flattening order; a node of this `kind` counts as a leaf.

    >>> named_leaves({"layer": {"weight": 1, "bias": 2}})
    [('layer.bias', 2), ('layer.weight', 1)]
    """
    accessors, values, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=None if kind is None else lambda node: isinstance(node, kind)
    )
    paths = (".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors)
    return list(zip(paths, values, strict=True))


def enumerate_leaves(tree: PyTree) -> PyTree:
    """Replace every leaf by its position: a template that is plain data.

    `fill(template, leaves)` is the inverse. Unlike an optree spec, the template works inside a compiled function.
    """
    positions = itertools.count()
    return map(lambda leaf: next(positions), tree)


def fill(template: PyTree, values: Sequence[T]) -> PyTree:
    """Replace the positions in `template` by the `values` at those positions."""
    return map(values.__getitem__, template)
