"""Inductor backend shared by the ranks of a machine: one compiles, the others load its code from the cache."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout

from decentfn.core import log
from decentfn.torch_private.inductor import cache_dir, forget_instructions, lookup_backend, without_faults

_PATIENCE_S = 600.0  # time that a rank waits for another one's compiler before it compiles itself


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph with Inductor; one rank of a machine compiles, and the others find its code in the cache."""
    with contextlib.nullcontext() if "MASTER_PORT" not in os.environ else _turn(), without_faults():
        removed: set[Path] = set()
        while True:
            try:
                return cast(Any, lookup_backend("inductor"))(graph, inputs, config_patches=options)
            except Exception as error:
                said = getattr(error, "inner_exception", error)
                damaged = _damaged(said) - removed
                if not damaged:
                    raise
                for path in damaged:
                    path.unlink(missing_ok=True)  # another rank may have removed it
                log.warning(
                    "removed %d file(s) of Inductor's cache that a kill or a full disk had damaged", len(damaged)
                )
                removed |= damaged
                forget_instructions()


def _damaged(error: Exception) -> set[Path]:
    """Return the files of Inductor's cache that the system cannot load: the one that the error names, and cut ones."""
    cache = Path(cache_dir())
    said = re.match(r"(.*?\.so): ", str(error)) if isinstance(error, (ImportError, OSError)) else None
    named = {Path(said[1])} if said and cache in Path(said[1]).parents else set()
    return named | {path for path in cache.rglob("*.so") if _is_cut(path)}


def _is_cut(path: Path) -> bool:
    """Return True if an ELF library ends before its table of sections, which is its last part."""
    try:
        with path.open("rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < 64:
        return True
    start, entry, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return header[:6] == b"\x7fELF\x02\x01" and size < start + entry * count


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
        log.debug("waiting for the rank that compiles")
        with contextlib.suppress(Timeout), lock.acquire(timeout=_PATIENCE_S):
            pass
    try:
        yield
    finally:
        lock.release()
