"""Building blocks of optimizers: scale, clip, decay, momentum.

Learning rates, decays and schedules are inputs of a compiled step, so one graph serves all their values. They are
computed once in float64 and cast to each bucket's dtype: a float64 0-d tensor has an axis under `vmap`, so some
operators (torch.where) would promote a float32 bucket. 16-bit buckets compute and keep states in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core import Numbers, PyTree, checks_arguments, checks_numbers, once, real, require, rule_of, trees
from decentfn.core.buckets import Buckets, Mask, each, global_norm, in_parts, multiply, where, wide, zeros_like
from decentfn.optim.schedules import require_schedule
from decentfn.optim.transforms.transform import Transform, ascending, descending, masked
from decentfn.torch_private import functorch

Scalar = float | Callable[[Tensor], "Tensor | float"]
"""Number, or function of the count of earlier updates (0-d int64 tensor); see `df.schedules`."""


class ScheduleState(NamedTuple):
    """Number of updates of a transform with a scheduled number."""

    count: Tensor  # 0-d int64


class RateState(NamedTuple):
    """State of a learning rate: a number, which the training loop may set, or the last value of a schedule."""

    learning_rate: Tensor  # 0-d float64: of the next update, or of the last one if scheduled
    count: Tensor | tuple[()] = ()  # 0-d int64, updates so far; () if the rate is a number

    @property
    def is_scheduled(self) -> bool:
        """Return True if the rate follows a schedule."""
        return isinstance(self.count, Tensor)


class TraceState(NamedTuple):
    """Momentum `m`, in float32 or wider."""

    momentum: Buckets


def new_count(params: Sequence[Tensor] | Buckets) -> Tensor:
    """Return a count of 0, 0-d int64 on the parameters' device."""
    return torch.zeros((), dtype=torch.int64, device=params[0].device if len(params) else None)


def _require_scalar(call: str, name: str, value: Scalar) -> None:
    rule = "a finite number >= 0, or a function of the update count that returns one (see df.schedules)"
    if callable(value):
        require_schedule(call, name, value)
    else:
        require(real(call, name, value) >= 0, call, f"{name} is {rule}.", **{name: value})


RULES = {
    **dict.fromkeys(("learning_rate", "weight_decay"), _require_scalar),
    **dict.fromkeys(("b1", "b2", "momentum", "decay"), rule_of(lambda x: 0 <= x < 1, "is in [0, 1).")),
    **dict.fromkeys(("momentum_decay", "initial"), rule_of(lambda x: x >= 0, "is >= 0.")),
    "eps": rule_of(lambda x: x > 0, "is positive; leave it out for the default."),
    "clip": rule_of(lambda x: x >= 1, "is >= 1."),
    "steps": rule_of(lambda x: x >= 1, "is an integer >= 1; 5 is the default."),
    "accum_iter": rule_of(lambda x: x >= 1, "is an integer >= 1, the updates in a window; 1 is plain Adam."),
    "mask": rule_of(lambda x: x is None or callable(x), "is a function (dotted name, shape) -> bool, or None for all."),
}
"""Rules of the arguments of transforms and optimizers, by their names."""


def unless_zero(scalar: Scalar, transform: Callable[[], Transform]) -> tuple[Transform, ...]:
    """Return the transform as part of a chain, or nothing if its number is the constant 0."""
    return () if not callable(scalar) and scalar == 0 else (transform(),)


def _scheduled(
    scalar: Scalar, apply: Callable[[Tensor, Buckets, Buckets], Buckets], *, ascends: bool = False
) -> Transform:
    """Make a transform of `apply(number, grads, params)` that counts updates only if the number is scheduled."""
    pair = ascending if ascends else Transform
    if not callable(scalar):
        numbers = Numbers(scalar)

        def unscheduled(grads: Buckets, state: PyTree, params: Buckets) -> tuple[Buckets, PyTree]:
            return apply(numbers.on(grads[0])[0], grads, params) if len(grads) else grads, state

        return pair(lambda params: (), unscheduled)

    def init(params: Buckets) -> ScheduleState:
        return ScheduleState(new_count(params))

    def update(grads: Buckets, state: ScheduleState, params: Buckets) -> tuple[Buckets, ScheduleState]:
        return apply(_value(scalar, state.count), grads, params), ScheduleState(state.count + 1)

    return pair(init, update)


def _value(schedule: Callable[[Tensor], Tensor | float], count: Tensor) -> Tensor:
    value = schedule(count)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=count.device)  # as_tensor would wait for a GPU
    return once(value.to(count.device, torch.float64))


@checks_numbers
def scale(factor: float) -> Transform:
    """Multiply by a constant. `scale(0.0)` freezes parameters.

    Args:
        factor: any finite number; negative to descend.
    """

    def apply(number: Tensor, grads: Buckets, params: Buckets) -> Buckets:
        return where(number != 0, multiply(grads, number), each(torch.zeros_like, grads))  # 0 times NaN would be NaN

    return _scheduled(factor, apply, ascends=factor > 0)


