"""Inductor: its backend, its cache, the passes over a step's graph, and workarounds for two faults on a CPU."""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import itertools
import operator
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from decentfn.torch_private.names import BACKEND, GRAPH_PASS, LOOP_SPLIT, READ_EXPR, VECTORS

_CALL = 'df.compile(step, backend="inductor")'
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the torch.compile backend with this name."""
    return BACKEND.require(f"df.compile(backend={name!r})")(name)


def cache_dir() -> str:
    """Return the folder of Inductor's cache, whose code will run here; the default one is made private to its owner."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    # As in PyTorch's manual.
    default = os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    path = os.path.abspath(os.environ.setdefault(_CACHE, default))
    os.makedirs(path, exist_ok=True)
    if hasattr(os, "getuid"):
        owner = os.stat(path).st_uid
        if owner not in (0, os.getuid()):
            warnings.warn(
                f"df.compile: Inductor's cache {path} belongs to another user, who can change the code that runs here; set "
                f"{_CACHE} to a directory of your own.",
                stacklevel=2,
            )
        elif owner == os.getuid() and path == default:
            os.chmod(path, 0o700)
    return path


def forget_instructions() -> None:
    """Let Inductor try the CPU's vector instructions again, in case the files of its trial were damaged."""
    module = sys.modules.get(getattr(VECTORS.find(), "__module__", ""))
    owners = [] if module is None else [module, *(kind for kind in vars(module).values() if isinstance(kind, type))]
    for owner in owners:
        for function in vars(owner).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def compile_options() -> dict[str, Any]:
    """Return Inductor's options; raise RuntimeError if PyTorch lacks a name without which code would be wrong."""
    for needed in (BACKEND, LOOP_SPLIT):
        needed.require(_CALL)
    GRAPH_PASS.require(_CALL).register(_GraphPass)  # whose code is cached by its uuid
    return {
        "joint_custom_pre_pass": _GraphPass(_prepare),
        "post_grad_custom_post_pass": _GraphPass(_copy_what_is_kept),
        "triton.mix_order_reduction": False,  # on a GPU, a norm's gradients would stay unwritten (PyTorch's 193061)
    }


_aten = torch.ops.aten
_WRITES = (
    *(_aten.index_put.default, _aten._unsafe_index_put.default, _aten.slice_scatter.default),
    *(_aten.select_scatter.default, _aten.diagonal_scatter.default, _aten.as_strided_scatter.default),
)
"""Operators whose result Inductor may write into their first argument."""
_in_order: set[str] = set()


def keep_in_order(name: str) -> None:
    """Keep calls of this operator in the step's order; its last argument, a tensor or None, is the call before it."""
    _in_order.add(name)


def _chain(graph: torch.fx.Graph) -> None:
    """Make each such call depend on the one before it, before Inductor reorders calls to save memory."""
    names = {f"decentfn::{name}" for name in _in_order}
    calls = [node for node in graph.nodes if getattr(getattr(node.target, "_schema", None), "name", None) in names]
    for before, call in itertools.pairwise(calls):
        last = before
        if "val" in before.meta and isinstance(before.meta["val"], (list, tuple)):
            first = [user for user in before.users if user.target is operator.getitem and user.args[1] == 0]
            with graph.inserting_after(before):
                last = first[0] if first else graph.call_function(operator.getitem, (before, 0))
            last.meta.setdefault("val", before.meta["val"][0])
        call.args = (*call.args[:-1], last)


def _keep_softmax(graph: torch.fx.Graph) -> None:
    """Negate each softmax's numerator twice, else hand-written attention without a gradient may become another one.

    Inductor takes it for `scaled_dot_product_attention` whatever axis is permuted or normalized (PyTorch's 195320).
    """
    for division in graph.find_nodes(op="call_function", target=_aten.div.Tensor):
        numerator: Any = division.args[0]
        if getattr(numerator, "target", None) is _aten.exp.default:
            with graph.inserting_before(division):
                for _ in range(2):
                    negated = graph.call_function(_aten.neg.default, (numerator,))
                    negated.meta.update(numerator.meta)
                    numerator = negated
            division.update_arg(0, numerator)


