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

from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.hyperparameters import at, reciprocal, require_fractions, require_positive
from decentfn.algorithms.preconditions import require_doubly_stochastic
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, as_step
from decentfn.buckets import Buckets, add, each, global_norm, widen, zeros_like
from decentfn.scalars import once
from decentfn.topologies import Topology
from decentfn.transforms.basic import Scalar
from decentfn.trees import PyTree


class QuasiGlobalMomentumState(NamedTuple):
    """The state of one worker."""

    params: Buckets
    opt_state: PyTree
    m: Buckets  # quasi-global momentum, in units of a gradient (of an update where learning_rate is left at 1)
    buffers: PyTree = None

    def with_params(self, x: Buckets) -> QuasiGlobalMomentumState:
        """The momentum starts anew."""
        return self._replace(params=x, m=zeros_like(x))


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

    def init(params: PyTree, buffers: PyTree = None) -> QuasiGlobalMomentumState:
        x, opt_state, buffers = worker.init(params, buffers)
        return QuasiGlobalMomentumState(x, opt_state, zeros_like(x), buffers)

    def step(
        state: QuasiGlobalMomentumState, batch: PyTree, t: int | Tensor
    ) -> tuple[QuasiGlobalMomentumState, Metrics]:
        t = as_step(t)
        eta = at(learning_rate, t)
        per_eta = reciprocal(eta)
        x, opt_state, m, buffers = state
        g = worker.gradient(x, buffers, batch)
        u, opt_state = optimizer.update(each(lambda g: of_g * g, g.grads), opt_state, x)
        mixed = worker.mix(each(lambda x, u, m: (x + u - eta * of_m * m).to(x.dtype), x, u, m), t)
        m = each(lambda m, x, mixed: (mu * m + (1 - mu) * (x - mixed) * per_eta).to(m.dtype), m, x, mixed)
        return QuasiGlobalMomentumState(mixed, opt_state, m, g.buffers), g.metrics

    return worker.algorithm(init, step)


class QuasiGlobalAdamState(NamedTuple):
    """The state of one worker."""

    params: Buckets
    opt_state: PyTree
    m: Buckets  # first quasi-global moment
    v: Buckets  # second
    count: Tensor  # 0-d int64, steps taken
    buffers: PyTree = None

    def with_params(self, x: Buckets) -> QuasiGlobalAdamState:
        """The moments start anew, and the count that corrects their bias."""
        return self._replace(params=x, m=zeros_like(x), v=zeros_like(x), count=torch.zeros_like(self.count))


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

    def init(params: PyTree, buffers: PyTree = None) -> QuasiGlobalAdamState:
        x, opt_state, buffers = worker.init(params, buffers)
        count = torch.zeros((), dtype=torch.int64, device=x[0].device)
        return QuasiGlobalAdamState(x, opt_state, zeros_like(x), zeros_like(x), count, buffers)

    def step(state: QuasiGlobalAdamState, batch: PyTree, t: int | Tensor) -> tuple[QuasiGlobalAdamState, Metrics]:
        t = as_step(t)
        x, opt_state, m, v, count, buffers = state
        k = (count + 1).to(torch.float64)
        first, second = once(1 - beta1**k), once(1 - beta2**k)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            dtype, g = g.dtype, g.to(m.dtype)
            m_hat = beta1 * m + gradient_weight * g
            v_hat = beta2 * v + (1 - beta2) * g**2
            return (m_hat / first.to(m.dtype) / (torch.sqrt(v_hat / second.to(m.dtype)) + eps)).to(dtype)

        g = worker.gradient(x, buffers, batch)
        u, opt_state = optimizer.update(each(direction, g.grads, m, v), opt_state, x)
        mixed = worker.mix(add(x, u), t)
        moved = each(torch.sub, widen(x), mixed)
        length = global_norm(moved) + 1e-8
        d = each(lambda moved: moved / length.to(moved.dtype), moved)
        m = each(lambda m, d: beta1 * m + (1 - beta1) * d, m, d)
        v = each(lambda v, d: beta2 * v + (1 - beta2) * d**2, v, d)
        return QuasiGlobalAdamState(mixed, opt_state, m, v, count + 1, g.buffers), g.metrics

    return worker.algorithm(init, step)
