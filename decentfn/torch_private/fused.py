"""Adam in one operator on the CPU, which torch.optim uses with `fused=True`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_adam: Any = getattr(torch, "_fused_adam_", None)

HAS_ADAM = _adam is not None


def adam(m: Tensor, v: Tensor, g: Tensor, k: Tensor, b1: float, b2: float, eps: float) -> Tensor:
    """Adam's k-th direction, `m⁺/(1-β₁ᵏ) / (√(v⁺/(1-β₂ᵏ)) + ε)`; the moments are written over.

    Args:
        m: the mean of g, float32 or float64.
        v: the mean of g², likewise.
        g: in their dtype.
        k: 0-d, counted from 1.
        b1: β₁.
        b2: β₂.
        eps: ε.
    """
    direction = torch.zeros_like(g)
    betas = {"beta1": b1, "beta2": b2, "eps": eps}
    _adam([direction], [g], [m], [v], [], [k], lr=-1.0, **betas, weight_decay=0.0, amsgrad=False, maximize=False)
    return direction
