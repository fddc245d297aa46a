"""Conversion of DistributedDataParallel's state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["add_module_prefix", "strip_module_prefix"]

V = TypeVar("V")

_PREFIX = "module."


def strip_module_prefix(state_dict: Mapping[str, V]) -> dict[str, V]:
    """Remove DistributedDataParallel's prefix `module.` from every name of a state dict, if it has one.

    >>> strip_module_prefix({"module.weight": 1, "module.bias": 2})
    {'weight': 1, 'bias': 2}
    """
    prefixed = [name for name in state_dict if name.startswith(_PREFIX)]
    if prefixed and len(prefixed) < len(state_dict):
        other = next(name for name in state_dict if not name.startswith(_PREFIX))
        raise ValueError(
            f"strip_module_prefix(state_dict): {prefixed[0]!r} begins with 'module.', {other!r} does not; a wrapped "
            "model's names all do. If a submodule is called 'module', there is no prefix to strip."
        )
    return {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}


def add_module_prefix(state_dict: Mapping[str, V]) -> dict[str, V]:
    """Add the prefix `module.` to every name of a state dict, as a model in DistributedDataParallel expects.

    >>> add_module_prefix({"weight": 1})
    {'module.weight': 1}
    """
    return {_PREFIX + name: value for name, value in state_dict.items()}
