"""State check: a step accepts only states that its own `init` has laid out, and refuses others at the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decentfn.core import PyTree, as_step, first_difference, trees
from decentfn.core.buckets import Buckets
from decentfn.gradient import LossFn, require_batch, require_inputs, require_module_unchanged
from decentfn.kit.state import Metrics, State
from decentfn.torch_private import functorch

CALL = "step(state, batch, t)"


class StateCheck:
    """Check of states before their first step, against the layouts that the algorithm's `init` made."""

    def __init__(self, loss_fn: LossFn, start: Callable[..., Any] | None, *, starts_equal: bool) -> None:
        self._loss_fn, self._start, self._starts_equal = loss_fn, start, starts_equal
        self._layouts: list[list[str]] = []

    def record(self, state: State) -> State:
        """Record the layout of a state from `init` as an expected one, and return the state."""
        if (layout := _layout(state)) not in self._layouts:
            self._layouts.append(layout)
        return state

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
        require_inputs(CALL, self._loss_fn, x.plan.without_values().tree(), state.buffers)
        require_module_unchanged(CALL, self._loss_fn, x.tree(), state.buffers, as_step(t))
        require_batch(self._loss_fn, batch)


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


def require_result(state: Any, result: Any) -> None:
    """Raise ValueError unless a step returned a state like the one it was given, and metrics."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], State) or not isinstance(result[1], Metrics):
        found = [type(part).__name__ for part in result] if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"{CALL}: the step returned {found}; it returns (State(params, local, memory), metrics); "
            "metrics is worker.gradient's g.metrics or Metrics(loss, aux, grad_norm)."
        )
    returned, given = ([kind_of(s), *lines_of(s)] for s in (result[0], state))
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
