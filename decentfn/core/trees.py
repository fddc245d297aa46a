"""Pytree helpers: the one place that registers pytree nodes."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import optree
import torch
from optree import registry

from decentfn.torch_private.names import PYTREE

T = TypeVar("T")
PyTree = Any

_LEAVES = (torch.Tensor, int)  # types that are recognized as leaves without a look-up, so that Dynamo has less to trace

_DICTS = (dict, OrderedDict, defaultdict)

_DISPATCH = vars(torch.Tensor)["__torch_dispatch__"]

flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten


def take_apart(tree: PyTree) -> tuple[list[Any], Any]:
    """Return the leaves, and the structure for `put_together`; `flatten` is this for code that is not traced."""
    return (leaves(tree), enumerate_leaves(tree)) if torch.compiler.is_dynamo_compiling() else flatten(tree)


def put_together(structure: Any, values: Sequence[Any]) -> PyTree:
    """Return the tree of this structure with these leaves."""
    return fill(structure, values) if torch.compiler.is_dynamo_compiling() else structure.unflatten(values)


def leaves(tree: PyTree) -> list[Any]:
    """Return the leaves in flattening order (dicts by sorted key); None is not a leaf."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_leaves(tree)
    found, left = [], [tree]
    while left:
        node = left.pop()
        its = None if isinstance(node, _LEAVES) else _children(node)
        if its is None:
            found.append(node)
        else:
            left += its[::-1]
    return found


def unsorted(tree: PyTree) -> list[Any]:
    """Return the leaves in the tree's own order, in which dicts are not sorted."""
    its = list(tree.values()) if type(tree) in _DICTS else _children(tree)
    return [tree] if its is None else [leaf for child in its for leaf in unsorted(child)]


def map(function: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Apply `function` to each leaf of `tree` and the corresponding parts of `others`."""
    if not torch.compiler.is_dynamo_compiling():
        return optree.tree_map(function, tree, *others)
    if isinstance(tree, _LEAVES) or (its := _children(tree)) is None:
        return function(tree, *others)
    new = []
    for parts in zip(its, *[_children(other) for other in others], strict=True):
        new.append(function(*parts) if isinstance(parts[0], _LEAVES) else map(function, *parts))
    return _like(tree, new)


def children(tree: dict[Any, Any]) -> list[Any]:
    """Return the values of a dict in the order of its leaves."""
    return [tree[key] for key in _ordered(tree)]


def _children(tree: PyTree) -> Sequence[Any] | None:
    """Return a node's children; None for a leaf. With `_like`, a replacement for optree, which Dynamo cannot trace."""
    kind = type(tree)
    if tree is None:
        return ()
    if kind in _nodes:
        return _nodes[kind][0](tree)[0]
    if kind is dict:
        return children(tree)
    if kind in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return tree
    if optree.register_pytree_node.get(kind) is None:
        return None
    return optree.tree_flatten_one_level(cast(Any, tree))[0]


def _like(tree: PyTree, new: list[Any]) -> PyTree:
    """Return a node like `tree` with new children."""
    kind = type(tree)
    if tree is None:
        return None
    if kind in _nodes:
        flatten_node, unflatten_node = _nodes[kind]
        return unflatten_node(flatten_node(tree)[1], new)
    if kind is dict:
        keys = _ordered(tree)
        return {key: new[keys.index(key)] for key in tree}
    if kind in (list, tuple):
        return kind(new)
    if isinstance(tree, tuple):
        return kind(*new)
    _, metadata, _, unflatten_one = optree.tree_flatten_one_level(cast(Any, tree))
    return unflatten_one(metadata, new)


def _ordered(tree: dict[Any, Any]) -> list[Any]:
    """Return the keys in optree's order: sorted, by their types first if these differ."""
    for key in tree:
        if type(key) is not str:
            break
    else:
        return sorted(tree)
    kinds = {type(key) for key in tree}
    if len(kinds) < 2 or kinds <= {bool, int, float}:
        return sorted(tree)
    return sorted(tree, key=lambda key: (f"{type(key).__module__}.{type(key).__qualname__}", key))


def nodes(tree: PyTree) -> list[str]:
    """Return the kinds of the inner nodes, outermost first; dicts with their keys."""
    its = None if isinstance(tree, _LEAVES) else _children(tree)
    if its is None or tree is None:
        return []
    kind = type(tree).__name__
    own = f"{kind} of {sorted(tree)}" if isinstance(tree, _DICTS) else kind
    return [own, *(name for child in its for name in nodes(child))]


_nodes: dict[type, tuple[Callable[[Any], tuple[Sequence[Any], Hashable]], Callable[[Any, Iterable[Any]], Any]]] = {}


def register_node(
    cls: type[T],
    flatten: Callable[[T], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Iterable[Any]], T],
    in_c: Callable[[T], Any] | None = None,
) -> None:
    """Make `cls` an inner node of pytrees, for optree and for torch (vmap, Dynamo) alike.

    `flatten` returns (children, static context); `in_c` is the same in C, which Dynamo cannot trace.
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


def is_flat(tree: PyTree) -> bool:
    """Return True for a plain tensor, or a list or tuple of these."""
    return type(tree) is torch.Tensor or type(tree) in (list, tuple) and all(type(x) is torch.Tensor for x in tree)


def plain(tree: PyTree) -> PyTree:
    """Return the tree with other mappings than tensors' (a TensorDict) replaced by dicts; a no-op while tracing."""
    if torch.compiler.is_dynamo_compiling() or hasattr(type(tree), "__torch_function__") or is_flat(tree):
        return tree
    if isinstance(tree, Mapping) and type(tree) not in _DICTS:
        return {key: plain(value) for key, value in tree.items()}
    if type(tree) in _DICTS or type(tree) in (list, tuple) or hasattr(tree, "_fields"):
        return optree.tree_map(plain, cast(Any, tree), is_leaf=lambda node: node is not tree)
    return tree


