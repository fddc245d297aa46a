"""Loop as one operator of the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decentfn.torch_private.names import SCAN

_scan = SCAN.find()


def loop(
    body: Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]],
    carry: list[Tensor],
    xs: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Iterate `carry, y[i] = body(carry, x[i])` over the first axis of all `xs`; return the last carry, and y stacked.

    In compiled code it is one loop in the graph, of any length; the carry must keep its shapes and dtypes. Without
    torch's scan the loop is unrolled.
    """
    if _scan is not None and torch.compiler.is_dynamo_compiling():

        def at(carry: list[Tensor], i: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            # Indexed here, not sliced by scan, which has no batching rule for it (a warning under vmap).
            return body(carry, [x.index_select(0, i.view(1)).squeeze(0) for x in xs])

        return _scan(at, carry, torch.arange(xs[0].shape[0], device=xs[0].device))
    rows: list[list[Tensor]] = []
    for i in range(xs[0].shape[0]):
        carry, row = body(carry, [x[i] for x in xs])
        rows.append(row)
    return carry, [torch.stack(column) for column in zip(*rows, strict=True)]
