"""What torch.compile raises where it cannot compile."""

from __future__ import annotations

from decentfn.words import root

try:
    from torch._dynamo import exc

    NOT_COMPILED: tuple[type[Exception], ...] = (
        exc.Unsupported,
        exc.TorchRuntimeError,
        exc.UserError,
        exc.ObservedException,
        exc.BackendCompilerFailed,
        exc.InternalTorchDynamoError,
        exc.UncapturedHigherOrderOpError,
    )
    TOO_MANY_GRAPHS: tuple[type[Exception], ...] = (exc.FailOnRecompileLimitHit,)
    _FAILED_WHILE_TRACED: tuple[type[Exception], ...] = (exc.TorchRuntimeError,)
except (ImportError, AttributeError):
    NOT_COMPILED = TOO_MANY_GRAPHS = _FAILED_WHILE_TRACED = ()


def first_error(error: BaseException) -> BaseException:
    """The error with which it began; what an operator of the user's raised is only the context of Dynamo's own."""
    error = root(error)
    if isinstance(error, _FAILED_WHILE_TRACED):
        while error.__context__ is not None:
            error = error.__context__
    return error
