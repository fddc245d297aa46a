"""What torch.compile is told of a function, and what it raises where it cannot compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from decentfn.core.formatting import root
from decentfn.torch_private.names import GUARDS, WEIGHTS

F = TypeVar("F", bound=Callable[..., Any])

_CALL = "df.compile(step)"
_config: Any = None  # Dynamo's, since `prepare`

_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


_NOT_COMPILED = (
    "Unsupported",
    "TorchRuntimeError",
    "UserError",
    "ObservedException",
    "BackendCompilerFailed",
    "InternalTorchDynamoError",
)


def is_not_compiled(error: BaseException) -> bool:
    """Return True if it is raised where torch.compile cannot compile."""
    return _is(error, *_NOT_COMPILED)


def is_of_too_many_graphs(error: BaseException) -> bool:
    """Return True if it is raised where torch.compile would compile more often than it may."""
    return _is(error, "FailOnRecompileLimitHit")


def _is(error: BaseException, *names: str) -> bool:
    """Return True for an error of one of these classes of the compiler's, which stand in a private module of PyTorch."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith("torch.") and "._" in kind.__module__]
    return any(kind.__name__ in names for kind in kinds)


def not_loaded(error: BaseException) -> BaseException | None:
    """What the system said of compiled code that it could not load, if that is why `error` was raised."""
    said = getattr(error, "inner_exception", None)
    return said if isinstance(said, (ImportError, OSError)) and ".so" in str(said) else None


def prepare() -> None:
    """Make ready for `df.compile`.

    Raises:
        RuntimeError: PyTorch lacks a name without which a compiled step would go on with what has changed.
    """
    global _config
    _config = GUARDS.require(_CALL)
    WEIGHTS.require(_CALL)
    for function in _constant:
        torch.compiler.assume_constant_result(function)


def at_most(graphs: int) -> dict[str, Any]:
    """Return the arguments of torch.compile for at most so many graphs; before torch 2.13 it has none, see `guard_everything`."""
    return {"recompile_limit": graphs} if _HAS_LIMIT else {}


def guard_everything(graphs: int) -> None:
    """Let Dynamo guard in this thread what it leaves out by default: modules' hooks, and that no two parameters are one tensor.

    If torch.compile takes no limit of `graphs`, the thread's own is raised to it.
    """
    if not _HAS_LIMIT and _config.recompile_limit < graphs:
        _config.recompile_limit = graphs
    if _config.skip_nnmodule_hook_guards or _config.skip_no_tensor_aliasing_guards_on_parameters:
        _config.skip_nnmodule_hook_guards = _config.skip_no_tensor_aliasing_guards_on_parameters = False


def guards_fail(error: AssertionError) -> bool:
    """Return True if the guards of what was compiled do not hold at once, which is PyTorch's fault: a loss reads NumPy's arrays."""
    return str(error).startswith("Guard failed on the same frame")


_constant: list[Callable[..., Any]] = []


def constant_while_traced(function: F) -> F:
    """Let a compiled step take what the function returns for a constant. `torch.compiler.assume_constant_result` imports Dynamo."""
    _constant.append(function)
    return function


def first_error(error: BaseException) -> BaseException:
    """The error with which it began; what an operator of the user's raised is only the context of Dynamo's own."""
    error = root(error)
    if _is(error, "TorchRuntimeError"):
        while error.__context__ is not None:
            error = error.__context__
    return error
