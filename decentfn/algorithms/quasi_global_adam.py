"""Quasi-global Adam (QG-Adam): Adam's moments from the difference of two consecutive, already mixed parameters.

    m̂ = β₁ m + c g;   v̂ = β₂ v + (1 - β₂) g²           (Lin et al., ICML 2021, and its authors' code)
    x½ = x - η m̂ / (1 - β₁ᵏ) / (√(v̂ / (1 - β₂ᵏ)) + ε)
    x⁺ = W x½
    d = (x - x⁺) / (‖x - x⁺‖₂ + 1e-8)
    m⁺ = β₁ m + (1 - β₁) d;   v⁺ = β₂ v + (1 - β₂) d²

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; m, v: the
quasi-global moments, β₁, β₂: their decays; k: the step, from 1; c: the weight of the gradient (1 in the authors' code,
which produced the paper's figures; 1 - β₁ in Adam).

d is normalized, so motion never dies: without gradients, at η = 0.05, unequal starts of eight workers on 'static-ring' move
the mean of an element by up to 13 in 300 steps. That is the paper's; start equal, and let the learning rate fall.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.core import require_by
from decentfn.core.buckets import in_parts
from decentfn.optim.transforms.basic import RULES


class Memory(NamedTuple):
    """Quasi-global moments."""

    m: kit.Buckets  # the first
    v: kit.Buckets  # the second
    count: Tensor  # 0-d int64, steps taken
    averaged = ("m", "v", "count")  # over the workers, by df.resize

    @classmethod
    def restart(cls, x: kit.Buckets) -> Memory:
        """Reset the moments and the count that corrects their bias."""
        return cls(kit.zeros_like(x), kit.zeros_like(x), torch.zeros((), dtype=torch.int64, device=x[0].device))


@kit.algorithm
def quasi_global_adam(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    gradient_weight: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Run Adam whose moments average the normalized difference of mixed parameters instead of the gradient.

    Sent per step, and overlap: as `quasi_global_momentum`. Bias correction follows the authors' code.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that turns Adam's direction d into -η d: `df.sgd(lr)`, not another Adam.
        topology: the schedule of mixing matrices, doubly stochastic.
        b1: β₁ in [0, 1).
        b2: β₂ in [0, 1).
        eps: ε > 0.
        gradient_weight: c > 0; 1 in the authors' code, `1 - b1` in Adam.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: β₁ or β₂ outside [0, 1), a push-sum topology.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    require_by(RULES, "quasi_global_adam", {"b1": b1, "b2": b2, "eps": eps})
    kit.require_positive("quasi_global_adam", gradient_weight=gradient_weight)

    def normalized(moved: kit.Buckets) -> kit.Buckets:
        length = kit.global_norm(moved) + 1e-8
        return kit.each(lambda moved: moved / length.to(moved.dtype), moved)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (m, v, count) = state.params, state.memory
        k = (count + 1).to(torch.float64)
        first, second = kit.once(1 - b1**k), kit.once(1 - b2**k)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            dtype, g = g.dtype, g.to(m.dtype)
            m_hat = b1 * m + gradient_weight * g
            v_hat = b2 * v + (1 - b2) * g**2
            return (m_hat / first.to(m.dtype) / (torch.sqrt(v_hat / second.to(m.dtype)) + eps)).to(dtype)

        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(kit.each(direction, g.grads, m, v), g, local, x)
        mixed = worker.mix(kit.add(x, u), t)
        moved = kit.each(torch.sub, kit.widen(x), mixed)
        d = in_parts(normalized, moved)
        m_new = kit.each(lambda m, d: b1 * m + (1 - b1) * d, m, d)
        v_new = kit.each(lambda v, d: b2 * v + (1 - b2) * d**2, v, d)
        memory = g.keep(Memory(m_new, v_new, count + 1), state.memory)
        return kit.State(mixed, local, memory), g.metrics

    return worker.algorithm(step, Memory.restart)
