"""Optimizers with torch.optim's arithmetic on flat buckets, each a chain of transforms.

An optimizer of elementwise transforms compiles to one kernel per bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core import checks_arguments, once, require
from decentfn.core.buckets import Buckets, Mask, each, into, zeros_like
from decentfn.optim.transforms.basic import (
    RULES,
    Scalar,
    add_decayed_weights,
    by_rate,
    new_count,
    trace,
    unless_zero,
)
from decentfn.optim.transforms.transform import Transform, ascending, chain
from decentfn.torch_private import functorch


class AdamState(NamedTuple):
    """Number of updates, and running means of g and g² in float32 or wider."""

    count: Tensor  # 0-d int64
    mu: Buckets
    nu: Buckets


def new_moments(params: Buckets) -> AdamState:
    """Return Adam's state before the first update."""
    return AdamState(new_count(params), zeros_like(params), zeros_like(params))


def moments(grads: Buckets, state: AdamState, b1: float, b2: float) -> AdamState:
    """Return Adam's next count and running means."""

    def square(v: Tensor, g: Tensor) -> Tensor:
        g, v = g.to(v.dtype), torch.mul(v, b2, out=into(v))
        return (torch.addcmul if functorch.has_no_value(g) else Tensor.addcmul_)(v, g, g, value=1 - b2)

    mu = each(lambda m, g: torch.lerp(m, g.to(m.dtype), 1 - b1, out=into(m)), state.mu, grads)
    nu = each(square, state.nu, grads)
    return AdamState(state.count + 1, mu, nu)


class AccumAdamState(NamedTuple):
    """AccumAdam's count, means (multiplied by β) and the partial mean gradient of the current window."""

    count: Tensor  # 0-d int64
    mu: Buckets  # M
    nu: Buckets  # V
    accumulated: Buckets  # A


