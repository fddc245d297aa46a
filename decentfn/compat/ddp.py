"""What a run of DistributedDataParallel leaves behind, and what it expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["add_module_prefix", "strip_module_prefix"]

V = TypeVar("V")

_PREFIX = "module."


def strip_module_prefix(state_dict: Mapping[str, V]) -> dict[str, V]:
    """A state dict without the `module.` that DistributedDataParallel puts before every name; one without stays as it is.

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
    """A state dict with `module.` before every name, as a model wrapped in DistributedDataParallel expects it.

    >>> add_module_prefix({"weight": 1})
    {'module.weight': 1}
    """
    return {_PREFIX + name: value for name, value in state_dict.items()}
