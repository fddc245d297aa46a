"""Schedules: functions of the count of updates (0-d int64 tensor, from 0) that return a 0-d float64 tensor.

An optimizer accepts one as its learning rate or weight decay. They are traced, so a whole run is one graph; their
numbers are inputs of it, so another peak or length compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from decentfn.core import Numbers, brief, brief_error, checks_arguments, context, real, require, rule_of, whole_number

Schedule = Callable[[Tensor], Tensor]

__all__ = [
    "constant",
    "cosine",
    "exponential_decay",
    "gamma_from_learning_rate",
    "inverse_sqrt",
    "join",
    "linear",
    "per_run",
    "piecewise_constant",
    "polynomial",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]


def require_schedule(
    call: str, name: str, schedule: Callable[[Tensor], Tensor | float], of: Literal["count", "t"] = "count"
) -> None:
    """Raise ValueError unless a schedule computes on the tensor that it is given, and its first value is finite, >= 0."""
    what = f"{call}({name}={brief(schedule)})"

    def value(count: Tensor) -> Tensor:
        return torch.as_tensor(schedule(count), dtype=torch.float64).detach()

    try:
        found = value(torch.tensor(0))
    except Exception as error:
        if "device" in str(error):  # it reads a table on another device, where the count of a run is, too
            return
        raise ValueError(
            f"{what}: for {of} 0, a 0-d int64 tensor, it raised {brief_error(error)}; a schedule is a function of {of} that "
            "returns a number."
        ) from error
    rule = f"for {of} 0 it returned {list(found.shape)} values; a schedule returns one number."
    require(found.dim() == 0, what, rule)
    rule = f"for {of} 0 it returned {float(found):g}; a schedule's values are finite and >= 0."
    require(0 <= float(found) < math.inf, what, rule)
    try:
        vmap(value, randomness="different")(torch.tensor([0, 1]))
    except Exception as error:
        raise ValueError(
            f"{what}: it uses {of} as a number, which is not known while a step is compiled or simulated: compute on the "
            f"tensor, with torch.where({of} < 10, a, b) in place of `if` and torch.cos in place of math.cos, or take one of "
            f"df.schedules. ({brief_error(error)})"
        ) from error


def _require_number(call: str, name: str, value: Any) -> None:
    require(real(call, name, value) >= 0, call, f"{name} is a finite number >= 0.", **{name: value})


def _require_steps(call: str, name: str, steps: Any) -> None:
    is_count = 1 <= whole_number(call, name, steps) < 2**53
    require(is_count, call, f"{name} is an integer >= 1, a number of updates.", **{name: steps})


def _require_schedule(call: str, name: str, schedule: Any) -> None:
    require(callable(schedule), call, "a schedule is a function of the count of updates.", schedule=schedule)
    require_schedule(call, name, schedule)


_RULES = {
    **dict.fromkeys(("value", "start", "end", "peak"), _require_number),
    **dict.fromkeys(("steps", "decay"), _require_steps),
    **dict.fromkeys(("rate", "power"), rule_of(lambda x: x > 0, "is positive and finite.")),
}
"""Rules of the arguments of schedules, by their names."""


@checks_arguments(_RULES)
def constant(value: float) -> Schedule:
    """Constant `value`.

    >>> constant(0.1)(torch.tensor(7))
    tensor(0.1000, dtype=torch.float64)
    """
    return _schedule(lambda u, value: 0.0 * u + value, value)


def per_run(values: Sequence[float]) -> Schedule:
    """Constant of each run of a sweep: `values[r]` in run r of `df.sweep(step, len(values))`, `values[0]` outside of one.

    A schedule of each run is a product: `peaks = per_run([0.1, 0.4]); lambda count: peaks(count) * cosine(1.0, 100)(count)`.

    Args:
        values: one number for each run, finite, >= 0.

    Raises:
        ValueError: no values; in the step of a sweep, another number of runs.
    """
    require(isinstance(values, Sequence) and len(values) > 0, "per_run", "a list, one number per run.", values=values)
    for r, its in enumerate(values):
        _require_number("per_run", f"values[{r}]", its)

    def value(u: Tensor, *table: Tensor) -> Tensor:
        number, runs = context.runs[-1] if context.runs else (torch.zeros((), dtype=torch.int64, device=u.device), 0)
        if runs not in (0, len(values)):
            raise ValueError(f"per_run({brief(values)}): {len(values)} values, and the sweep has {runs} runs.")
        return 0.0 * u + torch.stack(table).index_select(0, number.view(1))[0]

    return _schedule(value, *map(float, values))


@checks_arguments(_RULES)
def linear(start: float, end: float, steps: int) -> Schedule:
    """Straight line from `start` at count 0 to `end` at count `steps`, then constant.

    Args:
        start: the first value, >= 0.
        end: the last value, >= 0.
        steps: updates between them, >= 1.

    >>> linear(0.0, 1.0, 4)(torch.tensor(1))
    tensor(0.2500, dtype=torch.float64)
    """
    return _schedule(lambda u, start, end, steps: start + (end - start) * _fraction(u, steps), start, end, steps)


@checks_arguments(_RULES)
def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` at count 0 to `end` at count `steps`, then constant.

    Args: those of `linear`.
    Source: Loshchilov and Hutter, ICLR 2017.
    """

    def value(u: Tensor, start: Tensor, end: Tensor, steps: Tensor) -> Tensor:
        return end + (start - end) * (1.0 + torch.cos(math.pi * _fraction(u, steps))) / 2.0

    return _schedule(value, start, end, steps)


