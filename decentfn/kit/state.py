"""What a step takes and returns: one state for all algorithms, and its metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from decentfn.core.buckets import Buckets
from decentfn.core.trees import PyTree
from decentfn.gradient import LossScale
from decentfn.gradient import Metrics as Metrics


class Guarded(NamedTuple):
    """How many steps of this worker `df.guard` had to do with; 0-d int64 each."""

    skipped: Tensor  # whose gradient or update was bad, so that it made none, or not all of it
    replaced: Tensor  # in which what it would have sent was bad, and did not travel
    in_a_row: Tensor  # the last ones, either way, without a good one between them


class Local(NamedTuple):
    """What a worker keeps for itself beside its parameters, in every algorithm alike."""

    opt: PyTree  # the optimizer's state
    buffers: PyTree = None
    scale: LossScale | None = None  # None: the loss is not scaled
    guard: Guarded | None = None  # None: nobody guards against bad values


class State(NamedTuple):
    """The training state of one worker, or of N with a leading axis `[N]` in every leaf."""

    params: Buckets  # what one evaluates
    local: Local
    memory: Any = ()
    """What the algorithm itself remembers: trackers, slow copies, messages under way. A NamedTuple with a method
    `restart(x: Buckets)`, which returns the memory of a run that starts at parameters x; or nothing, `()`. Its attribute
    `averaged`, names of fields, says whose means over the workers `df.resize` keeps; what it does not name starts anew."""

    @property
    def buffers(self) -> PyTree:
        """The buffers, as the tree that `init` was given or the loss last returned: the state's own; `df.buffers` copies them."""
        return self.local.buffers


def restarted(memory: Any, x: Buckets) -> Any:
    """The memory of a run that starts at parameters x, as the memory's own `restart` says.

    Raises:
        ValueError: a memory without that method.
    """
    if isinstance(memory, tuple) and not memory:
        return memory
    method = getattr(memory, "restart", None)
    if method is None:
        raise ValueError(
            f"with_params, resize: the state's memory, a {type(memory).__name__}, does not say what becomes of it; give its "
            "class a method restart(self, x), as in df.kit.State's description, or call init(params) anew."
        )
    return method(x)
