"""Dynamic loss scaling as pure state: torch.amp.GradScaler's rule, in an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn import trees
from decentfn.buckets import Buckets, all_finite, each
from decentfn.transforms.basic import check_number
from decentfn.transforms.transform import MaskedTransform, check_transform, masks_of, wants_mix
from decentfn.trees import PyTree


class LossScaleState(NamedTuple):
    """The scale, how many updates in a row it has done without overflow, and the optimizer's own state."""

    scale: Tensor  # 0-d float32
    growth_tracker: Tensor  # 0-d int64
    inner: PyTree


class DynamicLossScale(MaskedTransform):
    """An optimizer that keeps the scale of the loss; the algorithm reads it from the state. See `dynamic_loss_scale`."""

    agree: bool = False
    is_outermost: bool = True
    wants_mix: bool = False


def dynamic_loss_scale(
    optimizer: Any,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    agree: bool = False,
) -> DynamicLossScale:
    """Scale the loss for fp16 arithmetic; where a gradient overflows, skip the update and lower the scale.

    The gradient is taken of `scale * loss` and unscaled before anything else sees it. A worker whose gradient is not
    finite makes no update and keeps its optimizer's state, but mixes as always. The outermost transform.

    Args:
        optimizer: any transform; put clipping inside: `dynamic_loss_scale(chain(clip_by_global_norm(1.0), adamw(3e-4)))`.
        init_scale: the scale at the start, > 0.
        growth_factor: what the scale is multiplied with after `growth_interval` updates in a row without overflow, > 1.
        backoff_factor: what it is multiplied with at an overflow, in (0, 1).
        growth_interval: updates, >= 1.
        agree: one scale for all workers, lowered where any of them overflows (one number averaged per step, which waits
            for the slowest backward pass); otherwise every worker keeps its own.

    Raises:
        ValueError: a number out of its range; an `optimizer` without init or update, or one that scales already.
    Source: torch.amp.GradScaler.
    """
    check_transform("dynamic_loss_scale(optimizer)", optimizer)
    check = "dynamic_loss_scale"
    check_number(check, "init_scale", init_scale, "positive and finite", lambda v: 0 < v < float("inf"))
    check_number(check, "growth_factor", growth_factor, "finite and > 1", lambda v: 1 < v < float("inf"))
    check_number(check, "backoff_factor", backoff_factor, "in (0, 1)", lambda v: 0 < v < 1)
    if not isinstance(growth_interval, int) or growth_interval < 1:
        raise ValueError(f"dynamic_loss_scale(growth_interval={growth_interval!r}): a number of updates, >= 1.")

    def init(params: Buckets) -> LossScaleState:
        device = params[0].device if len(params) else None
        scale = torch.full((), float(init_scale), dtype=torch.float32, device=device)
        return LossScaleState(scale, torch.zeros((), dtype=torch.int64, device=device), optimizer.init(params))

    def update(
        grads: Buckets, state: LossScaleState, params: Buckets, *mix: Any, overflow: Tensor | None = None
    ) -> tuple[Buckets, LossScaleState]:
        """`overflow`: 0-d bool, whether the scale goes down; None: if these gradients are not finite."""
        finite = all_finite(grads)
        updates, inner = optimizer.update(grads, state.inner, params, *mix)
        updates = each(lambda u: torch.where(finite, u, torch.zeros_like(u)), updates)
        inner = trees.map(lambda new, old: torch.where(finite, new, old), inner, state.inner)
        overflow = ~finite if overflow is None else overflow

        streak = state.growth_tracker + 1
        grows = streak == growth_interval
        grown = state.scale * growth_factor
        grown = torch.where(grows & torch.isfinite(grown), grown, state.scale)
        scale = torch.where(overflow, state.scale * backoff_factor, grown)
        tracker = torch.where(overflow | grows, torch.zeros_like(streak), streak)
        return updates, LossScaleState(scale, tracker, inner)

    transform = DynamicLossScale(init, update)
    transform.masks, transform.agree, transform.wants_mix = masks_of(optimizer), agree, wants_mix(optimizer)
    return transform
