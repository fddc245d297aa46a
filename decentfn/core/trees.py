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

from decentfn.torch_private import pytrees

T = TypeVar("T")
PyTree = Any

_LEAVES = (torch.Tensor, int)
"""Known at a glance, so that Dynamo has less to trace."""

_DICTS = (dict, OrderedDict, defaultdict)

flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten


def leaves(tree: PyTree) -> list[Any]:
    """The leaves in flattening order: dicts by sorted key; None is no leaf."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_leaves(tree)
    if isinstance(tree, _LEAVES):
        return [tree]
    node = _open(tree)
    return [tree] if node is None else [leaf for child in node[0] for leaf in leaves(child)]


def map(function: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """`function` of the leaves of `tree` and of what stands in their places in `others`, as a tree."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_map(function, tree, *others)
    node = None if isinstance(tree, _LEAVES) else _open(tree)
    return function(tree, *others) if node is None else _rebuilt(map, function, node, others)


def _rebuilt(visit: Callable[..., Any], function: Callable[..., Any], node: Any, others: Sequence[PyTree]) -> PyTree:
    """An opened node with `visit(function, ...)` of its children, and of those in their places in `others`."""
    children, close = node
    opened = [_open(other) for other in others]
    rest = [() if other is None else other[0] for other in opened]
    return close([visit(function, *parts) for parts in zip(children, *rest, strict=True)])


def cloned(tree: PyTree) -> PyTree:
    """The tree with every tensor in memory of its own; to autograd a leaf."""

    def clone(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return map(clone, tree)


def _open(tree: PyTree) -> tuple[Sequence[Any], Callable[[list[Any]], Any]] | None:
    """A node's children and the function that makes it again from others; None for a leaf.

    What optree does, for Dynamo: it cannot trace optree's own way through a dict.
    """
    kind = type(tree)
    if tree is None:
        return (), lambda children: None
    if kind in _nodes:
        flatten_node, unflatten_node = _nodes[kind]
        children, context = flatten_node(tree)
        return children, lambda new: unflatten_node(context, new)
    if kind is dict:
        keys = sorted(tree)
        return [tree[key] for key in keys], lambda new: {key: new[keys.index(key)] for key in tree}
    if kind is list or kind is tuple:
        return tree, kind
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree, lambda new: kind(*new)
    if optree.register_pytree_node.get(kind) is not None:
        children, metadata, _, unflatten_one = optree.tree_flatten_one_level(cast(Any, tree))
        return children, lambda new: unflatten_one(metadata, new)
    return None


def nodes(tree: PyTree) -> list[str]:
    """The kinds of the inner nodes, outermost first; of dicts with their keys."""
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

    `flatten` returns (children, static context); `unflatten` takes (context, children). `in_c` is `flatten` in C, which Dynamo
    cannot trace.
    """
    _nodes[cls] = (flatten, unflatten)
    optree.register_pytree_node(
        cast(Any, cls),
        cast(Any, in_c or flatten),
        cast(Any, unflatten),
        namespace=registry.__dict__["__GLOBAL_NAMESPACE"],
    )
    pytrees.register_node(cls, flatten, unflatten)


def plain(tree: PyTree) -> PyTree:
    """The tree with dicts in place of other mappings, which are no nodes to pytrees.

    In a trace it is so already: `df.compile` has done it, and before torch 2.13 Dynamo cannot trace `is not` between dicts.
    """
    if torch.compiler.is_dynamo_compiling():
        return tree
    if isinstance(tree, Mapping) and type(tree) not in _DICTS:
        return {key: plain(value) for key, value in tree.items()}
    if type(tree) in _DICTS or type(tree) in (list, tuple) or hasattr(tree, "_fields"):
        return optree.tree_map(plain, cast(Any, tree), is_leaf=lambda node: node is not tree)
    return tree


def map_nodes(kind: type[T], function: Callable[..., T], tree: PyTree, *others: PyTree) -> PyTree:
    """`tree` with `function` of each node of this kind and of what stands in its place in `others`; the rest stays."""
    if isinstance(tree, kind):
        return function(tree, *others)
    node = _open(tree)
    return tree if node is None else _rebuilt(partial(map_nodes, kind), function, node, others)


def named_leaves(tree: PyTree, kind: type | None = None) -> list[tuple[str, Any]]:
    """The leaves with their dotted paths, in flattening order; a node of this `kind` counts as a leaf.

    >>> named_leaves({"layer": {"weight": 1, "bias": 2}})
    [('layer.bias', 2), ('layer.weight', 1)]
    """
    accessors, values, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=None if kind is None else lambda node: isinstance(node, kind)
    )
    paths = (".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor) for accessor in accessors)
    return list(zip(paths, values, strict=True))


def enumerate_leaves(tree: PyTree) -> PyTree:
    """The same tree with every leaf replaced by its position: a template that is plain data.

    `fill(template, leaves)` is its inverse. Unlike an optree spec it can be used inside a compiled function.
    """
    positions = itertools.count()
    return map(lambda leaf: next(positions), tree)


def fill(template: PyTree, values: Sequence[T]) -> PyTree:
    """The tree whose leaf positions `template` holds, with `values` at those positions."""
    return map(values.__getitem__, template)
