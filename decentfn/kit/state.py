"""Training state, in one form for all algorithms, and its check: a step accepts only what its own `init` has laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from decentfn.comm.fingerprint import label
from decentfn.core import PyTree, as_step, first_difference, require, trees
from decentfn.core.buckets import Buckets, copy_wide, zeros_like
from decentfn.gradient import LossFn, LossScale, require_first
from decentfn.gradient import Metrics as Metrics
from decentfn.optim.transforms import RateState
from decentfn.topologies import Topology
from decentfn.torch_private import functorch

CALL = "step(state, batch, t)"

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


# -- checks -----------------------------------------------------------------------------------------------------------


class StateCheck:
    """Check of states before their first step, against the layouts that the algorithm's `init` made."""

    def __init__(
        self, loss_fn: LossFn, start: Callable[..., Any] | None, topology: Topology, *, starts_equal: bool
    ) -> None:
        self._loss_fn, self._start, self._topology, self._starts_equal = loss_fn, start, topology, starts_equal
        self._layouts: list[list[str]] = []
        self._has_restarted = False
        """True once a state of another topology has come with memory that starts again."""

    def record(self, state: State) -> State:
        """Record the layout of a state from `init` as an expected one, and return the state."""
        if (layout := _layout(state)) not in self._layouts:
            self._layouts.append(layout)
        if getattr(state.memory, "of_topology", False):
            _ = self._label
        return state

    @cached_property
    def _label(self) -> str:
        """The topology's; made in `init`, because a traced step cannot read tables."""
        return label(self._topology)

    def check(self, state: Any, batch: PyTree, t: Any) -> None:
        """Raise ValueError unless the state is as `init`, or else a start from it, lays it out."""
        if not is_state(state):
            order = "; the batch comes second" if is_state(batch) else ", from init(params)"
            raise ValueError(f"{CALL}: its first argument is a {type(state).__name__}, not a training state{order}.")
        x = state.params
        if x[0].dim() == 2:
            n = x[0].shape[0]
            raise ValueError(
                f"{CALL}: the state is stacked, of {n} workers, and this is the step of one; use df.simulate(step, {n}), or "
                "df.worker(state, i)."
            )
        found = _layout(state)
        if not self._layouts and self._start is not None:
            self.record(self._start(x, state.buffers))
        if self._layouts and found not in self._layouts:
            theirs, ours = first_difference(found, self._layouts[-1])
            raise ValueError(
                f"{CALL}: the state has {theirs!r} where init laid out {ours!r}: it belongs to another algorithm, network "
                "or optimizer; call this algorithm's init(params) again, or build the step like the one that made the state."
            )
        if self._starts_equal and not x.plan.starts_equal:
            raise ValueError(
                f"{CALL}: the state is another algorithm's, whose workers may differ, and this one never makes them equal; start from "
                "their mean, init(df.consensus_mean(state))."
            )
        if getattr(state.memory, "of_topology", False) and x.plan.topology not in (None, self._label):
            fresh = zip(trees.leaves(state.memory), trees.leaves(restarted(state.memory, x)), strict=True)
            self._has_restarted |= all(functorch.are_equal(*both) for both in fresh)
            rule = f"the memory has sums on topology {x.plan.topology}, and the step is of {self._label}; "
            require(self._has_restarted, CALL, f"{rule}df.with_params(state, df.params(state)) starts them again.")
        require_first(CALL, self._loss_fn, x, state.buffers, batch, as_step(t))


@contextmanager
def left_alone(state: Any) -> Iterator[None]:
    """Context that raises if a step overwrites a given parameter or buffer, and names it."""
    held = {"params": state.params.tree(), "buffers": state.buffers}
    before = [(name, torch.clone(leaf)) for name, leaf in trees.named_leaves(held)]
    yield
    for (name, old), leaf in zip(before, trees.leaves(held), strict=True):
        if not functorch.are_equal(old, leaf):
            raise RuntimeError(
                f"{CALL}: the loss, or the algorithm, wrote over {name!r} of the state that the step was given. Work on "
                "copies; let the loss return changed values as buffers (for frozen parameters: df.functional(module, ..., "
                "overwritten=[...])); clip parameters between steps, with df.with_params."
            )


def refuse_result(result: Any) -> NoReturn:
    """Raise ValueError: a step has returned something else than a state and metrics."""
    found = [type(part).__name__ for part in result] if isinstance(result, tuple) else type(result).__name__
    raise ValueError(
        f"{CALL}: the step returned {found}; it returns (State(params, local, memory), metrics); "
        "metrics is worker.gradient's g.metrics or Metrics(loss, aux, grad_norm)."
    )


def require_like(given: Any, returned: Any) -> None:
    """Raise ValueError unless a step returned a state like the one it was given."""
    returned, given = ([kind_of(s), *lines_of(s)] for s in (returned, given))
    if returned != given:
        found, expected = first_difference(returned, given)
        raise ValueError(
            f"{CALL}: the step returned a state with {found} where it was given one with {expected}; a new state has the "
            "fields, shapes and dtypes of the old one (a sum of parameters and a wide memory: cast it, .to(x.dtype))."
        )


def is_state(value: Any) -> bool:
    """Return True for a training state."""
    return isinstance(getattr(value, "params", None), Buckets)


def require_params(params: PyTree) -> None:
    """Raise ValueError for a state, which is a tree of tensors, too."""
    if is_state(params) or isinstance(params, Buckets):
        raise ValueError(
            f"init(params): found a training state's {type(params).__name__}; step(state, batch, t) continues it, "
            "and init(df.params(state)) starts again from its parameters."
        )


def kind_of(state: Any) -> str:
    """Describe a state by the algorithm of its memory."""
    memory = getattr(state, "memory", None)
    if memory is None:
        return type(state).__name__
    if memory == ():
        return "State without memory"
    return f"State with the memory of {type(memory).__module__.removeprefix('decentfn.algorithms.')}"


def lines_of(state: Any) -> list[str]:
    """Return a line for each leaf of a state or a batch: name, dtype and shape."""
    return [f"{name} {leaf.dtype} {list(leaf.shape)}" for name, leaf in trees.named_leaves(state)]


def _layout(state: Any) -> list[str]:
    return [kind_of(state), *state.params.plan.describe(), *lines_of(state)]