@checks_arguments(RULES)
def sgd(
    learning_rate: Scalar,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Stochastic gradient descent: `g ← g + λx;  m⁺ = βm + g;  x⁺ = x - η m⁺`, Nesterov `x⁺ = x - η (g + β m⁺)`.

    Args:
        learning_rate: η >= 0, or a function of the count of updates before this one (0-d int64 tensor).
        momentum: β in [0, 1); 0 keeps no state.
        nesterov: use Nesterov's momentum; needs momentum > 0.
        weight_decay: λ >= 0 (l2 regularization), or a function of the count.
        mask: the leaves that decay, `(dotted name, shape) -> bool`; None: all.
    Source: torch.optim.SGD.
    """
    rule = "Nesterov looks ahead along the momentum; set momentum=0.9."
    require(not nesterov or momentum > 0, "sgd", rule, nesterov=nesterov, momentum=momentum)
    return chain(
        *unless_zero(weight_decay, lambda: add_decayed_weights(weight_decay, mask)),
        *unless_zero(momentum, lambda: trace(momentum, nesterov)),
        by_rate(learning_rate, in_place=momentum > 0),
    )


@checks_arguments(RULES)
def adam(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Adam, with weight decay added to the gradient (l2 regularization), as in torch.optim.Adam.

    `g ← g + λx;  m⁺ = β₁m + (1-β₁)g;  v⁺ = β₂v + (1-β₂)g²;  x⁺ = x - η m⁺/(1-β₁ᵏ) / (√(v⁺/(1-β₂ᵏ)) + ε)`

    Args:
        learning_rate: η >= 0, or a function of the count of updates before this one (0-d int64 tensor).
        b1: β₁ in [0, 1).
        b2: β₂ in [0, 1).
        eps: ε > 0.
        weight_decay: λ >= 0, or a function of the count.
        mask: the leaves that decay, `(dotted name, shape) -> bool`, for example `not_bias_or_norm`; None: all.
    Source: Kingma and Ba, ICLR 2015; torch.optim.Adam.
    """
    return with_decay(learning_rate, weight_decay, mask, scale_by_adam(b1, b2, eps), is_decoupled=False)


@checks_arguments(RULES)
def adamw(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """Adam with decoupled weight decay: as `adam`, with `x ← x (1 - ηλ)` instead of `g ← g + λx`.

    Source: Loshchilov and Hutter, ICLR 2019; torch.optim.AdamW.
    """
    return with_decay(learning_rate, weight_decay, mask, scale_by_adam(b1, b2, eps), is_decoupled=True)


@checks_arguments(RULES)
def accum_adam(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    accum_iter: int = 4,
    mask: Mask | None = None,
) -> Transform:
    """Adam whose moments average the mean gradients of windows, while every gradient updates the parameters.

    Weight decay is added to the gradient. Equations: `scale_by_accum_adam`.

    Args: those of `adam`, and s = `accum_iter` >= 1, the updates in a window; 1 is `adam`.
    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    direction = scale_by_accum_adam(b1, b2, eps, accum_iter)
    return with_decay(learning_rate, weight_decay, mask, direction, is_decoupled=False)


@checks_arguments(RULES)
def accum_adamw(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-2,
    accum_iter: int = 4,
    mask: Mask | None = None,
) -> Transform:
    """AccumAdam with decoupled weight decay, otherwise as `accum_adam`; with `accum_iter=1` it is `adamw`.

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    direction = scale_by_accum_adam(b1, b2, eps, accum_iter)
    return with_decay(learning_rate, weight_decay, mask, direction, is_decoupled=True)


@checks_arguments(RULES)
def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Adam's direction, `m⁺/(1-β₁ᵏ) / (√(v⁺/(1-β₂ᵏ)) + ε)` with `k` counted from 1; see `adam`."""

    def update(grads: Buckets, state: AdamState, params: Buckets) -> tuple[Buckets, AdamState]:
        new = moments(grads, state, b1, b2)
        return _direction(grads, new.mu, new.nu, new.count, b1, b2, eps), new

    return ascending(new_moments, update)


@checks_arguments(RULES)
def scale_by_accum_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, accum_iter: int = 4) -> Transform:
    """AccumAdam's direction, with windows of `s = accum_iter` updates.

    In update k (from 1), with `K = ⌈k/s⌉`:
    `A ← A + g/s`, direction `(M + (1-β₁)g)/(1-β₁ᴷ) / (√((V + (1-β₂)g²)/(1-β₂ᴷ)) + ε)`; if s divides k:
    `M ← β₁(M + (1-β₁)A);  V ← β₂(V + (1-β₂)A²);  A ← 0`.

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """

    def init(params: Buckets) -> AccumAdamState:
        return AccumAdamState(new_count(params), *(zeros_like(params) for _ in range(3)))

    def update(grads: Buckets, state: AccumAdamState, params: Buckets) -> tuple[Buckets, AccumAdamState]:
        k = state.count + 1
        window = (k + accum_iter - 1) // accum_iter
        is_last = once(k % accum_iter == 0)
        mu = each(lambda m, g: m + (1 - b1) * g.to(m.dtype), state.mu, grads)
        nu = each(lambda v, g: v + (1 - b2) * g.to(v.dtype) ** 2, state.nu, grads)
        direction = _direction(grads, mu, nu, window, b1, b2, eps)

        mean = each(lambda a, g: a + g.to(a.dtype) / accum_iter, state.accumulated, grads)
        new_mu = each(lambda m, a: torch.where(is_last, b1 * (m + (1 - b1) * a), m), state.mu, mean)
        new_nu = each(lambda v, a: torch.where(is_last, b2 * (v + (1 - b2) * a**2), v), state.nu, mean)
        accumulated = each(lambda a: torch.where(is_last, torch.zeros_like(a), a), mean)
        return direction, AccumAdamState(k, new_mu, new_nu, accumulated)

    return ascending(init, update)


def _direction(grads: Buckets, mu: Buckets, nu: Buckets, k: Tensor, b1: float, b2: float, eps: float) -> Buckets:
    # 1.0, as 1 is of another dtype: vmap would cast it on the CPU.
    correction1 = once(1.0 / (1 - b1 ** k.to(torch.float64)))
    correction2 = once(1.0 / torch.sqrt(1 - b2 ** k.to(torch.float64)))

    def one(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        root = torch.sqrt(v)
        root = root.clone() if root.requires_grad else root  # the derivative of a root is read from it
        root.mul_(correction2.to(v.dtype)).add_(eps)
        return (m * correction1.to(m.dtype)).div_(root).to(g.dtype)

    return each(one, grads, mu, nu)


def with_decay(
    learning_rate: Scalar,
    weight_decay: Scalar,
    mask: Mask | None,
    direction: Transform,
    *then: Transform,
    is_decoupled: bool,
) -> Transform:
    """Chain a direction with weight decay, before it (l2 regularization) or after it, others, and the learning rate."""
    decay = unless_zero(weight_decay, lambda: add_decayed_weights(weight_decay, mask))
    parts = (direction, *decay) if is_decoupled else (*decay, direction)
    return chain(*parts, *then, by_rate(learning_rate, in_place=True))
