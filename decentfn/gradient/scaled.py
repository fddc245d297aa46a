"""Dynamic loss scaling as pure state, by torch.amp.GradScaler's rule.

`dynamic_loss_scale(loss_fn)` is a loss too, of a separate type: the gradient code scales it, divides the gradient by
the scale (in `result`) and checks that it is finite (in `Worker.gradient`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core.arguments import checks_numbers, require
from decentfn.gradient.loss import LossFn, WrappedLoss, require_loss

_SMALLEST = 2.0**-100


class LossScale(NamedTuple):
    """Loss scale, and the number of consecutive finite gradients with it."""

    scale: Tensor  # 0-d float32
    growth_tracker: Tensor  # 0-d int64


class DynamicLossScale(WrappedLoss):
    """Loss whose gradient is computed with a scale; calling it gives the loss itself. Made by `dynamic_loss_scale`."""

    def __init__(
        self,
        loss_fn: LossFn,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        agree: bool,
    ) -> None:
        super().__init__(loss_fn)
        self.init_scale, self.growth_factor, self.backoff_factor = init_scale, growth_factor, backoff_factor
        self.growth_interval, self.agree = growth_interval, agree

    def init(self, device: torch.device) -> LossScale:
        """Return the scale at the start."""
        scale = torch.full((), float(self.init_scale), dtype=torch.float32, device=device)
        return LossScale(scale, torch.zeros((), dtype=torch.int64, device=device))

    def advance(self, state: LossScale, good: Tensor) -> LossScale:
        """Return the next scale: lower if the gradient was not `good` (0-d bool), higher after enough good ones."""
        streak = state.growth_tracker + 1
        grows = streak == self.growth_interval
        grown = state.scale * self.growth_factor
        grown = torch.where(grows & torch.isfinite(grown), grown, state.scale)
        # With a scale of 0 no gradient would ever be finite again.
        lowered = (state.scale * self.backoff_factor).clamp(min=_SMALLEST)
        scale = torch.where(good, grown, lowered)
        return LossScale(scale, torch.where(good & ~grows, streak, torch.zeros_like(streak)))


@checks_numbers
def dynamic_loss_scale(
    loss_fn: LossFn,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    agree: bool = False,
) -> LossFn:
    """Scale the loss for fp16 arithmetic; if a gradient overflows, skip the update and lower the scale.

    The gradient of `scale * loss` is computed, and unscaled before it is used. A worker whose gradient is not finite
    makes no update in that step and keeps its optimizer's state and its buffers, but mixes as usual; the algorithm's
    memory of gradients stays that of the last good one. Values that must be equal on all workers stay equal:
    `all_reduce` skips the update on all of them, as DistributedDataParallel with a GradScaler does; in `demo` and
    `relay_sgd` with relay="gradients" all take the step of the good gradients. Momentum of mixing (`decentlam`,
    `quasi_global_momentum`) continues without the gradient, or the workers' mean would be lost. Apply it outermost,
    around `df.accumulate`.

    Args:
        loss_fn: the loss, as an algorithm takes it, possibly accumulated.
        init_scale: the scale at the start, from 2^-100 to 2^127.
        growth_factor: factor of the scale after `growth_interval` consecutive steps without overflow, > 1.
        backoff_factor: factor of the scale at an overflow, in (0, 1).
        growth_interval: steps, >= 1.
        agree: one scale for all workers, lowered if any of them overflows (one number averaged per step, which waits
            for the slowest backward pass); otherwise every worker keeps its own.

    Raises:
        ValueError: a number is out of range; `loss_fn` is not a function, or is scaled already.
    Source: torch.amp.GradScaler.
    """
    require_loss("dynamic_loss_scale(loss_fn)", loss_fn)
    if isinstance(loss_fn, DynamicLossScale):
        raise ValueError("dynamic_loss_scale(dynamic_loss_scale(loss_fn)): the loss is scaled already; scale it once.")
    call, rule = "dynamic_loss_scale", "init_scale is in [2^-100, 2^127], as float32 and its inverse."
    require(_SMALLEST <= init_scale <= 2.0**127, call, rule, init_scale=init_scale)
    require(growth_factor > 1, call, "growth_factor is finite and > 1.", growth_factor=growth_factor)
    require(0 < backoff_factor < 1, call, "backoff_factor is in (0, 1).", backoff_factor=backoff_factor)
    require(growth_interval >= 1, call, "growth_interval is a number of steps, >= 1.", growth_interval=growth_interval)
    return DynamicLossScale(loss_fn, init_scale, growth_factor, backoff_factor, growth_interval, agree)
