"""Handles: numbers by which a graph refers to objects, as data, so that graphs for other objects share its code."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_numbers = itertools.count()
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def handle_of(value: Any) -> Tensor:
    """Give an object a number, 0-d int64 on the CPU, for the arguments of operators."""
    number = next(_numbers)
    _objects[number] = value
    return torch.tensor(number)


def number_of(value: Any) -> int:
    """Return the number of an object that equals this one, or give it one."""
    for number, other in list(_objects.items()):
        if other is value or (type(other) is type(value) and other == value):
            return number
    return int(handle_of(value))


def by_handle(handle: Tensor | str | bytes | int) -> Any:
    """Return the object with this number, while it lives."""
    return _objects[int(handle)]
