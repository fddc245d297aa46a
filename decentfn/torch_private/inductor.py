"""Inductor: its backend, its cache, and the pass over a step's graph."""

from __future__ import annotations

import functools
import getpass
import hashlib
import itertools
import operator
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decentfn.torch_private.names import BACKEND, GRAPH_PASS, LOOP_SPLIT

_CALL = 'df.compile(step, backend="inductor")'
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def lookup_backend(name: str) -> Callable[..., Any]:
    """The backend of torch.compile with this name."""
    return BACKEND.require(f"df.compile(backend={name!r})")(name)


def cache_dir() -> str:
    """Inductor's cache, which holds code that will run: the directory that nobody has chosen is made its owner's only."""
    default = _default_cache_dir()
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


def _default_cache_dir() -> str:
    """The directory that PyTorch's manual names: `/tmp/torchinductor_<user>`."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def compile_options() -> dict[str, Any]:
    """Inductor's options: a pass over the graph that keeps what a donated step reads of its old state, and the order of operators
    in which the processes of a worker wait for one another.

    Raises:
        RuntimeError: PyTorch lacks a name without which the code would be wrong.
    """
    for needed in (BACKEND, LOOP_SPLIT):
        needed.require(_CALL)
    GRAPH_PASS.require(_CALL).register(_GraphPass)  # whose code is cached by its uuid
    return {"post_grad_custom_post_pass": _GraphPass()}


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


class _GraphPass:
    """What a step needs of the order in its graph."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change `graph`."""
        _chain(graph)
        _copy_what_is_kept(graph, graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))

    def uuid(self) -> str:
        """What code in the cache depends on: this pass, and the rules by which `vmap` sees our operators, which PyTorch's key leaves out."""
        return _digest_of_sources()


@functools.cache
def _digest_of_sources() -> str:
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
