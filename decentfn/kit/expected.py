"""The state that a step takes is the one that its own `init` lays out; what else comes is refused at the first call.

What is expected is computed, not remembered: `init` lays a plan out without values (`lay_out` of a `Plan`), so a
state from another process or from an algorithm built alike is taken. What `init` was called with is remembered beside
it, because a plain loss takes networks of any width.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from numbers import Number
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from decentfn import collectives, trees
from decentfn.buckets import Buckets, Plan, without_values
from decentfn.gradient import LossFn, raise_own, reading, require_batch, require_inputs
from decentfn.kit.state import Metrics, State
from decentfn.replicas import digest
from decentfn.torch_private import functorch
from decentfn.trees import PyTree
from decentfn.words import brief

_CALL = "step(state, batch, t)"
_WAY_OUT = "call this algorithm's init(params) anew, or build the step as the one that made the state was"

_LARGE = 2**16
"""Elements of a tensor that is remembered by its digest."""

_log = logging.getLogger("decentfn")


def marked(function: Callable[..., Any], **marks: Any) -> Callable[..., Any]:
    """The function with attributes, as `watch`, `made_by`, and of a step `check(state, batch, t)`, which raises what the step would.

    `raise_own(state, batch)` raises what the loss does in plain PyTorch; within `reading()` no other thread lends weights to its module.
    """
    function.__dict__.update(marks)
    return function


def check(step: Callable[..., Any], state: Any, batch: PyTree, t: Any) -> None:
    """What `step` finds wrong with its arguments at the first sight of them; nothing for a step that does not say."""
    require_order(state, batch, t)
    look = getattr(step, "check", None)
    if look is not None:
        look(state, batch, t)


def watch(step: Callable[..., Any], state: Any, t: Tensor) -> None:
    """Show the state after a step to the step's own `watch(state, t)`, which may raise."""
    look = None if torch.compiler.is_dynamo_compiling() else getattr(step, "watch", None)
    if look is not None:
        look(state, t)


def checked(
    init: Callable[..., Any], start: Callable[..., Any], step: Callable[..., Any], loss_fn: LossFn
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`start` and `step` that look at what they are given: the step once for each plan, at no cost from then on.

    Args:
        init: lays a plan out without values.
        start: `init` as the user calls it.
        step: the step.
        loss_fn: the loss.
    """
    laid_out: list[Plan] = []
    known: WeakValueDictionary[int, Plan] = WeakValueDictionary()

    @wraps(start)
    def start_checked(params: PyTree, buffers: PyTree = None) -> Any:
        _require_params(params)
        require_inputs("init(params, buffers)", loss_fn, params, buffers)
        state = start(params, buffers)
        if state.params.plan not in laid_out:
            laid_out.append(state.params.plan)
        return state

    def look(state: Any, batch: PyTree, t: Any) -> None:
        require_order(state, batch, t)
        if not is_state(state):
            _refuse_non_state(state, batch)
        x = state.params
        collectives.require_workers_of(x.plan.processes)
        _compare_layouts(init, state)
        if laid_out and x.plan not in laid_out:
            found, expected = _difference(x.plan.describe(), laid_out[-1].describe())
            raise ValueError(
                f"{_CALL}: the state holds {found!r} where init laid out {expected!r}; it is another network's: call "
                "init(params) for this one."
            )
        if getattr(step, "starts_equal", False) and not x.plan.starts_equal:
            raise ValueError(
                f"{_CALL}: the state is another algorithm's, whose workers may differ, and this one never makes them equal; start from "
                "their mean, init(df.consensus_mean(state))."
            )
        require_inputs(_CALL, loss_fn, without_values(x).tree(), state.buffers)
        require_batch(loss_fn, batch)

    @wraps(step)
    def run(state: Any, batch: PyTree, t: int | Tensor) -> Any:
        # A compiled function's first call looks before it traces.
        if not torch.compiler.is_dynamo_compiling():
            plan = state.params.plan if is_state(state) else None
            if plan is None or known.get(id(plan)) is not plan:
                look(state, batch, t)
                with left_alone(state):
                    result = step(state, batch, t)
                _require_result(state, result)
                known[id(state.params.plan)] = state.params.plan
                return result
            collectives.require_workers_of(plan.processes)
        return step(state, batch, t)

    return start_checked, marked(
        run, check=look, raise_own=partial(raise_own, loss_fn), reading=partial(reading, loss_fn)
    )


@contextmanager
def left_alone(state: Any) -> Iterator[None]:
    """Within, a step leaves the parameters and buffers that it is given as they are, or an error names one."""
    held = {"params": state.params.tree(), "buffers": state.buffers}
    before = [(name, _remembered(leaf)) for name, leaf in trees.named_leaves(held)]
    yield
    for (name, old), leaf in zip(before, trees.leaves(held), strict=True):
        if not (functorch.are_equal(old, leaf) if isinstance(old, torch.Tensor) else old == _remembered(leaf)):
            raise RuntimeError(
                f"{_CALL}: the loss, or the algorithm, wrote over {name!r} of the state that the step was given. A step is a function "
                "of its state: let both work on copies, and the loss return what changes as buffers (frozen parameters that it moves: "
                "df.functional(module, ..., overwritten=[...])); clip parameters between steps, with df.with_params."
            )


def _remembered(leaf: Tensor) -> Tensor | tuple[torch.Size, str]:
    """A copy; of what is large and plain the shape and a digest, which need no memory."""
    is_plain = type(leaf) is Tensor and leaf.device.type == "cpu" and not functorch.is_wrapped(leaf)
    if is_plain and leaf.numel() >= _LARGE and leaf.is_contiguous() and not leaf.is_conj():
        return leaf.shape, digest(leaf)
    return torch.clone(leaf)


def _require_result(state: Any, result: Any) -> None:
    """What a step returns: a state like the one that it was given, and metrics."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], State) or not isinstance(result[1], Metrics):
        found = [type(part).__name__ for part in result] if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"{_CALL}: the step returned {found}; it returns (State(params, local, memory), metrics), the metrics as "
            "worker.gradient's g.metrics, or Metrics(loss, aux, grad_norm)."
        )
    returned, given = ([kind_of(s), *_lines(s)] for s in (result[0], state))
    if returned != given:
        found, expected = _difference(returned, given)
        raise ValueError(
            f"{_CALL}: the step returned a state with {found} where it was given one with {expected}; a new state has the "
            "fields, shapes and dtypes of the old one."
        )


