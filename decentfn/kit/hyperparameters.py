"""Hyperparameters that several algorithms have in common: read in a step, checked when the algorithm is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core.numbers import real, whole
from decentfn.core.scalars import once
from decentfn.optim.transforms.basic import Scalar


def at(scalar: Scalar, t: Tensor, like: Iterable[Tensor]) -> float | Tensor:
    """The number itself, or its value at step `t`: 0-d float64 on the device of `like`, such as the parameters."""
    if not callable(scalar):
        return scalar
    return once(torch.as_tensor(scalar(collectives.on_device(next(iter(like)), t)), dtype=torch.float64))


def reciprocal(rate: float | Tensor) -> float | Tensor:
    """`1 / rate`, and 0 for a rate of 0, with which nothing was moved that could be measured."""
    if isinstance(rate, torch.Tensor):
        return once(torch.where(rate > 0, 1 / rate, torch.zeros_like(rate)))
    return 1 / rate


def require_fractions(call: str, **values: float) -> None:
    """Each value lies in [0, 1], or a ValueError says which does not."""
    for name, value in values.items():
        if not 0 <= real(call, name, value) <= 1:
            raise ValueError(f"{call}({name}={value!r}): {name} is a share of what was there before, in [0, 1].")


def require_rate(call: str, **scalars: Scalar) -> None:
    """Each scalar is a function of t or a positive number, or a ValueError says which is not."""
    require_positive(call, **{name: scalar for name, scalar in scalars.items() if not callable(scalar)})


def require_positive(call: str, **values: Any) -> None:
    """Each value is a positive number, or a ValueError says which is not."""
    for name, value in values.items():
        if callable(value):
            raise ValueError(f"{call}({name}=...): {name} is one number for the whole run, not a function of t.")
        if not real(call, name, value) > 0:
            raise ValueError(f"{call}({name}={value!r}): {name} is positive and finite.")


def require_whole(call: str, at_least: int = 1, **values: int) -> None:
    """Each value is an integer, at least `at_least`, or a ValueError says which is not."""
    for name, value in values.items():
        if whole(call, name, value) < at_least:
            raise ValueError(f"{call}({name}={value!r}): {name} is a number of steps or parts, at least {at_least}.")
