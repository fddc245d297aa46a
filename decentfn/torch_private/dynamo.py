"""What torch.compile is told of a function, and what it raises where it cannot compile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

from decentfn.words import root

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled() -> tuple[type[Exception], ...]:
    """What it raises where it cannot compile."""
    return _errors(
        "Unsupported",
        "TorchRuntimeError",
        "UserError",
        "ObservedException",
        "BackendCompilerFailed",
        "InternalTorchDynamoError",
        "UncapturedHigherOrderOpError",
    )


def too_many_graphs() -> tuple[type[Exception], ...]:
    """What it raises where it would compile more often than it may."""
    return _errors("FailOnRecompileLimitHit")


def _errors(*names: str) -> tuple[type[Exception], ...]:
    try:
        from torch._dynamo import exc
    except ImportError:
        return ()
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def not_loaded(error: BaseException) -> BaseException | None:
    """What the system said of compiled code that it could not load, if that is why `error` was raised."""
    said = getattr(error, "inner_exception", None)
    return said if isinstance(said, (ImportError, OSError)) and ".so" in str(said) else None


class _Within(threading.local):
    compiled = False
    """Whether what runs is compiled code, with tensors that have values."""


within = _Within()


def directly(function: FunctionType, compiled: F) -> F:
    """`compiled`, which torch.compile made of `function`: what it has compiled is called without its wrapper where the guards hold.

    The wrapper's checks of Dynamo's own state take a sixth of a small network's step. Another wrapper, that keeps Dynamo away
    from what was compiled, is left out too where Dynamo is not there.
    """
    cells, names = _cells(function), function.__code__.co_varnames[: function.__code__.co_argcount]
    known: list[tuple[Callable[[dict[str, Any]], bool], Callable[..., Any]]] = []

    def call(*arguments: Any) -> Any:
        values = *arguments, *map(_content, cells.values())
        local = dict(zip((*names, *cells), values, strict=True))
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # what `torch.compiler.set_stance` says
        if getattr(getattr(eval_frame, "_stance", None), "stance", "") != "default" or _is_traced() is not None:
            return compiled(*arguments)
        for holds, run in known:
            if holds(local):
                before, within.compiled = within.compiled, True
                try:
                    return run(*arguments)
                finally:
                    within.compiled = before
        with _without_records():
            result = compiled(*arguments)
        known.extend(_compiled(function, local))
        return result

    return call  # pyright: ignore[reportReturnType]


def _without_records() -> AbstractContextManager[None]:
    """What is compiled within does not tell the profiler of Dynamo's own overhead, which it would look for in every call."""
    from torch._dynamo import config

    return config.patch(record_runtime_overhead=False) if hasattr(config, "record_runtime_overhead") else nullcontext()


_content = attrgetter("cell_contents")
_is_traced = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)  # pyright: ignore
"""Not None where Dynamo looks at what is called."""


def _cells(function: FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _compiled(
    function: FunctionType, local: dict[str, Any]
) -> list[tuple[Callable[[dict[str, Any]], bool], Callable[..., Any]]]:
    """What was compiled of a function for these arguments, with its guards; nothing where PyTorch does not show it."""
    found, cells = [], _cells(function)
    try:
        for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__):  # pyright: ignore
            if entry.guard_manager.check(local):
                closure = tuple(cells[name] for name in entry.code.co_freevars)
                run = FunctionType(entry.code, _undisabled(entry.code, function), function.__name__, None, closure)
                found.append((entry.guard_manager.check, run))
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    return found


def _undisabled(code: CodeType, function: FunctionType) -> dict[str, Any]:
    """The function's globals, in which what the code calls by Dynamo's names is not wrapped in `torch.compiler.disable`."""
    known = function.__globals__
    own = {name: known[name] for name in code.co_names if name.startswith("__compiled_fn")}
    return known | {name: getattr(f, "_torchdynamo_orig_callable", f) for name, f in own.items()}


def constant_while_traced(function: F) -> F:
    """As torch.compiler.assume_constant_result, which imports Dynamo for it."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def first_error(error: BaseException) -> BaseException:
    """The error with which it began; what an operator of the user's raised is only the context of Dynamo's own."""
    error = root(error)
    if isinstance(error, _errors("TorchRuntimeError")):
        while error.__context__ is not None:
            error = error.__context__
    return error
