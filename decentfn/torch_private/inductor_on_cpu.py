"""Workarounds for two faults of Inductor on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from decentfn.torch_private.names import LOOP_SPLIT, READ_EXPR


@contextlib.contextmanager
def without_faults() -> Iterator[None]:
    """Context in which Inductor's CPU backend compiles without two of its faults.

    * It splits a loop by a non-divisor and omits the remainder (PyTorch's 195582). Here it splits none.
    * It fails if a loop could keep an overwritten tensor local (PyTorch's 196570): it asks each user of the tensor for
      its read order, and a user that knows the tensor by another name raises KeyError. Returning None counts as another
      order, and the tensor stays in memory.
    """
    read_expr = READ_EXPR.find()

    def read_expr_or_none(self: Any, buffer_name: str) -> Any:
        try:
            return read_expr(self, buffer_name)
        except KeyError:
            return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(LOOP_SPLIT.replaced_by(lambda self, nodes: nodes))
        if read_expr is not None:
            stack.enter_context(READ_EXPR.replaced_by(read_expr_or_none))
        yield
