"""DiLoCo: many local steps, then one step of Nesterov's momentum on the workers' mean progress.

    θ ← θ + u(θ, g(θ))                 in every step               (Douillard et al., 2023; arXiv:2311.08105)
    Δ = φ - mean_i θ_i                 after every H steps, and then
    b⁺ = β b + Δ
    φ⁺ = φ - η (Δ + β b⁺)
    θ ← φ⁺

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; Δ: the outer gradient, with the sign of a gradient; b: the outer momentum, β: its decay;
η: the outer learning rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn.algorithms.outer import after_steps, outer_gradient, to_send
from decentfn.core.trees import PyTree
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
    as_input,
    at,
    copy_wide,
    each,
    is_active,
    require_fractions,
    require_positive,
    require_whole,
    unless_bad,
    where,
    zeros_like,
)
from decentfn.topologies import Topology


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: Buckets  # outer parameters, the same on all workers
    b: Buckets  # outer momentum, likewise
    averaged = ("phi", "b")  # over the workers, by df.resize

    @classmethod
    def restart(cls, x: Buckets) -> Memory:
        """Take `x` as outer parameters and reset the outer momentum."""
        return cls(copy_wide(x), zeros_like(x))


@algorithm
def diloco(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    inner_steps: int = 500,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[Options],
) -> Algorithm:
    """Train locally for H steps, then move the common parameters along the workers' mean progress.

    Sent: 2(N-1)/N times the parameters in every H-th step, after the update, so it does not overlap with the
    gradient (`streaming_diloco` does); nothing in all other steps. With a narrow `wire_dtype` the differences φ - θ
    are sent, so that rounding does not lose small progress (the workers must then start equal).
    With `outer_learning_rate=1, outer_momentum=0` it is local SGD: adapt-then-combine on `every(H, complete)`
    with steps counted from 1 (averages in steps H-1, 2H-1, …).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer (AdamW in the paper); its state stays the worker's own.
        topology: only its `num_workers` counts: outer steps average over all workers (`noloco`: over neighbors).
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, β outside [0, 1]; from `init`, a narrow `wire_dtype` and unequal parameters.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_whole("diloco", inner_steps=inner_steps)
    require_positive("diloco", outer_learning_rate=outer_learning_rate)
    require_fractions("diloco", outer_momentum=outer_momentum)
    outer = after_steps(inner_steps, worker.everyone)
    rate, beta, wire = as_input("diloco", "outer_learning_rate", outer_learning_rate), outer_momentum, worker.wire_dtype

    must_equal = () if wire is None else ("params",)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        theta, (phi, b) = state.params, state.memory
        g, local = worker.gradient(theta, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, theta)
        theta = unless_bad(add(theta, u), lambda: phi)
        due = is_active(outer, t, theta)
        mean = worker.mean(to_send(phi, theta, wire), t, outer)
        delta = outer_gradient(phi, mean, wire)
        eta = at(rate, t, phi)
        b_new = each(lambda b, delta: beta * b + delta, b, delta)
        phi_new = each(lambda phi, delta, b: phi - eta * (delta + beta * b), phi, delta, b_new)
        memory = Memory(where(due, phi_new, phi), where(due, b_new, b))
        return State(where(due, phi_new, theta), local, memory), g.metrics

    return worker.algorithm(step, Memory.restart, topology=worker.everyone, must_equal=must_equal)