def not_plain(leaf: torch.Tensor) -> str:
    """Return what keeps a tensor from being plain numbers in memory, or an empty string."""
    if leaf.is_quantized:
        return "quantized"
    return "on the meta device, without values" if leaf.is_meta else not_dense(leaf)


def not_dense(leaf: torch.Tensor) -> str:
    """Return "nested", or the layout of a tensor that is not strided, or an empty string."""
    if leaf.is_nested:
        return "nested"
    return "" if leaf.layout == torch.strided else str(leaf.layout).removeprefix("torch.")


def unclassed(x: Any) -> Any:
    """Return a tensor whose class only adds methods to tensors as a plain one; anything else as it is."""
    adds_methods = type(x) is not torch.Tensor and getattr(type(x), "__torch_dispatch__", None) is _DISPATCH
    return x.as_subclass(torch.Tensor) if adds_methods else x


def map_nodes(kind: type[T], function: Callable[..., T], tree: PyTree, *others: PyTree) -> PyTree:
    """Replace each node of this kind by `function` of it and the corresponding parts of `others`; keep the rest."""
    if isinstance(tree, kind):
        return function(tree, *others)
    its = _children(tree)
    if its is None:
        return tree
    parts = zip(its, *[_children(other) for other in others], strict=True)
    return _like(tree, [map_nodes(kind, function, *part) for part in parts])


def nodes_of(kind: type[T], tree: PyTree) -> list[T]:
    """Return the nodes of this kind, in flattening order."""
    if isinstance(tree, kind):
        return [tree]
    return [node for child in _children(tree) or () for node in nodes_of(kind, child)]


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
    """Replace every leaf by its position: plain data, unlike an optree spec; `fill(template, leaves)` inverts it."""
    positions = itertools.count()
    return map(lambda leaf: next(positions), tree)


def fill(template: PyTree, values: Sequence[T]) -> PyTree:
    """Replace the positions in `template` by the `values` at those positions."""
    return map(values.__getitem__, template)
