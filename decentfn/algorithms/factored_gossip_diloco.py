"""Factored Gossip DiLoCo: two gossip rounds in place of DiLoCo's average, of which one does not block.

    θ ← θ + u(θ, g(θ))                   in every step                 (Koneputugodage et al., ICML 2026;
    φ̂ = W₁ φ                             during the H steps,            arXiv:2606.22768)
    Δ = φ - θ                            after them, and then
    b⁺ = β b + Δ
    φ⁺ = W₂ (φ̂ - η (Δ + β b⁺))
    θ ← φ⁺

θ: a worker's parameters; g: its gradient; u: the inner optimizer's update; φ: its parameters at the start of the
round; W₁, W₂: mixing matrices; Δ: the outer gradient, b: the outer momentum, both the worker's own; β: the decay;
η: the outer learning rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn.algorithms.outer import after_steps, local_steps, progress
from decentfn.kit import (
    Algorithm,
    Buckets,
    LossFn,
    Options,
    Posted,
    Worker,
    algorithm,
    copy_wide,
    each,
    require_doubly_stochastic,
    require_fractions,
    require_positive,
    require_whole,
    zeros_like,
)
from decentfn.topologies import Topology, nth_round


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: Buckets  # parameters at the start of the round
    b: Buckets  # outer momentum
    averaged = ("phi", "b")  # over the workers, by df.resize

    @classmethod
    def restart(cls, x: Buckets) -> Memory:
        """Start a round at `x` and reset the outer momentum."""
        return cls(copy_wide(x), zeros_like(x))


@algorithm
def factored_gossip_diloco(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    inner_steps: int = 50,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[Options],
) -> Algorithm:
    """Train locally for H steps; mix what the round started from meanwhile, and the result again at the end.

    The first mix needs only φ, known since the start of the round; it is sent in the round's last step and overlaps
    with that gradient. The second one blocks. Outer step k takes rounds 2k and 2k + 1 of the topology as W₁ and W₂:
    `df.topologies.alternate(ring(N), idle(N))` never blocks, and `alternate(idle(N), complete(N))` is `diloco`.
    Sent: the parameters, once per neighbor of each mix, in every H-th step; nothing in all other steps.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: the schedule of mixes, doubly stochastic, two rounds for each outer step.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, β outside [0, 1], a push-sum topology.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_whole("factored_gossip_diloco", inner_steps=inner_steps)
    require_positive("factored_gossip_diloco", outer_learning_rate=outer_learning_rate)
    require_fractions("factored_gossip_diloco", outer_momentum=outer_momentum)
    require_doubly_stochastic("factored_gossip_diloco", topology)
    first, second = (after_steps(inner_steps, nth_round(k, 2, topology)) for k in range(2))
    schedule = after_steps(inner_steps, worker.everyone)  # is active even if W₁ or W₂ is idle
    eta, beta = outer_learning_rate, outer_momentum

    def post(memory: Memory, t: Tensor) -> Posted:
        return worker.post(memory.phi, t, first)

    def outer(theta: Buckets, memory: Memory, t: Tensor, phi_hat: Buckets) -> tuple[Buckets, Memory]:
        delta = progress(memory.phi, theta)
        b = each(lambda b, delta: beta * b + delta, memory.b, delta)
        moved = each(lambda phi, delta, b: phi - eta * (delta + beta * b), phi_hat, delta, b)
        phi = worker.mix(moved, t, second)
        return phi, Memory(phi, b)

    return worker.algorithm(local_steps(worker, schedule, outer, post), Memory.restart)
