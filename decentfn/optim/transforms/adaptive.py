"""More optimizers of flat buckets, with torch.optim's arithmetic where it has them: Lion, RMSprop, Adagrad and others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core import Numbers, checks_arguments, once, require
from decentfn.core.buckets import Buckets, Mask, each, widen, zeros_like
from decentfn.optim.transforms.basic import (
    RULES,
    RateState,
    Scalar,
    new_count,
    next_rate,
    start_rate,
    trace,
    unless_zero,
)
from decentfn.optim.transforms.optimizers import AdamState, moments, new_moments, with_decay
from decentfn.optim.transforms.transform import Transform, ascending, chain, descending


class LionState(NamedTuple):
    """Running mean of g, in float32 or wider."""

    mu: Buckets


class RmsState(NamedTuple):
    """Running mean of g², and of g if centered; in float32 or wider."""

    nu: Buckets
    mu: Buckets | tuple[()]


class AdagradState(NamedTuple):
    """Sum of g², in float32 or wider."""

    total: Buckets


class NadamState(NamedTuple):
    """Adam's state, and the product of the μ so far."""

    adam: AdamState
    product: Tensor  # 0-d float64


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free_adamw`: the parameters are y."""

    rate: RateState
    count: Tensor  # 0-d int64
    z: Buckets  # in float32 or wider
    nu: Buckets
    largest: Tensor  # 0-d float64, the largest learning rate so far
    weights: Tensor  # 0-d float64, the sum of the weights of the average
    b1: Tensor  # 0-d float64

    plan = property(lambda self: self.z.plan)

    def evaluated(self, x: Buckets, back: bool) -> Buckets:
        """Return the average to evaluate, `x = (y - (1-β₁) z) / β₁`; `back`: y, the parameters, for an average."""

        def one(x: Tensor, z: Tensor) -> Tensor:
            b1 = self.b1.to(z.dtype)[..., None]
            other = (1 - b1) * z
            return (b1 * x + other if back else (x - other) / b1).to(x.dtype)

        return each(one, x, self.z)


@checks_arguments(RULES)
def lion(
    learning_rate: Scalar = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Lion: `x⁺ = x - η (sign(β₁m + (1-β₁)g) + λx);  m⁺ = β₂m + (1-β₂)g`.

    Args: those of `adam`, without ε; the decay is decoupled.
    Source: Chen et al., NeurIPS 2023.
    """

    def update(grads: Buckets, state: LionState, params: Buckets) -> tuple[Buckets, LionState]:
        def direction(g: Tensor, m: Tensor) -> Tensor:
            return torch.sign(b1 * m + (1 - b1) * g.to(m.dtype)).to(g.dtype)

        mu = each(lambda m, g: b2 * m + (1 - b2) * g.to(m.dtype), state.mu, grads)
        return each(direction, grads, state.mu), LionState(mu)

    direction = ascending(lambda params: LionState(zeros_like(params)), update)
    return with_decay(learning_rate, weight_decay, mask, direction, is_decoupled=True)


@checks_arguments(RULES)
def rmsprop(
    learning_rate: Scalar = 1e-2,
    decay: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """RMSprop: `v⁺ = αv + (1-α)g²;  b⁺ = βb + g/(√v⁺ + ε);  x⁺ = x - η b⁺`.

    Args: those of `sgd`, α = `decay` in [0, 1), ε = `eps` > 0, and `centered`, which divides by `√(v⁺ - (mean of g)²)` instead.
    Source: torch.optim.RMSprop.
    """

    def init(params: Buckets) -> RmsState:
        return RmsState(zeros_like(params), zeros_like(params) if centered else ())

    def update(grads: Buckets, state: RmsState, params: Buckets) -> tuple[Buckets, RmsState]:
        nu = each(lambda v, g: decay * v + (1 - decay) * g.to(v.dtype) ** 2, state.nu, grads)
        mu, variance = state.mu, nu
        if isinstance(mu, Buckets):
            mu = each(lambda m, g: torch.lerp(m, g.to(m.dtype), 1 - decay), mu, grads)
            # Rounding may make it negative where g hardly changes.
            variance = each(lambda v, m: torch.clamp(v - m**2, min=0.0), nu, mu)
        scaled = each(lambda g, v: (g.to(v.dtype) / (torch.sqrt(v) + eps)).to(g.dtype), grads, variance)
        return scaled, RmsState(nu, mu)

    direction = chain(ascending(init, update), *unless_zero(momentum, lambda: trace(momentum)))
    return with_decay(learning_rate, weight_decay, mask, direction, is_decoupled=False)


@checks_arguments(RULES)
def adagrad(
    learning_rate: Scalar = 1e-2,
    eps: float = 1e-10,
    initial: float = 0.0,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Adagrad: `s⁺ = s + g²;  x⁺ = x - η g/(√s⁺ + ε)`.

    Args: those of `sgd`, without momentum; ε = `eps` > 0, and `initial`, the first s, >= 0.
    Source: Duchi et al., JMLR 2011; torch.optim.Adagrad.
    """

    def init(params: Buckets) -> AdagradState:
        return AdagradState(each(lambda z: z + initial, zeros_like(params)))

    def update(grads: Buckets, state: AdagradState, params: Buckets) -> tuple[Buckets, AdagradState]:
        total = each(lambda s, g: s + g.to(s.dtype) ** 2, state.total, grads)
        return each(lambda g, s: (g.to(s.dtype) / (torch.sqrt(s) + eps)).to(g.dtype), grads, total), AdagradState(total)

    return with_decay(learning_rate, weight_decay, mask, ascending(init, update), is_decoupled=False)


@checks_arguments(RULES)
def nadam(
    learning_rate: Scalar = 2e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Adam with Nesterov's momentum, whose weight `μₖ = β₁ (1 - 0.96^(kψ)/2)` grows.

    With Adam's m⁺ and v⁺, `x⁺ = x - η ((1-μₖ)/(1-Πμ) g + μₖ₊₁/(1-Πμ μₖ₊₁) m⁺) / (√(v⁺/(1-β₂ᵏ)) + ε)`, k from 1 and
    Πμ the product of μ₁, ..., μₖ.

    Args: those of `adam`, and ψ = `momentum_decay` >= 0.
    Source: Dozat, ICLR workshop 2016; torch.optim.NAdam.
    """

    def init(params: Buckets) -> NadamState:
        adam = new_moments(params)
        return NadamState(adam, torch.ones((), dtype=torch.float64, device=adam.count.device))

    def update(grads: Buckets, state: NadamState, params: Buckets) -> tuple[Buckets, NadamState]:
        adam = moments(grads, state.adam, b1, b2)
        k = adam.count.to(torch.float64)
        mu, after = (b1 * (1 - 0.5 * 0.96 ** (j * momentum_decay)) for j in (k, k + 1.0))
        product = once(state.product * mu)
        of_g, of_m = once((1 - mu) / (1 - product)), once(after / (1 - product * after))
        correction = once(1.0 / torch.sqrt(1 - b2**k))

        def one(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            w = v.dtype
            return ((of_g.to(w) * g.to(w) + of_m.to(w) * m) / (torch.sqrt(v) * correction.to(w) + eps)).to(g.dtype)

        return each(one, grads, adam.mu, adam.nu), NadamState(adam, product)

    return with_decay(learning_rate, weight_decay, mask, ascending(init, update), is_decoupled=False)


@checks_arguments(RULES)
def radam(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """Rectified Adam: Adam's m̂ alone while few squares are known, then times r √(1-β₂ᵏ) / (√v⁺ + ε).

    `ρ∞ = 2/(1-β₂) - 1;  ρ = ρ∞ - 2kβ₂ᵏ/(1-β₂ᵏ);  r = √((ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ))`, rectified where ρ > 5.

    Args: those of `adam`.
    Source: Liu et al., ICLR 2020; torch.optim.RAdam.
    """
    limit = 2 / (1 - b2) - 1

    def update(grads: Buckets, state: AdamState, params: Buckets) -> tuple[Buckets, AdamState]:
        adam = moments(grads, state, b1, b2)
        k = adam.count.to(torch.float64)
        known = 1 - b2**k
        rho = limit - 2.0 * k * b2**k / known
        is_rectified, safe = once(rho > 5), torch.clamp(rho, min=5.0)
        r = torch.sqrt((safe - 4.0) * (safe - 2.0) * limit / ((limit - 4) * (limit - 2) * safe))
        correction, factor = once(1.0 / (1 - b1**k)), once(r * torch.sqrt(known))

        def one(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            scale = torch.where(is_rectified, factor.to(v.dtype) / (torch.sqrt(v) + eps), torch.ones_like(v))
            return (m * correction.to(m.dtype) * scale).to(g.dtype)

        return each(one, grads, adam.mu, adam.nu), adam

    return with_decay(learning_rate, weight_decay, mask, ascending(new_moments, update), is_decoupled=False)


@checks_arguments(RULES)
def schedule_free_adamw(
    learning_rate: Scalar = 2.5e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Transform:
    """Schedule-free AdamW: the parameters are y, gradients are taken at y, and the average x is evaluated.

    `d = g/(√(v⁺/(1-β₂ᵏ)) + ε) + λy;  z⁺ = z - η d;  x⁺ = (1-c) x + c z⁺;  y⁺ = (1-β₁) z⁺ + β₁ x⁺`, `c = w/Σw`, `w` the
    square of the largest η so far. Neighbors mix y; every worker keeps its own z. `df.params`, `df.consensus_mean` and
    evaluations are of x.

    Args: those of `adam`, with β₁ > 0; a learning rate that is a function of the count may warm up, and need not fall.
    Source: Defazio et al., NeurIPS 2024.
    """
    require(b1 > 0, "schedule_free_adamw", "b1 is positive: y is not z alone.", b1=b1)
    numbers = Numbers(weight_decay)

    def init(params: Buckets) -> ScheduleFreeState:
        count = new_count(params)
        zero = torch.zeros((), dtype=torch.float64, device=count.device)
        z = each(torch.clone, widen(params))
        rate = start_rate(learning_rate, params)
        return ScheduleFreeState(rate, count, z, zeros_like(params), zero, zero.clone(), zero + b1)

    def update(grads: Buckets, state: ScheduleFreeState, params: Buckets) -> tuple[Buckets, ScheduleFreeState]:
        if not len(grads):  # of a mask that takes no leaf
            return grads, state
        rate = next_rate(learning_rate, state.rate)
        eta, count, (decay,) = rate.learning_rate, state.count + 1, numbers.on(grads[0])
        largest = torch.maximum(state.largest, eta)
        weights = state.weights + largest**2
        c = once(torch.where(weights > 0, largest**2 / weights, torch.zeros_like(weights)))
        correction = once(1.0 / torch.sqrt(1 - b2 ** count.to(torch.float64)))
        of_d = once(eta * (b1 * (1 - c) - 1.0))
        nu = each(lambda v, g: torch.addcmul(b2 * v, g.to(v.dtype), g.to(v.dtype), value=1 - b2), state.nu, grads)

        def direction(v: Tensor, g: Tensor, y: Tensor) -> Tensor:
            w = v.dtype
            return g.to(w) / (torch.sqrt(v) * correction.to(w) + eps) + decay.to(w) * y.to(w)

        d = each(direction, nu, grads, params)
        z = each(lambda z, d: z - eta.to(z.dtype) * d, state.z, d)
        u = each(
            lambda y, z, d: (c.to(z.dtype) * (z - y.to(z.dtype)) + of_d.to(z.dtype) * d).to(y.dtype), params, state.z, d
        )
        return u, ScheduleFreeState(rate, count, z, nu, largest, weights, state.b1)

    return descending(init, update)
