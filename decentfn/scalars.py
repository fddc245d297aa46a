"""Small numbers: the step, and scalars that a whole bucket is multiplied with."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from decentfn import internals

_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("once(Tensor x) -> Tensor")
_library.impl("once", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("decentfn::once", torch.empty_like, lib=_library)


def as_step(t: int | Tensor) -> Tensor:
    """The number of a step as 0-d int64 on the CPU: what every `t` that a user gives goes through.

    Raises:
        ValueError: `t` is no integer, negative, or has an axis.
    """
    if isinstance(t, torch.Tensor):
        if t.dim() == 0 and not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
            step = t.to("cpu", torch.int64)
            if internals.has_no_value(step) or step >= 0:
                return step
    elif isinstance(t, Integral) and not isinstance(t, bool) and int(t) >= 0:
        return torch.tensor(int(t))
    raise ValueError(
        f"step(state, batch, t={t!r}): t numbers the steps, from 0; pass an int, or a 0-d tensor of integers."
    )


def once(x: Tensor) -> Tensor:
    """`x` itself (small, usually 0-d), but a compiled kernel reads it instead of computing it for every element.

    Inductor inlines what a scalar was computed from (a power, a table look-up) into the loop over a bucket, where it
    takes longer than the update.
    """
    return torch.ops.decentfn.once(x)


def _once_vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return once(x), in_dims[0]


torch.library.register_vmap("decentfn::once", _once_vmap, lib=_library)
internals.lower_as_realized(torch.ops.decentfn.once)
