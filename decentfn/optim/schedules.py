"""Schedules: functions of the count of updates (0-d int64 tensor, from 0) that return a 0-d float64 tensor.

An optimizer accepts one as its learning rate or weight decay. They are traced, so a whole run is one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decentfn.core.numbers import checks_numbers, real, require, whole_number

Schedule = Callable[[Tensor], Tensor]

__all__ = [
    "constant",
    "cosine",
    "cosine_with_warmup",
    "exponential_decay",
    "gamma_from_learning_rate",
    "join",
    "linear",
    "piecewise_constant",
]


@checks_numbers
def constant(value: float) -> Schedule:
    """Constant `value`.

    >>> constant(0.1)(torch.tensor(7))
    tensor(0.1000, dtype=torch.float64)
    """
    _check_values("constant", value=value)
    return lambda count: 0 * _float(count) + value


@checks_numbers
def linear(start: float, end: float, steps: int) -> Schedule:
    """Straight line from `start` at count 0 to `end` at count `steps`, then constant.

    Args:
        start: the first value, >= 0.
        end: the last value, >= 0.
        steps: updates between them, >= 1.

    >>> linear(0.0, 1.0, 4)(torch.tensor(1))
    tensor(0.2500, dtype=torch.float64)
    """
    _check_values("linear", start=start, end=end)
    _check_steps("linear", "steps", steps)
    return lambda count: start + (end - start) * _fraction(count, steps)


@checks_numbers
def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` at count 0 to `end` at count `steps`, then constant.

    Args:
        start: the first value, >= 0.
        steps: updates between them, >= 1.
        end: the last value, >= 0.
    Source: Loshchilov and Hutter, ICLR 2017.
    """
    _check_values("cosine", start=start, end=end)
    _check_steps("cosine", "steps", steps)
    return lambda count: end + (start - end) * (1 + torch.cos(math.pi * _fraction(count, steps))) / 2


@checks_numbers
def cosine_with_warmup(
    learning_rate: float, t_max: int, t_warmup: int, cosine_eta_min: float = 1e-6, warmup_decay: float = 0.01
) -> Schedule:
    """Decent-DP's schedule: a linear warm-up, then a cosine of `t_max` updates.

    For u < t_warmup: `lr (w + (1-w) u/t_warmup)`, w = `warmup_decay`; then
    `η + (lr - η)(1 + cos(π (u - t_warmup)/t_max))/2`, η = `cosine_eta_min`. The cosine ends at count
    `t_warmup + t_max` and then rises again, as in Decent-DP.

    Args:
        learning_rate: lr >= 0, the highest value.
        t_max: updates of the cosine, >= 1, not counting the warm-up.
        t_warmup: updates of the warm-up, >= 0.
        cosine_eta_min: η >= 0, the lowest value of the cosine.
        warmup_decay: w in [0, 1], the fraction of lr at count 0.
    Source: Decent-DP 0.2, `lr_scheduler_fn_cosine_with_warmup`.
    """
    _check_values("cosine_with_warmup", learning_rate=learning_rate, cosine_eta_min=cosine_eta_min)
    _check_steps("cosine_with_warmup", "t_max", t_max)
    require(t_warmup >= 0, "cosine_with_warmup", "t_warmup is >= 0; 0 is no warm-up.", t_warmup=t_warmup)
    in_range = 0 <= warmup_decay <= 1
    require(in_range, "cosine_with_warmup", "warmup_decay is in [0, 1].", warmup_decay=warmup_decay)

    def schedule(count: Tensor) -> Tensor:
        u = _float(count)
        warmup = learning_rate * (warmup_decay + (1 - warmup_decay) * u / max(t_warmup, 1))
        angle = math.pi * (u - t_warmup) / t_max
        main = cosine_eta_min + (learning_rate - cosine_eta_min) * (1 + torch.cos(angle)) / 2
        return torch.where(u < t_warmup, warmup, main)

    return schedule


