"""Inductor: its backend, its cache, and the pass over a step's graph."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Dynamo and Inductor take seconds to import: only what compiles does.


def lookup_backend(name: str) -> Callable[..., Any]:
    """The backend of torch.compile with this name."""
    from torch import _dynamo

    return _dynamo.lookup_backend(name)


def cache_dir() -> str:
    """Inductor's cache, which holds code that will run: the directory that nobody has chosen is made its owner's only."""
    try:
        from torch._inductor.runtime import cache_dir_utils
    except ImportError:
        return tempfile.gettempdir()
    path = cache_dir_utils.cache_dir()
    if hasattr(os, "getuid"):
        owner = os.stat(path).st_uid
        if owner not in (0, os.getuid()):
            warnings.warn(
                f"df.compile: Inductor's cache {path} belongs to another user, who can change the code that runs here; set "
                "TORCHINDUCTOR_CACHE_DIR to a directory of your own.",
                stacklevel=2,
            )
        elif owner == os.getuid() and path == cache_dir_utils.default_cache_dir():
            os.chmod(path, 0o700)
    return path


def compile_options() -> dict[str, Any]:
    """Inductor's options: a pass over the graph that keeps what a donated step reads of its old state, and the order of operators
    in which the processes of a worker wait for one another.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return {}
    CustomGraphPass.register(_StoreEarly)  # whose code is cached by its uuid
    return {"post_grad_custom_post_pass": _StoreEarly()}


@functools.cache
def digest_of_sources() -> str:
    """Of this package's files: what was compiled with others is not used."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


_in_order: set[str] = set()


def keep_in_order(name: str) -> None:
    """Calls of this library's operators of these names stay in the step's order: processes that wait for one another make them.

    Its last argument, a tensor or None, is what the call comes after.
    """
    _in_order.add(name)


def _chain(graph: torch.fx.Graph) -> None:
    """Make each such call need the one before it, or Inductor would order them by what memory it saves."""
    calls = [node for node in graph.nodes if _short_name(node.target) in _in_order]
    for before, call in itertools.pairwise(calls):
        last = before
        if "val" in before.meta and isinstance(before.meta["val"], (list, tuple)):
            first = [user for user in before.users if user.target is operator.getitem and user.args[1] == 0]
            with graph.inserting_after(before):
                last = first[0] if first else graph.call_function(operator.getitem, (before, 0))
            last.meta.setdefault("val", before.meta["val"][0])
        call.args = (*call.args[:-1], last)


def _short_name(target: Any) -> str | None:
    """The name of one of this library's operators."""
    if getattr(target, "namespace", "") != "decentfn":
        return None
    return target._schema.name.removeprefix("decentfn::")


def _copy_what_is_kept(graph: torch.fx.Graph, stores: list[Any]) -> None:
    """Where a new leaf is an old one, or a view of it, read it before another store writes over it.

    The step has cloned it, but PyTorch drops such clones and reads the old leaf when it may be the new one already.
    """
    written = {store.args[0] for store in stores}
    for store in stores:
        source = origin = store.args[1]
        while getattr(origin.target, "is_view", False):
            origin = origin.args[0]
        if origin in written and source is not store.args[0]:
            with graph.inserting_before(stores[0]):
                kept = graph.call_function(torch.ops.aten.clone.default, (source,))
            kept.meta.update(source.meta)
            store.args = (store.args[0], kept, *store.args[2:])


class _StoreEarly:
    """Write the donated state as soon as all of it is computed, before what is left of the metrics.

    PyTorch puts those writes last. What comes before them is a loop of its own, what comes after can be part of the
    loop that writes: so the gradient's norm is summed while the update reads the gradient.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Move the writes at the end of `graph` up to the last value that they need."""
        _chain(graph)
        nodes = list(graph.nodes)
        stores = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
        if not stores:
            return
        _copy_what_is_kept(graph, stores)
        nodes = list(graph.nodes)
        needed = {node for store in stores for node in store.all_input_nodes}
        last = max(index for index, node in enumerate(nodes) if node in needed)
        written = {store.args[0] for store in stores}
        for node in nodes:
            # A view of the old state or one of several, a message sent from it, what is on its way or waited for.
            shows = getattr(node.target, "is_view", False) or node.target is operator.getitem
            shows = shows or getattr(node.target, "namespace", "") == "decentfn"
            if shows and node.args and node.args[0] in written:
                written.add(node)
        if any(written.intersection(node.all_input_nodes) for node in nodes[last + 1 :] if node not in stores):
            return  # somebody still looks at the old state, or may be sending it
        for store in reversed(stores):
            nodes[last].append(store)

    def uuid(self) -> str:
        """What its results depend on."""
        return digest_of_sources()
