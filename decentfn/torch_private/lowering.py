"""How Inductor compiles this library's own operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from decentfn.torch_private.inductor import OVERLAPS

try:
    from torch._inductor import ir, virtualized
    from torch._inductor.lowering import make_pointwise, register_lowering

    _LOWERS = True
except ImportError:
    _LOWERS = False


def lower_collectives(collectives: Sequence[Any], wait: Any, complete: Any) -> None:
    """Lower `collectives` (first argument the payload, one tensor returned) and `wait` as Inductor's own kinds.

    What compiled code calls in place of `wait` is `complete`.
    """
    if not OVERLAPS:
        return
    for packet in collectives:
        register_lowering(packet, type_promotion_kind=None)(_lower_collective(packet.default))

    @register_lowering(wait, type_promotion_kind=None)
    def _(x: Any) -> Any:
        ir._WaitKernel.create_wait(complete.default, x)
        return x


def _lower_collective(kernel: Any) -> Callable[..., Any]:
    def lower(x: Any, *rest: Any) -> Any:
        x.realize()  # or what stays here would be computed again, by another kernel
        x = ir.ExternKernel.require_contiguous(x)
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(kernel, x, *rest))

    return lower


def lower_as_realized(operator: Any) -> None:
    """Lower `operator(x)`, the identity, or `operator(x, dtype)`, a cast, as "store this before anyone reads it".

    Else every kernel computes it for itself, and after a cast to a narrower dtype goes on with the wider value.
    """
    if not _LOWERS:
        return

    def cast_to(dtype: torch.dtype, value: Any) -> Any:  # a bitcast, behind which the wider value is found no more
        return virtualized.ops.to_dtype_bitcast(virtualized.ops.to_dtype(value, dtype), dtype, dtype)

    @register_lowering(operator, type_promotion_kind=None)
    def _(x: Any, dtype: torch.dtype | None = None) -> Any:
        if dtype is not None:
            x = make_pointwise(functools.partial(cast_to, dtype), override_return_dtype=dtype)(x)
        if isinstance(x.data, ir.BaseView):
            return ir.ExternKernel.copy_input(x)  # a part of something else gets memory of its own
        x.realize()
        return x


def lower_as_pointwise(operator: Any, formula: Callable[..., Any]) -> None:
    """Lower an operator of one int64 tensor as `formula(value, constant, shifted)` of each entry, computed once.

    Inductor computes an input of an elementwise operator anew for each place in which it stands; written out in
    PyTorch, n times `x ^ (x >> s)` would cost 2^n to compile. `constant` turns an int into an operand; `shifted` is >>.
    """
    if not _LOWERS:
        return

    def entry(value: Any) -> Any:
        ops = virtualized.ops
        return formula(value, lambda number: ops.constant(number, torch.int64), ops.bitwise_right_shift)

    register_lowering(operator, type_promotion_kind=None)(make_pointwise(entry))
