"""Inductor as a backend that the ranks of a machine share: one compiles, the others find its code in the cache."""

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

from decentfn.torch_private.inductor import cache_dir, lookup_backend
from decentfn.torch_private.inductor_on_cpu import without_faults

_log = logging.getLogger("decentfn")

_PATIENCE_S = 600.0
"""So long a rank waits for another one's compiler before it compiles for itself."""


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Inductor as a backend of torch.compile; of a machine's ranks one compiles, and the others find its code cached."""
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
                damaged.unlink(missing_ok=True)  # another rank may have
                _log.warning("removed a file of Inductor's cache that a kill or a full disk had damaged: %s", said)
                removed = damaged


def _damaged(error: Exception) -> Path | None:
    """The file of Inductor's cache that the system could not load, if that is what `error` says."""
    said = re.match(r"(.*?\.so): ", str(error)) if isinstance(error, (ImportError, OSError)) else None
    return Path(said[1]) if said and Path(cache_dir()) in Path(said[1]).parents else None


def counted(backend: str, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend of torch.compile, by name, that also leaves every graph that it is given in `graphs`."""

    def compile_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return cast(Any, lookup_backend(backend))(graph, inputs)

    return compile_with


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """For one rank at once; the others wait until it is done, and then go on together."""
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
