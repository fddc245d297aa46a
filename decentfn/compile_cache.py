"""Inductor as a backend that the ranks of a machine share: one compiles, the others find its code, and notes say which."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from decentfn.torch_private.inductor import cache_dir, digest_of_sources, lookup_backend
from decentfn.torch_private.inductor_on_cpu import (
    even_splits,
    layouts_of_norms,
    local_buffers_that_are_read,
    remembered_probes,
)

_log = logging.getLogger("decentfn")

_PATIENCE_S = 600.0
"""So long a rank waits for another one's compiler before it compiles for itself."""


def inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Inductor as a backend of torch.compile; of a machine's ranks one compiles, and the others find its code cached.

    Where a note in Inductor's cache says that this was compiled before, nobody waits for anybody.
    """
    compile_with = functools.partial(cast(Any, lookup_backend("inductor")), graph, inputs, config_patches=options)
    with remembered_probes(leave), even_splits(), local_buffers_that_are_read(), layouts_of_norms():
        if "MASTER_PORT" not in os.environ:
            return compile_with()
        note = note_of(graph, options or {})
        is_known = os.path.exists(note)
        _log.debug("the graph's code is %s", "in the cache" if is_known else "new: one of the ranks compiles it")
        with contextlib.nullcontext() if is_known else _turn():
            compiled = compile_with()
    leave(note)
    return compiled


def counted(backend: str, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend of torch.compile, by name, that also leaves every graph that it is given in `graphs`."""

    def compile_with(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return cast(Any, lookup_backend(backend))(graph, inputs)

    return compile_with


def leave(note: Path) -> None:
    """Make an empty file, or go on without."""
    with contextlib.suppress(OSError):  # a note is a hint
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.touch()


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


def note_of(graph: torch.fx.GraphModule, options: dict[str, Any]) -> Path:
    """The same file for graphs whose code Inductor finds again; where it does not, ranks compile at the same time."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in values if isinstance(x, Tensor)]
    plain = sorted((key, value) for key, value in options.items() if isinstance(value, (bool, int, float, str)))
    about = (graph.code, inputs, plain, torch.get_num_threads(), torch.__version__, digest_of_sources())
    return Path(cache_dir(), "decentfn", hashlib.sha256(repr(about).encode()).hexdigest()[:32])