def is_state(value: Any) -> bool:
    """Whether this is a training state."""
    return isinstance(getattr(value, "params", None), Buckets)


def require_order(state: Any, batch: PyTree, t: Any) -> None:
    """The step's number stands last."""
    if not isinstance(t, Number) and not (isinstance(t, torch.Tensor) and t.numel() == 1):
        first = "" if is_state(state) else f", and its first a {type(state).__name__}"
        raise ValueError(
            f"{_CALL}: its third argument is a {type(t).__name__}{first}; the order is the state, the batch, and t, the "
            "number of the step."
        )


def _refuse_non_state(state: Any, batch: PyTree) -> NoReturn:
    order = "; the batch comes second" if is_state(batch) else ", from init(params)"
    raise ValueError(f"{_CALL}: its first argument is a {type(state).__name__}, not a training state{order}.")


def _require_params(params: PyTree) -> None:
    if is_state(params) or isinstance(params, Buckets):
        raise ValueError(
            f"init(params): found a training state's {type(params).__name__}, which step(state, batch, t) goes on with; "
            "to start anew from its parameters, call init(df.params(state))."
        )
    if isinstance(params, nn.Module):
        raise ValueError(
            f"init(params={brief(params)}): expected a tree of tensors; make it, the buffers and the loss from a module "
            "with `params, buffers, loss_fn = df.functional(module, criterion)`."
        )


def _compare_layouts(init: Callable[..., Any], state: Any) -> None:
    """The state has the fields, shapes and dtypes that `init` gives to its plan and buffers."""
    if state.params[0].dim() == 2:
        n = state.params[0].shape[0]
        raise ValueError(
            f"{_CALL}: the state is stacked, of {n} workers, and this is the step of one; use df.simulate(step, {n}), or "
            "df.worker(state, i)."
        )
    try:
        expected = init(state.params.plan, trees.map(_without_values, state.buffers))
    except ValueError as error:
        raise ValueError(f"{_CALL}: the state's layout does not suit this step; {_WAY_OUT}. ({error})") from error
    except (RuntimeError, TypeError) as error:
        _log.debug("the state is not compared with init's, which needs values: %s", error)
        return
    if kind_of(state) != kind_of(expected):
        raise ValueError(
            f"{_CALL}: the state is a {kind_of(state)}, and this step takes a {kind_of(expected)}; {_WAY_OUT}."
        )
    if (lines := _lines(state)) != (wanted := _lines(expected)):
        found, expected = _difference(lines, wanted)
        raise ValueError(
            f"{_CALL}: the state holds {found} where this step expects {expected}, as another optimizer's or another "
            f"configuration's; {_WAY_OUT}."
        )


def _without_values(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def kind_of(state: Any) -> str:
    """What a state is to its user: whose memory it holds."""
    memory = getattr(state, "memory", None)
    if memory is None:
        return type(state).__name__
    if memory == ():
        return "State without memory"
    return f"State with the memory of {type(memory).__module__.removeprefix('decentfn.algorithms.')}"


def _lines(state: Any) -> list[str]:
    return [f"{name} {leaf.dtype} {list(leaf.shape)}" for name, leaf in trees.named_leaves(state)]


def _difference(found: list[str], expected: list[str]) -> tuple[str, str]:
    pairs = itertools.zip_longest(found, expected, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), ("another tree", "its own"))
