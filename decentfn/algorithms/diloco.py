"""DiLoCo: many local steps, then one step of Nesterov's momentum on the workers' mean progress.

    θ ← θ + u(θ, g(θ))                 in every step               (Douillard et al., 2023; arXiv:2311.08105)
    Δ = φ - Σ_i w_i θ_i / Σ_i w_i      after every H steps, and then
    b⁺ = β b + Δ
    φ⁺ = φ - η (Δ + β b⁺)
    θ ← φ⁺

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; w_i: a worker's weight, by default 1; Δ: the outer gradient, with the sign of a gradient; b: the outer momentum, β: its decay;
η: the outer learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import after_steps, local_steps, no_weight, outer_gradient, progress, to_send
from decentfn.core.trees import PyTree
from decentfn.topologies import Topology


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    b: kit.Buckets  # outer momentum, likewise
    weight: Tensor | None = None  # 0-d: this worker's weight since the last outer step; None if all are equal
    averaged = ("phi", "b", "weight")  # over the workers, by df.resize

    def restart(self, x: kit.Buckets) -> Memory:
        """Take `x` as outer parameters and reset the outer momentum."""
        return Memory(
            kit.copy_wide(x), kit.zeros_like(x), None if self.weight is None else torch.zeros_like(self.weight)
        )


@kit.algorithm
def diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    inner_steps: int = 500,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    weight: Callable[[PyTree], Tensor] | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, then move the common parameters along the workers' mean progress.

    Sent: 2(N-1)/N times the parameters in every H-th step, after the update, so it does not overlap with the
    gradient (`streaming_diloco` does); nothing in all other steps. With a narrow `wire_dtype` the differences φ - θ
    are sent, so that rounding does not lose small progress (the workers must then start equal). `weight` sends them, too,
    and first one number, for which all wait.
    With `outer_learning_rate=1, outer_momentum=0` it is local SGD: adapt-then-combine on `every(H, complete)`
    with steps counted from 1 (averages in steps H-1, 2H-1, …).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer (AdamW in the paper); its state stays the worker's own.
        topology: only its `num_workers` counts: outer steps average over all workers (`noloco`: over neighbors).
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        weight: function from the loss's aux to this worker's weight of a step, 0-d and >= 0, such as
            `lambda aux: aux["tokens"]`; it is summed over the H steps, and 0 leaves the worker out. None: all weights are equal.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, β outside [0, 1]; from `init`, a narrow `wire_dtype` and unequal parameters.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    weigh = kit.as_weight("diloco", weight)
    kit.require_whole("diloco", inner_steps=inner_steps)
    kit.require_positive("diloco", outer_learning_rate=outer_learning_rate)
    kit.require_fractions("diloco", outer_momentum=outer_momentum)
    schedule = after_steps(inner_steps, worker.everyone)
    rate, beta, wire = (
        kit.as_input("diloco", "outer_learning_rate", outer_learning_rate),
        outer_momentum,
        worker.wire_dtype,
    )

    must_equal = () if wire is None and weight is None else ("params",)

    def start(x: kit.Buckets) -> Memory:
        return Memory(kit.copy_wide(x), kit.zeros_like(x), None if weight is None else no_weight(x))

    def mean_progress(phi: kit.Buckets, theta: kit.Buckets, own: Tensor | None, t: Tensor) -> kit.Buckets:
        if own is None:
            return outer_gradient(phi, worker.mean(to_send(phi, theta, wire), t, schedule), wire)
        return worker.mean(progress(phi, theta), t, schedule, own)

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        phi, b, own = memory
        delta, eta = mean_progress(phi, theta, own, t), kit.at(rate, t, phi)
        b = kit.each(lambda b, delta: beta * b + delta, b, delta)
        phi = kit.each(lambda phi, delta, b: phi - eta * (delta + beta * b), phi, delta, b)
        return phi, Memory(phi, b, None if own is None else torch.zeros_like(own))

    step = local_steps(worker, schedule, outer, weight=weigh)
    return worker.algorithm(step, start, topology=worker.everyone, schedules=(schedule,), must_equal=must_equal)
