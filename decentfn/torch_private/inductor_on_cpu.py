"""What Inductor's backend for the CPU does wrong, or again and again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def remembered_probes(leave: Callable[[Path], None]) -> Iterator[None]:
    """Let Inductor try once in a process of its own, and not in every run, whether what a compiler built can be loaded.

    It does so for every set of vector instructions, which takes a second of the first step; PyTorch 2.15 remembers it
    by itself, in the same way. The path says what compiler with what flags; `leave` makes the file.
    """
    try:
        from torch._inductor.cpu_vec_isa import VecISA

        probe = VecISA._probe_load  # PyTorch 2.15 has none
    except (ImportError, AttributeError):
        yield
        return

    def probe_load(self: Any, output_path: str) -> bool:
        marker = Path(f"{output_path}.load_ok")
        if os.path.exists(marker):
            return True
        passed = probe(self, output_path)
        if passed:
            leave(marker)
        return passed

    with _in_place_of(VecISA, "_probe_load", probe_load):
        yield


@contextlib.contextmanager
def even_splits() -> Iterator[None]:
    """Keep Inductor from splitting a loop by what does not divide it: on a CPU it forgets the rest (PyTorch's 195582)."""
    try:
        from torch._inductor.codegen.cpp import CppScheduling
        from torch.utils._sympy.functions import FloorDiv

        split = CppScheduling.try_loop_split
    except (ImportError, AttributeError):
        yield
        return

    def leaves_a_rest(node: Any) -> bool:
        body = node.node.get_default_sizes_body()[1]
        divisions = [
            d for index in body.indexing_exprs.values() if hasattr(index, "find") for d in index.find(FloorDiv)
        ]
        return any(body.var_ranges.get(d.args[0], 0) % d.args[1] != 0 for d in divisions)

    def checked(self: Any, nodes: list[Any]) -> list[Any]:
        return nodes if any(map(leaves_a_rest, nodes)) else split(self, nodes)

    with _in_place_of(CppScheduling, "try_loop_split", checked):
        yield


@contextlib.contextmanager
def local_buffers_that_are_read() -> Iterator[None]:
    """Keep Inductor from failing where a loop could keep to itself a tensor that is written over (PyTorch's 196570).

    It asks each user of the tensor in which order it reads it. A user that knows the tensor by another name says
    KeyError; to say None is another order, and the tensor stays in memory.
    """
    try:
        from torch._inductor.loop_body import LoopBody

        read_expr = LoopBody.get_read_expr
    except (ImportError, AttributeError):
        yield
        return

    def read_expr_or_none(self: Any, buffer_name: str) -> Any:
        try:
            return read_expr(self, buffer_name)
        except KeyError:
            return None

    with _in_place_of(LoopBody, "get_read_expr", read_expr_or_none):
        yield


@contextlib.contextmanager
def layouts_of_norms() -> Iterator[None]:
    """Keep Inductor from computing convolutions channels last where norms go over each channel's positions.

    On a CPU it always does, and then reads and writes such a norm's input (of batch, group, instance norm) across
    memory: networks with group norm took 1.1 to 1.5 times as long as not compiled, and take 0.8 to 0.95 since.
    """
    try:
        from torch._inductor import config
        from torch._inductor.graph import GraphLowering

        decide = GraphLowering.decide_layout_opt
    except (ImportError, AttributeError):
        yield
        return

    def decided(graph: torch.fx.GraphModule, **kwargs: Any) -> bool:
        chosen = decide(graph, **kwargs)
        return chosen and (config.force_layout_optimization or not any(map(_is_norm_over_positions, graph.graph.nodes)))

    with _in_place_of(GraphLowering, "decide_layout_opt", staticmethod(decided)):
        yield


def _is_norm_over_positions(node: torch.fx.Node) -> bool:
    """Whether this is the mean and variance over more than one axis, on the CPU."""
    return (
        node.target is torch.ops.aten.var_mean.correction
        and len(node.args) > 1
        and isinstance(node.args[1], (list, tuple))
        and len(node.args[1]) > 1
        and node.meta["val"][0].device.type == "cpu"
    )


@contextlib.contextmanager
def _in_place_of(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