@checks_arguments(_RULES)
def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up, `peak * u / warmup`, then half a cosine to `end` at count `steps`, then constant.

    Args:
        peak: the value at count `warmup`, >= 0.
        warmup: updates of the warm-up, >= 0.
        steps: updates of the run, > `warmup`, which they include.
        end: the last value, >= 0.
    Source: transformers' `get_cosine_schedule_with_warmup` (end = 0).

    >>> schedule = warmup_cosine(1.0, warmup=10, steps=110, end=0.1)
    >>> [round(float(schedule(torch.tensor(u))), 4) for u in (0, 5, 10, 60, 110, 1000)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    """
    return _after_warmup("warmup_cosine", peak, warmup, steps, lambda rest: cosine(peak, rest, end))


@checks_arguments(_RULES)
def warmup_linear(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up, `peak * u / warmup`, then a straight line to `end` at count `steps`, then constant.

    Args: those of `warmup_cosine`.
    Source: transformers' `get_linear_schedule_with_warmup` (end = 0), the default of its Trainer.
    """
    return _after_warmup("warmup_linear", peak, warmup, steps, lambda rest: linear(peak, end, rest))


@checks_arguments(_RULES)
def warmup_stable_decay(peak: float, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up, `peak * u / warmup`, then `peak`, and in the last `decay` updates a straight line to `end`.

    Args:
        peak: the highest value, >= 0.
        warmup: updates of the warm-up, >= 0.
        decay: updates of the decay, >= 1.
        steps: updates of the run, >= `warmup + decay`.
        end: the last value, >= 0.
    Source: Hu et al., MiniCPM, COLM 2024 (there called WSD).
    """
    call = "warmup_stable_decay"
    rule = "the run has at least warmup + decay updates."
    require(steps >= warmup + decay, call, rule, warmup=warmup, decay=decay, steps=steps)

    def value(u: Tensor, peak: Tensor, stable: Tensor, decay: Tensor, end: Tensor) -> Tensor:
        return peak + (end - peak) * torch.clamp((u - stable) / decay, 0.0, 1.0)

    main = _schedule(value, peak, steps - warmup - decay, decay, end)
    return _after_warmup(call, peak, warmup, steps, lambda rest: main)


@checks_arguments(_RULES | {"warmup": _require_steps})
def inverse_sqrt(peak: float, warmup: int) -> Schedule:
    """Linear warm-up, `peak * u / warmup`, then `peak * sqrt(warmup / u)`.

    Args:
        peak: the value at count `warmup`, >= 0.
        warmup: updates of the warm-up, >= 1.
    Source: Vaswani et al., NeurIPS 2017.
    """

    def value(u: Tensor, peak: Tensor, warmup: Tensor) -> Tensor:
        return peak * torch.minimum(u / warmup, torch.sqrt(warmup / torch.clamp(u, min=1.0)))

    return _schedule(value, peak, warmup)


@checks_arguments(_RULES)
def polynomial(start: float, end: float, steps: int, power: float = 1.0) -> Schedule:
    """Polynomial decay, `end + (start - end) * (1 - count / steps)^power` until count `steps`, then constant.

    Args: those of `linear`, and a positive `power`; 1 is `linear`.
    Source: torch.optim.lr_scheduler.PolynomialLR (end = 0).
    """

    def value(u: Tensor, start: Tensor, end: Tensor, steps: Tensor, power: Tensor) -> Tensor:
        return end + (start - end) * (1 - _fraction(u, steps)) ** power

    return _schedule(value, start, end, steps, power)


@checks_arguments(_RULES)
def exponential_decay(start: float, rate: float, steps: int, staircase: bool = False) -> Schedule:
    """Exponential decay: `start * rate ** (count / steps)`.

    Args:
        start: the value at count 0, >= 0.
        rate: the positive factor per `steps` updates.
        steps: >= 1.
        staircase: multiply once every `steps` updates instead of gradually.
    """

    def value(u: Tensor, start: Tensor, rate: Tensor, steps: Tensor) -> Tensor:
        return start * rate ** (torch.floor(u / steps) if staircase else u / steps)

    return _schedule(value, start, rate, steps)


@checks_arguments(_RULES)
def piecewise_constant(start: float, factors: Mapping[int, float]) -> Schedule:
    """Step function: `start`, multiplied by each factor from its count on.

    Args:
        start: the value at count 0, >= 0.
        factors: count >= 1 -> factor >= 0.

    >>> [float(piecewise_constant(1.0, {2: 0.1, 4: 0.5})(torch.tensor(u))) for u in (1, 2, 4)]
    [1.0, 0.1, 0.05]
    """
    rule = "expected a dict, count -> factor: {1000: 0.1}."
    require(isinstance(factors, Mapping), "piecewise_constant", rule, factors=factors)
    for count, factor in factors.items():
        _require_steps("piecewise_constant", "count in factors", count)
        _require_number("piecewise_constant", "factor", factor)

    def value(u: Tensor, start: Tensor, *rest: Tensor) -> Tensor:
        found = 0.0 * u + start
        for boundary, factor in zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True):
            found = torch.where(u < boundary, found, found * factor)
        return found

    return _schedule(value, start, *factors, *factors.values())


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Concatenate schedules; each counts from 0 at its beginning.

    Args:
        schedules: one or more.
        boundaries: the counts at which the second, third, ... begin; increasing, >= 1.

    >>> warmup_then_cosine = join([linear(0.0, 1.0, 10), cosine(1.0, 90)], [10])
    """
    for name, given in (("schedules", schedules), ("boundaries", boundaries)):
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        require(is_list, "join", "expected a list, join([linear(0, 1, 10), cosine(1, 90)], [10]).", **{name: given})
    for part in schedules:
        _require_schedule("join", "schedule", part)
    for boundary in boundaries:
        _require_steps("join", "boundary", boundary)
    call = f"join({len(schedules)} schedules, boundaries={list(boundaries)})"
    is_complete = len(schedules) > 0 and len(boundaries) == len(schedules) - 1
    require(is_complete, call, "every schedule but the first needs the count at which it begins.")
    increase = all(a < b for a, b in zip(boundaries, boundaries[1:], strict=False))
    require(increase, call, "boundaries increase; sort them with their schedules.")
    parts, numbers = list(schedules), Numbers(*boundaries)

    def schedule(count: Tensor) -> Tensor:
        count = torch.as_tensor(count)
        value = parts[0](count)
        if len(parts) > 1:
            for part, boundary in zip(parts[1:], numbers.on(count), strict=True):
                value = torch.where(count < boundary, value, part(count - boundary.to(count.dtype)))
        return value

    return schedule


@checks_arguments({"schedule": _require_schedule, "power": _require_number, "total": _require_steps})
def gamma_from_learning_rate(
    schedule: Schedule, power: float, start: float, total: int, *, peak: float | None = None
) -> Schedule:
    """γ that follows the learning rate: 1 before count `start * total`, then `(lr/lr_max)^p`.

    For `df.adapt_while_communicate(..., gamma=...)`, whose step number is the optimizer's count.

    Args:
        schedule: the optimizer's learning rate.
        power: p >= 0.
        start: the fraction of the run, in [0, 1], after which γ follows.
        total: updates of the run, >= 1.
        peak: lr_max > 0; by default the largest value of `schedule` in `total` updates. Larger values give γ = 1.

    >>> gamma = gamma_from_learning_rate(linear(0.1, 0.0, 100), power=2.0, start=0.5, total=100)
    >>> gamma(torch.tensor([0, 49, 50, 90])).round(decimals=4)
    tensor([1.0000, 1.0000, 0.2500, 0.0100], dtype=torch.float64)
    """
    call = "gamma_from_learning_rate"
    require(0 <= start <= 1, call, "the share of the run after which γ follows lies in [0, 1].", start=start)
    if peak is None:
        rates = torch.as_tensor(schedule(torch.arange(total)), dtype=torch.float64)
        rule = f"{total} counts gave {list(rates.shape)} values; pass its largest as peak."
        require(rates.dim() == 0 or rates.shape == (total,), f"{call}(schedule)", rule)
        peak = float(rates.max())
    require(0 < peak < math.inf, call, "the largest learning rate is positive and finite.", peak=peak)

    numbers = Numbers(round(start * total, 6), power, peak)  # 0.07 * 100 is more than 7

    def gamma(count: Tensor) -> Tensor:
        count = torch.as_tensor(count)
        begin, power, peak = numbers.on(count)
        share = torch.clamp(torch.as_tensor(schedule(count), dtype=torch.float64) / peak, 0.0, 1.0)
        return torch.where(count < begin, torch.ones_like(share), share**power)

    return gamma


def __getattr__(name: str) -> Any:
    raise AttributeError(f"df.schedules has no {name!r}; it has {', '.join(__all__)}.")


def _after_warmup(call: str, peak: float, warmup: int, steps: int, main: Callable[[int], Schedule]) -> Schedule:
    """Return a warm-up to `peak`, followed by `main(the other updates)`."""
    require(warmup >= 0, call, "warmup is >= 0; 0 is no warm-up.", warmup=warmup)
    require(steps > warmup, call, "steps, the updates of the run, include the warm-up.", warmup=warmup, steps=steps)
    rest = main(steps - warmup)
    return rest if warmup == 0 else join([linear(0.0, peak, warmup), rest], [warmup])


def _schedule(value: Callable[..., Tensor], *numbers: float) -> Schedule:
    """Return the schedule `value(u, *numbers)`; the count u and the numbers are float64 on the count's device."""
    given = Numbers(*numbers)

    def schedule(count: Tensor) -> Tensor:
        count = torch.as_tensor(count)
        return value(count.to(torch.float64), *given.on(count))

    return schedule


def _fraction(u: Tensor, steps: Tensor) -> Tensor:
    return torch.clamp(u / steps, max=1.0)
