"""Check of a schedule of the user's, when it is passed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from decentfn.core import brief, brief_error, require


def require_schedule(
    call: str, name: str, schedule: Callable[[Tensor], Tensor | float], of: Literal["count", "t"] = "count"
) -> None:
    """Raise ValueError unless a schedule computes on the tensor that it is given, and its first value is finite, >= 0."""
    what = f"{call}({name}={brief(schedule)})"

    def value(count: Tensor) -> Tensor:
        return torch.as_tensor(schedule(count), dtype=torch.float64).detach()

    try:
        found = value(torch.tensor(0))
    except Exception as error:
        if "device" in str(error):  # it reads a table on another device, where the count of a run is, too
            return
        raise ValueError(
            f"{what}: for {of} 0, a 0-d int64 tensor, it raised {brief_error(error)}; a schedule is a function of {of} that "
            "returns a number."
        ) from error
    rule = f"for {of} 0 it returned {list(found.shape)} values; a schedule returns one number."
    require(found.dim() == 0, what, rule)
    rule = f"for {of} 0 it returned {float(found):g}; a schedule's values are finite and >= 0."
    require(0 <= float(found) < math.inf, what, rule)
    try:
        vmap(value, randomness="different")(torch.tensor([0, 1]))
    except Exception as error:
        raise ValueError(
            f"{what}: it uses {of} as a number, which is not known while a step is compiled or simulated: compute on the "
            f"tensor, with torch.where({of} < 10, a, b) in place of `if` and torch.cos in place of math.cos, or take one of "
            f"df.schedules. ({brief_error(error)})"
        ) from error
