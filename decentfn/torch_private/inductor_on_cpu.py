"""Inductor's faults on a CPU, kept from a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from decentfn.torch_private.names import LOOP_SPLIT, READ_EXPR


@contextlib.contextmanager
def without_faults() -> Iterator[None]:
    """Within, Inductor's backend for the CPU compiles without two of its faults.

    * It splits a loop by what does not divide it, and forgets the rest (PyTorch's 195582). Here it splits none.
    * It fails where a loop could keep to itself a tensor that is written over (PyTorch's 196570): it asks each user of the tensor in
      which order it reads it, and one that knows the tensor by another name says KeyError. To say None is another order, and the
      tensor stays in memory.
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
