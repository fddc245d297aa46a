"""Dynamo: its settings and guards, and the errors of torch.compile."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from decentfn.torch_private import batching
from decentfn.torch_private.names import GUARDS, WEIGHTS

F = TypeVar("F", bound=Callable[..., Any])

_CALL = "df.compile(step)"
_config: Any = None  # Dynamo's, since `prepare`


_NOT_COMPILED = (
    "Unsupported",
    "TorchRuntimeError",
    "UserError",
    "ObservedException",
    "BackendCompilerFailed",
    "InternalTorchDynamoError",
    "UncapturedHigherOrderOpError",
)


def is_not_compiled(error: BaseException) -> bool:
    """Return True for an error that torch.compile raises if it cannot compile."""
    return _is(error, *_NOT_COMPILED)


def is_of_too_many_graphs(error: BaseException) -> bool:
    """Return True for an error that torch.compile raises if the recompile limit is exceeded."""
    return _is(error, "FailOnRecompileLimitHit")


def _is(error: BaseException, *names: str) -> bool:
    """Return True for an error of one of these classes of the compiler, which are in a private module of PyTorch."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith("torch.") and "._" in kind.__module__]
    return any(kind.__name__ in names for kind in kinds)


def prepare() -> None:
    """Prepare for `df.compile`; raise RuntimeError if PyTorch lacks a name: a step would ignore changes."""
    global _config
    _config = GUARDS.require(_CALL)
    WEIGHTS.require(_CALL)
    batching.install()
    for function in _constant:
        torch.compiler.assume_constant_result(function)


def guard_everything() -> None:
    """Make Dynamo also guard, in this thread, modules' hooks, and that no two parameters are one tensor."""
    if _config.skip_nnmodule_hook_guards or _config.skip_no_tensor_aliasing_guards_on_parameters:
        _config.skip_nnmodule_hook_guards = _config.skip_no_tensor_aliasing_guards_on_parameters = False


_OWN = ("G['__import_decentfn_dot_", "G['__import_torch_dot_utils_dot__pytree']", "__import__('torch').utils._pytree.")


def are_needed(guards: Sequence[Any]) -> list[bool]:
    """Return False for guards on this library's own functions and classes, and on the tables of what trees consist of.

    Nobody changes these, and to check them cost a sixth of a small step. A guard's name says from where it was reached.
    """
    return [not guard.name.startswith(_OWN) or ".torch." in guard.name or ".context" in guard.name for guard in guards]


def with_constant_numbers(function: F) -> F:
    """Make Dynamo take Python's numbers (workers, inner steps) as constants in a function whose sizes are symbols."""
    return _config.patch(specialize_int=True)(function)


def guards_fail(error: AssertionError) -> bool:
    """Return True if guards fail right after compilation, a fault of PyTorch's with a loss that reads NumPy arrays."""
    return str(error).startswith("Guard failed on the same frame")


_constant: list[Callable[..., Any]] = []


def constant_while_traced(function: F) -> F:
    """Mark a function's result as constant in compiled code; `torch.compiler.assume_constant_result` imports Dynamo."""
    _constant.append(function)
    return function


_TOLD = r"(?:raised exception|Dynamo failed to run .*: got) (Value|Runtime)Error\((.*)\)"
"""Text of an error that Dynamo has observed in traced code; that of 2.14 may have another one's text in it."""


def first_error(error: BaseException) -> BaseException:
    """Return the original error; an error from a user's operator is only the context of Dynamo's own.

    Of an exception raised in traced code Dynamo keeps the text, from which its type and its message are taken.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if _is(error, "ObservedException"):
        first, text = error, str(error)
        while told := re.fullmatch(_TOLD, text, re.DOTALL):
            try:
                text = str(ast.literal_eval(told[2]))
            except (ValueError, SyntaxError):
                break
            first = (ValueError if told[1] == "Value" else RuntimeError)(text)
        return first
    if _is(error, "TorchRuntimeError"):
        while error.__context__ is not None:
            error = error.__context__
    return error
