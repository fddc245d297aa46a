"""Scalars that a whole bucket is multiplied with: computed once, not once per element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentfn import internals

_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("once(Tensor x) -> Tensor")
_library.impl("once", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("decentfn::once", torch.empty_like, lib=_library)


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
