"""Dynamic loss scaling as pure state: torch.amp.GradScaler's rule.

`dynamic_loss_scale(loss_fn)` is a loss too, of a type of its own: whoever takes a gradient scales it, divides by the scale
again (in `result`) and finds out whether the gradient is finite (in `Worker.gradient`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core.formatting import brief
from decentfn.core.numbers import checks_numbers, require
from decentfn.gradient.loss import LossFn, WrappedLoss, require_loss

_SMALLEST = 2.0**-100


class LossScale(NamedTuple):
    """The scale, and how many gradients in a row were finite with it."""

    scale: Tensor  # 0-d float32
    growth_tracker: Tensor  # 0-d int64


class DynamicLossScale(WrappedLoss):
    """A loss whose gradient is taken scaled; called, it is the loss itself. Made by `dynamic_loss_scale`."""

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
        """The scale at the start."""
        scale = torch.full((), float(self.init_scale), dtype=torch.float32, device=device)
        return LossScale(scale, torch.zeros((), dtype=torch.int64, device=device))

    def advance(self, state: LossScale, good: Tensor) -> LossScale:
        """The next scale: lower where the gradient was not `good` (0-d bool), higher after a row of good ones."""
        streak = state.growth_tracker + 1
        grows = streak == self.growth_interval
        grown = state.scale * self.growth_factor
        grown = torch.where(grows & torch.isfinite(grown), grown, state.scale)
        # Of a scale that reached 0 nothing would ever be finite again.
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
    """Scale the loss for fp16 arithmetic; where a gradient overflows, skip the update and lower the scale.

    The gradient is taken of `scale * loss` and unscaled before anything else sees it. A worker whose gradient is not
    finite makes no update in that step and keeps its optimizer's state and its buffers, but mixes as always; what the algorithm remembers
    of gradients stays that of the last good one. What must be alike on all workers stays so: `all_reduce` skips the update
    on all of them, as DistributedDataParallel with a GradScaler does; in `demo` and `relay_sgd` with relay="gradients" all
    take the step that the good gradients give. Where momentum is one of mixing (`decentlam`, `quasi_global_momentum`) it goes
    on without the gradient, or the workers' mean would be lost. The outermost of the losses: around `df.accumulate`.

    Args:
        loss_fn: as an algorithm takes it, perhaps accumulated.
        init_scale: the scale at the start, from 2^-100 to 2^127.
        growth_factor: what the scale is multiplied with after `growth_interval` steps in a row without overflow, > 1.
        backoff_factor: what it is multiplied with at an overflow, in (0, 1).
        growth_interval: steps, >= 1.
        agree: one scale for all workers, lowered where any of them overflows (one number averaged per step, which waits
            for the slowest backward pass); otherwise every worker keeps its own.

    Raises:
        ValueError: a number out of its range; a `loss_fn` that is no function, or scaled already.
    Source: torch.amp.GradScaler.
    """
    if hasattr(loss_fn, "init") and hasattr(loss_fn, "update"):
        raise ValueError(
            f"dynamic_loss_scale({brief(loss_fn)}): an optimizer, but what is scaled is the loss; write "
            "df.adapt_while_communicate(df.dynamic_loss_scale(loss_fn), optimizer, topology)."
        )
    require_loss("dynamic_loss_scale(loss_fn)", loss_fn)
    if isinstance(loss_fn, DynamicLossScale):
        raise ValueError("dynamic_loss_scale(dynamic_loss_scale(loss_fn)): the loss is scaled already; scale it once.")
    call, rule = "dynamic_loss_scale", "init_scale is in [2^-100, 2^127], as float32 and its inverse."
    require(_SMALLEST <= init_scale <= 2.0**127, call, rule, init_scale=init_scale)
    require(growth_factor > 1, call, "growth_factor is finite and > 1.", growth_factor=growth_factor)
    require(0 < backoff_factor < 1, call, "backoff_factor is in (0, 1).", backoff_factor=backoff_factor)
    require(growth_interval >= 1, call, "growth_interval is a number of steps, >= 1.", growth_interval=growth_interval)
    return DynamicLossScale(loss_fn, init_scale, growth_factor, backoff_factor, growth_interval, agree)
