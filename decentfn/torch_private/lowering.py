"""How Inductor compiles this library's own operators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from decentfn.torch_private import inductor

is_refused = False
"""Whether Inductor has been asked to lower collectives and cannot."""

_later: list[Callable[[], None]] = []
_lock = threading.Lock()


def register_fake(name: str, fake: Callable[..., Any], library: Any) -> None:
    """As torch.library's; all lowerings are registered when an operator is traced, and Inductor is not imported before."""

    def traced(*args: Any) -> Any:
        if _later:
            register_all()
        return fake(*args)

    torch.library.register_fake(name, traced, lib=library)


def register_all() -> None:
    """Register what waits for Inductor; imports it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _lock, _disable_current_modes():
        for register in _later:
            register()
        _later.clear()


def lower_collectives(collectives: Sequence[Any], wait: Any, complete: Any) -> None:
    """Lower `collectives` (first argument the payload, one tensor returned) and `wait` as Inductor's own kinds.

    What compiled code calls in place of `wait` is `complete`.
    """

    def register() -> None:
        global is_refused
        is_refused = not inductor.overlaps()
        if is_refused:
            return
        from torch._inductor import ir
        from torch._inductor.lowering import register_lowering

        def lower(kernel: Any, x: Any, *rest: Any) -> Any:
            x.realize()  # or what stays here would be computed again, by another kernel
            x = ir.ExternKernel.require_contiguous(x)
            return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(kernel, x, *rest))

        def lower_wait(x: Any) -> Any:
            ir._WaitKernel.create_wait(complete.default, x)
            return x

        for packet in collectives:
            register_lowering(packet, type_promotion_kind=None)(functools.partial(lower, packet.default))
        register_lowering(wait, type_promotion_kind=None)(lower_wait)

    _later.append(register)


def lower_as_realized(operator: Any) -> None:
    """Lower `operator(x)`, the identity, or `operator(x, dtype)`, a cast, as "store this before anyone reads it".

    Else every kernel computes it for itself, and after a cast to a narrower dtype goes on with the wider value.
    """

    def register() -> None:
        try:
            from torch._inductor import ir, virtualized
            from torch._inductor.lowering import make_pointwise, register_lowering
        except ImportError:
            return

        def cast_to(dtype: torch.dtype, value: Any) -> Any:  # a bitcast, behind which the wider value is found no more
            return virtualized.ops.to_dtype_bitcast(virtualized.ops.to_dtype(value, dtype), dtype, dtype)

        def lower(x: Any, dtype: torch.dtype | None = None) -> Any:
            if dtype is not None:
                x = make_pointwise(functools.partial(cast_to, dtype), override_return_dtype=dtype)(x)
            if isinstance(x.data, ir.BaseView):
                return ir.ExternKernel.copy_input(x)  # a part of something else gets memory of its own
            x.realize()
            return x

        register_lowering(operator, type_promotion_kind=None)(lower)

    _later.append(register)


def lower_as_pointwise(operator: Any, formula: Callable[..., Any]) -> None:
    """Lower an operator of one int64 tensor as `formula(value, constant, shifted)` of each entry, computed once.

    Inductor computes an input of an elementwise operator anew for each place in which it stands; written out in
    PyTorch, n times `x ^ (x >> s)` would cost 2^n to compile. `constant` turns an int into an operand; `shifted` is >>.
    """

    def register() -> None:
        try:
            from torch._inductor import virtualized
            from torch._inductor.lowering import make_pointwise, register_lowering
        except ImportError:
            return

        def entry(value: Any) -> Any:
            ops = virtualized.ops
            return formula(value, lambda number: ops.constant(number, torch.int64), ops.bitwise_right_shift)

        register_lowering(operator, type_promotion_kind=None)(make_pointwise(entry))

    _later.append(register)
