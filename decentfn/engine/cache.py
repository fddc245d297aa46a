"""Inductor backend shared by the ranks of a machine: one compiles, the others load its code from the cache."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout

from decentfn.torch_private.inductor import cache_dir, lookup_backend, without_faults

_log = logging.getLogger("decentfn")

_PATIENCE_S = 600.0
"""Time that a rank waits for another one's compiler before it compiles itself."""


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph with Inductor; one rank of a machine compiles, and the others find its code in the cache."""
    with contextlib.nullcontext() if "MASTER_PORT" not in os.environ else _turn(), without_faults():
        removed = None
        while True:
            try:
                return cast(Any, lookup_backend("inductor"))(graph, inputs, config_patches=options)
            except Exception as error:
                said = getattr(error, "inner_exception", error)
                damaged = _damaged(said)
                if damaged is None or damaged == removed:
                    raise
                damaged.unlink(missing_ok=True)  # another rank may have removed it
                _log.warning("removed a file of Inductor's cache that a kill or a full disk had damaged: %s", said)
                removed = damaged


def _damaged(error: Exception) -> Path | None:
    """Return the file of Inductor's cache that the system could not load, or None if `error` is another one."""
    said = re.match(r"(.*?\.so): ", str(error)) if isinstance(error, (ImportError, OSError)) else None
    return Path(said[1]) if said and Path(cache_dir()) in Path(said[1]).parents else None


def counted(backend: str, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """Return the torch.compile backend of this name, wrapped to append every graph to `graphs`."""

    def compile_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return cast(Any, lookup_backend(backend))(graph, inputs)

    return compile_with


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Let one rank in; the others wait until it is done and then continue together."""
    lock = FileLock(Path(cache_dir(), f"decentfn-{os.environ['MASTER_PORT']}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.debug("waiting for the rank that compiles")
        with contextlib.suppress(Timeout), lock.acquire(timeout=_PATIENCE_S):
            pass
    try:
        yield
    finally:
        lock.release()
