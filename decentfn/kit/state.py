"""Training state, in one form for all algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from decentfn.core import PyTree, trees
from decentfn.core.buckets import Buckets, copy_wide, zeros_like
from decentfn.gradient import LossScale
from decentfn.gradient import Metrics as Metrics
from decentfn.optim.transforms import RateState

M = TypeVar("M", bound=tuple[Any, ...])


class Guarded(NamedTuple):
    """Counts of this worker's steps in which `df.guard` intervened; 0-d int64 each."""

    skipped: Tensor  # steps with a bad gradient or update, omitted wholly or in part
    replaced: Tensor  # steps with a bad message, which was not sent
    in_a_row: Tensor  # consecutive bad steps of either kind, up to the last step


class Local(NamedTuple):
    """Local data of a worker in addition to its parameters, the same in every algorithm."""

    opt: PyTree  # the optimizer's state
    buffers: PyTree = None
    scale: LossScale | None = None  # None: the loss is not scaled
    guard: Guarded | None = None  # None: the algorithm is not guarded


class State(NamedTuple):
    """Training state of one worker, or of N with a leading axis `[N]` in every leaf."""

    params: Buckets  # the parameters to evaluate
    local: Local
    memory: Any = ()
    """Memory of the algorithm: trackers, slow copies, in-flight messages. A NamedTuple with a method
    `restart(x: Buckets)`, which returns the memory of a run that starts at parameters x; or `()` for none. The
    attribute `averaged` names the fields whose means over the workers `df.resize` keeps; other fields are reset.
    With `of_topology = True` a checkpoint that is continued on another topology resets all of them. When
    other workers leave, a worker keeps these fields, unless a method `without_lost(x, mean)` says otherwise."""

    @property
    def buffers(self) -> PyTree:
        """The state's own buffers, as the tree passed to `init` or returned by the last loss; `df.buffers` copies."""
        return self.local.buffers


def zeroed(cls: type[M], x: Buckets) -> M:
    """Return a memory whose fields are all 0, wide, in the shapes of `x`: `restart = classmethod(zeroed)` in its class."""
    fields: tuple[str, ...] = getattr(cls, "_fields")  # noqa: B009
    return cls(*(zeros_like(x) for _ in fields))


def restarting(*at_x: str) -> Callable[[M, Buckets], M]:
    """Return the `restart` of a memory whose fields of these names begin at x, wide, and all others at 0.

    Learning rates of an outer optimizer's state stay. In its class: `restart = kit.restarting("phi")`.
    """

    def restart(memory: M, x: Buckets) -> M:
        zeros = trees.map_nodes(RateState, lambda zero, rate: rate, trees.map(torch.zeros_like, memory), memory)
        return zeros._replace(**{name: copy_wide(x) for name in at_x}) if at_x else zeros

    return restart


def restarted(memory: Any, x: Buckets) -> Any:
    """Return the memory of a run that starts at x, from the memory's own `restart`; raise ValueError if it has none."""
    if isinstance(memory, tuple) and not memory:
        return memory
    method = getattr(memory, "restart", None)
    if method is None:
        raise ValueError(
            f"with_params, resize: the state's memory, a {type(memory).__name__}, has no `restart`; give its "
            "class a method restart(self, x), as in df.kit.State's description, or call init(params) again."
        )
    return method(x)


def kept(memory: Any, x: Buckets, mean: Callable[[Buckets], Buckets]) -> Any:
    """Return the memory of a worker that continues at x although others are lost; `mean` is collective over those left.

    Memory of the run stays, and memory of other workers is reset, unless the memory's `without_lost` says otherwise.
    """
    if hasattr(memory, "without_lost"):
        return memory.without_lost(x, mean)
    fresh = restarted(memory, x)
    stays = {name: getattr(memory, name) for name in getattr(memory, "averaged", ())}
    return fresh._replace(**stays) if stays else fresh