@checks_numbers
def exponential_decay(start: float, rate: float, steps: int, staircase: bool = False) -> Schedule:
    """Exponential decay: `start * rate ** (count / steps)`.

    Args:
        start: the value at count 0, >= 0.
        rate: the positive factor per `steps` updates.
        steps: >= 1.
        staircase: multiply once every `steps` updates instead of gradually.
    """
    _check_values("exponential_decay", start=start)
    _check_steps("exponential_decay", "steps", steps)
    require(rate > 0, "exponential_decay", "rate is positive and finite; below 1 the value falls.", rate=rate)

    def schedule(count: Tensor) -> Tensor:
        exponent = _float(count) / steps
        return start * rate ** (torch.floor(exponent) if staircase else exponent)

    return schedule


@checks_numbers
def piecewise_constant(start: float, factors: Mapping[int, float]) -> Schedule:
    """Step function: `start`, multiplied by each factor from its count on.

    Args:
        start: the value at count 0, >= 0.
        factors: count >= 1 -> factor >= 0.

    >>> [float(piecewise_constant(1.0, {2: 0.1, 4: 0.5})(torch.tensor(u))) for u in (1, 2, 4)]
    [1.0, 0.1, 0.05]
    """
    _check_values("piecewise_constant", start=start)
    rule = "expected a dict, count -> factor: {1000: 0.1}."
    require(isinstance(factors, Mapping), "piecewise_constant", rule, factors=factors)
    for count, factor in factors.items():
        _check_steps("piecewise_constant", "count in factors", count)
        _check_values("piecewise_constant", factor=factor)
    steps = dict(factors)

    def schedule(count: Tensor) -> Tensor:
        u = _float(count)
        value = 0 * u + start
        for boundary, factor in steps.items():
            value = torch.where(u < boundary, value, value * factor)
        return value

    return schedule


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
        _check_schedule("join", part)
    for boundary in boundaries:
        _check_steps("join", "boundary", boundary)
    call = f"join({len(schedules)} schedules, boundaries={list(boundaries)})"
    is_complete = len(schedules) > 0 and len(boundaries) == len(schedules) - 1
    require(is_complete, call, "every schedule but the first needs the count at which it begins.")
    increase = all(a < b for a, b in zip(boundaries, boundaries[1:], strict=False))
    require(increase, call, "boundaries increase; sort them with their schedules.")
    parts = list(zip(schedules[1:], boundaries, strict=True))

    def schedule(count: Tensor) -> Tensor:
        count = torch.as_tensor(count)
        value = schedules[0](count)
        for part, boundary in parts:
            value = torch.where(count < boundary, value, part(count - boundary))
        return value

    return schedule


@checks_numbers
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
    _check_schedule(call, schedule)
    _check_values(call, power=power)
    _check_steps(call, "total", total)
    require(0 <= start <= 1, call, "the share of the run after which γ follows lies in [0, 1].", start=start)
    if peak is None:
        rates = torch.as_tensor(schedule(torch.arange(total)), dtype=torch.float64)
        rule = f"{total} counts gave {list(rates.shape)} values; pass its largest as peak."
        require(rates.dim() == 0 or rates.shape == (total,), f"{call}(schedule)", rule)
        peak = float(rates.max())
    require(0 < peak < math.inf, call, "the largest learning rate is positive and finite.", peak=peak)

    def gamma(count: Tensor) -> Tensor:
        share = torch.clamp(torch.as_tensor(schedule(count), dtype=torch.float64) / peak, 0.0, 1.0)
        return torch.where(_float(count) < start * total, torch.ones_like(share), share**power)

    return gamma


def _float(count: Tensor) -> Tensor:
    return torch.as_tensor(count).to(torch.float64)


def _fraction(count: Tensor, steps: int) -> Tensor:
    return torch.clamp(_float(count) / steps, max=1.0)


def _check_values(call: str, **values: float) -> None:
    for name, value in values.items():
        require(real(call, name, value) >= 0, call, f"{name} is a finite number >= 0.", **{name: value})


def _check_schedule(call: str, schedule: object) -> None:
    require(callable(schedule), call, "a schedule is a function of the count of updates.", schedule=schedule)


def _check_steps(call: str, name: str, steps: int) -> None:
    is_count = 1 <= whole_number(call, name, steps) < 2**53
    require(is_count, call, f"{name} is an integer >= 1, a number of updates.", **{name: steps})
