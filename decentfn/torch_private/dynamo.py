"""What torch.compile raises where it cannot compile."""

from __future__ import annotations

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
except (ImportError, AttributeError):
    NOT_COMPILED = TOO_MANY_GRAPHS = ()
