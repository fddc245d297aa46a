"""Quasi-global momentum (QG): momentum from the difference of two consecutive, already mixed parameters.

    x½ = x - η (β m + g)                               QG-DSGDm          (Lin et al., ICML 2021)
    x½ = x - η (g + β (β m + g))                       with Nesterov's momentum
    x⁺ = W x½
    m⁺ = μ m + (1 - μ) (x - x⁺) / η

    m̂ = β₁ m + c g;   v̂ = β₂ v + (1 - β₂) g²           QG-Adam           (same paper, and its authors' code)
    x½ = x - η m̂ / (1 - β₁ᵏ) / (√(v̂ / (1 - β₂ᵏ)) + ε)
    x⁺ = W x½
    d = (x - x⁺) / (‖x - x⁺‖₂ + 1e-8)
    m⁺ = β₁ m + (1 - β₁) d;   v⁺ = β₂ v + (1 - β₂) d²

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; m, v: the
quasi-global moments, β, β₁, β₂: how much of them is used; μ: how much of m is kept; k: steps, from 1; c: the weight
of the gradient (1 in the authors' code, which the figures come from; 1 - β₁ in Adam).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import trees
from decentfn.kit import (
    Algorithm,
    Buckets,
    LossFn,
    Metrics,
    Options,
    State,
    Worker,
    add,
    algorithm,
    at,
    each,
    global_norm,
    once,
    reciprocal,
    require_doubly_stochastic,
    require_fractions,
    require_positive,
    widen,
    zeros_like,
)
from decentfn.topologies import Topology
from decentfn.transforms.basic import Scalar
from decentfn.trees import PyTree


class Memory(NamedTuple):
    """Quasi-global momentum, in units of a gradient (of an update where learning_rate is left at 1)."""

    m: Buckets

    @classmethod
    def start(cls, x: Buckets) -> Memory:
        """At the first parameters."""
        return cls(zeros_like(x))

    def restart(self, x: Buckets) -> Memory:
        """The momentum starts anew."""
        return self.start(x)


@algorithm
def quasi_global_momentum(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    beta: float = 0.9,
    mu: float = 0.9,
    nesterov: bool = False,
    learning_rate: Scalar = 1.0,
    **options: Unpack[Options],
) -> Algorithm:
    """Follow momentum that all workers nearly share, so that heterogeneous data do not pull it apart.

    As with adapt-then-combine nothing can be sent before the update, so only the last buckets' messages overlap.
    Sent per step: the parameters, once per neighbour (or one all-reduce within the group); momentum is free.
    With `beta=0` it is `adapt_then_combine`. The Adam variant is `quasi_global_adam`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that turns g into -η g, without momentum of its own: `df.sgd(lr)`.
        topology: the schedule of mixing matrices, doubly stochastic.
        beta: β in [0, 1], how strongly m pulls.
        mu: μ in [0, 1], how much of m is kept; the authors use β.
        nesterov: look ahead by β.
        learning_rate: η as a function of t, where the optimizer's changes. The parameters do not depend on a constant
            η (it only fixes the unit of m), so a constant one need not be named twice.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: β or μ outside [0, 1], η not positive, a topology that is column-stochastic only.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_fractions("quasi_global_momentum", beta=beta, mu=mu)
    require_positive("quasi_global_momentum", learning_rate=learning_rate)
    require_doubly_stochastic("quasi_global_momentum", topology)
    # g + β (β m + g) = (1 + β) g + β² m.
    of_g, of_m = (1 + beta, beta**2) if nesterov else (1, beta)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        eta = at(learning_rate, t)
        per_eta = reciprocal(eta)
        x, (m,) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(each(lambda g: of_g * g, g.grads), g, local, x)
        half = g.keep(each(lambda x, u, m: (x + u - eta * of_m * m).to(x.dtype), x, u, m), x)
        mixed = worker.mix(half, t)
        m_new = each(lambda m, x, mixed: (mu * m + (1 - mu) * (x - mixed) * per_eta).to(m.dtype), m, x, mixed)
        return State(mixed, local, Memory(g.keep(m_new, m))), g.metrics

    return worker.algorithm(step, Memory.start)


class AdamMemory(NamedTuple):
    """The quasi-global moments."""

    m: Buckets  # the first
    v: Buckets  # the second
    count: Tensor  # 0-d int64, steps taken

    @classmethod
    def start(cls, x: Buckets) -> AdamMemory:
        """At the first parameters."""
        return cls(zeros_like(x), zeros_like(x), torch.zeros((), dtype=torch.int64, device=x[0].device))

    def restart(self, x: Buckets) -> AdamMemory:
        """The moments start anew, and the count that corrects their bias."""
        return trees.map(torch.zeros_like, self)


@algorithm
def quasi_global_adam(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    gradient_weight: float = 1.0,
    **options: Unpack[Options],
) -> Algorithm:
    """Adam whose moments are fed with the normalised difference of mixed parameters instead of the gradient.

    Sent per step, and overlap: as `quasi_global_momentum`. Bias is corrected as in the authors' code.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that turns Adam's direction d into -η d: `df.sgd(lr)`, not another Adam.
        topology: the schedule of mixing matrices, doubly stochastic.
        beta1: β₁ in [0, 1).
        beta2: β₂ in [0, 1).
        eps: ε.
        gradient_weight: c. 1 as in the authors' code; `1 - beta1` is Adam's.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: β₁ or β₂ outside [0, 1), a topology that is column-stochastic only.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_fractions("quasi_global_adam", beta1=beta1, beta2=beta2)
    if beta1 == 1 or beta2 == 1:
        raise ValueError(
            f"quasi_global_adam(beta1={beta1}, beta2={beta2}): the correction of the bias divides by 1 - βᵏ, so both "
            "stay below 1."
        )
    require_doubly_stochastic("quasi_global_adam", topology)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        x, (m, v, count) = state.params, state.memory
        k = (count + 1).to(torch.float64)
        first, second = once(1 - beta1**k), once(1 - beta2**k)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            dtype, g = g.dtype, g.to(m.dtype)
            m_hat = beta1 * m + gradient_weight * g
            v_hat = beta2 * v + (1 - beta2) * g**2
            return (m_hat / first.to(m.dtype) / (torch.sqrt(v_hat / second.to(m.dtype)) + eps)).to(dtype)

        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(each(direction, g.grads, m, v), g, local, x)
        mixed = worker.mix(add(x, u), t)
        moved = each(torch.sub, widen(x), mixed)
        length = global_norm(moved) + 1e-8
        d = each(lambda moved: moved / length.to(moved.dtype), moved)
        m_new = each(lambda m, d: beta1 * m + (1 - beta1) * d, m, d)
        v_new = each(lambda v, d: beta2 * v + (1 - beta2) * d**2, v, d)
        memory = g.keep(AdamMemory(m_new, v_new, count + 1), state.memory)
        return State(mixed, local, memory), g.metrics

    return worker.algorithm(step, AdamMemory.start)