@checks_arguments(RULES)
def scale_by_learning_rate(learning_rate: Scalar) -> Transform:
    """Multiply by `-learning_rate`, which turns a gradient direction into an update.

    The rate is in the state: `df.learning_rate` returns it, and `df.set_learning_rate` sets one that is a number.

    Args:
        learning_rate: a number >= 0, or a function of the count of updates before this one (0-d int64 tensor).
    """
    return by_rate(learning_rate)


def by_rate(learning_rate: Scalar, *, in_place: bool = False) -> Transform:
    """As `scale_by_learning_rate`; `in_place` for a chain whose vectors are new ones, which nobody else reads."""

    def update(grads: Buckets, state: RateState, params: Buckets) -> tuple[Buckets, RateState]:
        state = next_rate(learning_rate, state)
        return multiply(grads, -state.learning_rate, in_place=in_place), state

    return descending(lambda params: start_rate(learning_rate, params), update)


def start_rate(learning_rate: Scalar, params: Sequence[Tensor] | Buckets) -> RateState:
    """Return the state of a learning rate before the first update."""
    count = new_count(params)
    if callable(learning_rate):
        return RateState(_value(learning_rate, count), count)
    return RateState(torch.full((), float(learning_rate), dtype=torch.float64, device=count.device))


def next_rate(learning_rate: Scalar, state: RateState) -> RateState:
    """Return the state whose learning rate is that of this update."""
    if not callable(learning_rate):
        return state
    assert isinstance(state.count, Tensor)
    return RateState(_value(learning_rate, state.count), state.count + 1)


def rates(opt: PyTree) -> list[RateState]:
    """Return the learning rates in an optimizer's state: one, or that of each parameter group."""
    found: list[RateState] = []
    todo = [opt]
    while todo:
        node = todo.pop()
        if isinstance(node, RateState):
            found.append(node)
        elif isinstance(node, (tuple, list)):
            todo += node[::-1]
        elif isinstance(node, dict):
            todo += reversed(trees.children(node))
    return found


def current_rate(opt: PyTree) -> Tensor | None:
    """Return the learning rate, `[*workers]`; `[*workers, G]` of G parameter groups; None if the state has none."""
    own = [node.learning_rate for node in rates(opt)]
    return None if not own else own[0].clone() if len(own) == 1 else torch.stack(own, dim=-1)


@checks_arguments(RULES)
def add_decayed_weights(weight_decay: Scalar, mask: Mask | None = None) -> Transform:
    """Add weight decay, `g + λ x`: l2 regularization before an adaptive part, decoupled weight decay after it.

    Args:
        weight_decay: λ >= 0, or a function of the count of updates before this one (0-d int64 tensor).
        mask: the leaves that decay, `(dotted name, shape) -> bool`, for example `not_bias_or_norm`; None: all.
    """

    def decay(number: Tensor, grads: Buckets, params: Buckets) -> Buckets:
        def one(g: Tensor, x: Tensor) -> Tensor:
            w = wide(g.dtype)
            decayed = number.to(w) * x.to(w)
            return (g.to(w) + decayed if functorch.is_batched(g) else decayed.add_(g)).to(g.dtype)

        return each(one, grads, params)

    transform = _scheduled(weight_decay, decay, ascends=True)
    return transform if mask is None else masked(transform, mask)


@checks_arguments(RULES)
def trace(decay: float, nesterov: bool = False) -> Transform:
    """Apply momentum: `m⁺ = β m + g`, update `m⁺`; Nesterov: `g + β m⁺`.

    Args:
        decay: β in [0, 1).
        nesterov: use Nesterov's momentum.
    """

    def init(params: Buckets) -> TraceState:
        return TraceState(zeros_like(params))

    def update(grads: Buckets, state: TraceState, params: Buckets) -> tuple[Buckets, TraceState]:
        momentum = each(lambda m, g: decay * m + g.to(m.dtype), state.momentum, grads)

        def direction(g: Tensor, m: Tensor) -> Tensor:
            # Copy, so that the caller's updates and the state are never one tensor.
            return (g.to(m.dtype) + decay * m).to(g.dtype) if nesterov else m.to(g.dtype, copy=True)

        return each(direction, grads, momentum), TraceState(momentum)

    return ascending(init, update)


def clip_by_global_norm(max_norm: float) -> Transform:
    """Multiply by `min(1, max_norm / (‖g‖ + 1e-6))`, the norm taken over all buckets; of `shared=`, and of the rest, its own.

    Args:
        max_norm: positive; `inf` clips nothing.
    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    call = "clip_by_global_norm"
    is_infinite = isinstance(max_norm, Real) and max_norm == float("inf")
    number = float("inf") if is_infinite else real(call, "max_norm", max_norm)
    require(number > 0, call, "max_norm is positive.", max_norm=max_norm)

    def clipped(grads: Buckets) -> Buckets:
        return multiply(grads, once(torch.clamp(number / (global_norm(grads) + 1e-6), max=1.0)))

    return ascending(lambda params: (), lambda grads, state, params: (in_parts(clipped, grads), state))