def _count_in_rows(graph: torch.fx.Graph) -> None:
    """Give all elements one axis where the position of an extremum is asked for.

    Inductor counts a computed tensor's in its order of reading, which is another for a transposed one (PyTorch's 174073).
    """
    for target in (_aten.argmax.default, _aten.argmin.default):
        for position in graph.find_nodes(op="call_function", target=target):
            x: Any = position.args[0]
            shape = [1] * (x.meta["val"].dim() - 1) + [-1]
            if len(shape) > 1 and position.args[1:2] in ((), (None,)):
                with graph.inserting_before(position):
                    row = graph.call_function(_aten.reshape.default, (x, shape))
                row.meta["val"] = x.meta["val"].reshape(shape)
                position.update_arg(0, row)


def _prepare(graph: torch.fx.Graph) -> None:
    """Prepare a graph for Inductor, which reorders calls, replaces what it takes for attention, and counts by its loops."""
    _chain(graph)
    _keep_softmax(graph)
    _count_in_rows(graph)


def _copy_what_is_kept(graph: torch.fx.Graph) -> None:
    """Copy what would be overwritten while it is needed: PyTorch drops the step's own clones of such.

    A store to a leaf overwrites what is kept of the old one. And Inductor writes indices and slices into the tensor that
    they change: into an old leaf whatever is stored there later (PyTorch's 198094, 198270), where it is also read (197829,
    156786), and where elements are expanded and share memory (188084). So do its `_foreach_` operators (198033).
    """
    stores: list[Any] = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    written = {store.args[0]: store.args[1] for store in stores}

    def origin(x: Any, through: Collection[Any] = ()) -> Any:
        while x.target is operator.getitem or getattr(x.target, "is_view", False) or x.target in through:
            x = x.args[0]
        return x

    def copy(x: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
        with graph.inserting_before(before):
            kept = graph.call_function(_aten.clone.default, (x,))
        kept.meta.update(x.meta)
        return kept

    for write in [node for target in _WRITES for node in graph.find_nodes(op="call_function", target=target)]:
        to: Any = write.args[0]
        base, read = origin(to), []
        torch.fx.map_arg(write.args[1:], read.append)
        is_kept = base in written and written[base] is not write or any([origin(x) is base for x in read])
        if is_kept or any([type(stride) is int and stride == 0 for stride in to.meta["val"].stride()]):
            write.update_arg(0, copy(to, write))
    for store in stores:
        source: Any = origin(store.args[1])
        if store.args[1] is not store.args[0] and (source in written or "_foreach_" in str(source.target)):
            store.update_arg(1, copy(store.args[1], stores[0]))
    output = graph.output_node()
    for x in output.all_input_nodes if stores else ():  # metrics; a part of an input, times one, is a view of it by now
        if origin(x, _WRITES).op == "placeholder" and isinstance(x.meta.get("val"), torch.Tensor):
            output.replace_input_with(x, copy(x, stores[0]))


class _GraphPass:
    """Graph pass `change`, and its part of the key by which Inductor caches code."""

    def __init__(self, change: Callable[[torch.fx.Graph], None]) -> None:
        self._change = change

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change `graph`."""
        self._change(graph)

    def uuid(self) -> str:
        """Return a key of the cached code: this pass, and our operators' `vmap` rules, which PyTorch's key omits."""
        return _digest_of_sources()


@functools.cache
def _digest_of_sources() -> str:
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


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
        stack.enter_context(mock.patch(LOOP_SPLIT.name, lambda self, nodes: nodes))
        if read_expr is not None:
            stack.enter_context(mock.patch(READ_EXPR.name, read_expr_or_none))
        yield
