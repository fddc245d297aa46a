"""Everything here that is private API of PyTorch: how Inductor is told that our operators are collectives.

Where a piece is missing (another version of PyTorch), `AVAILABLE` is False: the operators then wait before they
return, which is correct and slower, and `compile_options` asks for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from torch._inductor import config, ir
    from torch._inductor.lowering import register_lowering

    AVAILABLE = hasattr(ir, "_CollectiveKernel") and hasattr(ir, "_WaitKernel")
    AVAILABLE &= hasattr(config, "reorder_for_compute_comm_overlap_passes")
except ImportError:
    AVAILABLE = False


def compile_options() -> dict[str, Any]:
    """Inductor's options with which what is posted first stays first and what is waited for last stays last.

    By default Inductor minimises peak memory and sinks a collective's start next to its wait.
    """
    if not AVAILABLE:
        return {}
    return {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_locality": False,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    }


def register(collectives: Sequence[Any], wait: Any, complete: Any) -> None:
    """Lower `collectives` (first argument the payload, one tensor returned) and `wait` as Inductor's own kinds.

    What compiled code calls in place of `wait` is `complete`.
    """
    if not AVAILABLE:
        return
    for packet in collectives:
        register_lowering(packet, type_promotion_kind=None)(_lower_collective(packet.default))

    @register_lowering(wait, type_promotion_kind=None)
    def _(x: Any) -> Any:
        ir._WaitKernel.create_wait(complete.default, x)
        return x


def _lower_collective(kernel: Any) -> Any:
    def lower(x: Any, *rest: Any) -> Any:
        x = ir.ExternKernel.require_contiguous(x)
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(kernel, x, *rest))

    return lower
