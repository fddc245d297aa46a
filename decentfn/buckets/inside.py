"""What the processes of one worker know together: a sum over them, as an operator that `collectives` implements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentfn.torch_private import inductor

_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("sum_inside(Tensor x, Tensor? after) -> Tensor")


def sum_inside(x: Tensor, processes: int) -> Tensor:
    """The sum of `x` over the processes of this worker, the same on each: `x` itself where it is one. All wait for the last.

    Args:
        x: of any shape, the same on all.
        processes: of the worker.
    """
    return x if processes == 1 else torch.ops.decentfn.sum_inside(x, None)


def everywhere_inside(claim: Tensor, processes: int) -> Tensor:
    """Whether `claim` (bool) holds on all processes of this worker."""
    return claim if processes == 1 else sum_inside((~claim).to(torch.float32), processes) == 0


def _vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, after: Tensor | None) -> tuple[Tensor, int | None]:
    return torch.ops.decentfn.sum_inside(x, after), in_dims[0]


torch.library.register_fake("decentfn::sum_inside", lambda x, after: torch.empty_like(x), lib=_library)
torch.library.register_vmap("decentfn::sum_inside", _vmap, lib=_library)
inductor.keep_in_order("sum_inside")
