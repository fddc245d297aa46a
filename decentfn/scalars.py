"""What is computed once and stored: scalars that a whole bucket is multiplied with, and what travels rounded."""

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
    """`x` in memory of its own; a compiled kernel reads it instead of computing it for every element.

    Inductor inlines what a scalar was computed from (a power, a table look-up) into the loop over a bucket, where it
    takes longer than the update.
    """
    return torch.ops.decentfn.once(x)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` for a narrower dtype, the very same numbers for everyone who reads it, compiled too.

    Inductor would go on with the unrounded values where it finds them in a register.
    """
    return torch.ops.decentfn.rounded(x, dtype)


def _once_vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return once(x), in_dims[0]


torch.library.register_vmap("decentfn::once", _once_vmap, lib=_library)
internals.lower_as_realized(torch.ops.decentfn.once)

_library.define("rounded(Tensor x, ScalarType dtype) -> Tensor")
_library.impl("rounded", lambda x, dtype: x.to(dtype, copy=True), "CompositeExplicitAutograd")
torch.library.register_fake("decentfn::rounded", lambda x, dtype: torch.empty_like(x, dtype=dtype), lib=_library)
torch.library.register_vmap(
    "decentfn::rounded", lambda info, in_dims, x, dtype: (rounded(x, dtype), in_dims[0]), lib=_library
)
internals.lower_as_realized(torch.ops.decentfn.rounded)
