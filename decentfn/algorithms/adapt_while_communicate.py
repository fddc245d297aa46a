"""Adapt while communicate (AWC): D-PSGD, decentralized gradient descent, and Decent-DP's scheme.

    x⁺ = W x + u(x, g(x))            update_at="local"   (Lian et al., NeurIPS 2017)
    x̃ = (1 - γ) x + γ W x
    x⁺ = x̃ + u(x̃, g(x))              update_at="mixed"   (Decent-DP; Wang et al., ICLR 2025)

x: a worker's parameters; W: the mixing matrix of step t; g(x): its gradient at its own, unmixed x; u: the
optimizer's update; γ: the consensus step size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack

from torch import Tensor

from decentfn.core.trees import PyTree
from decentfn.kit import (
    Algorithm,
    LossFn,
    Metrics,
    Options,
    State,
    Worker,
    add,
    algorithm,
    as_input,
    at,
    collect,
)
from decentfn.topologies import Topology


@algorithm
def adapt_while_communicate(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    gamma: float | Callable[[Tensor], Tensor] = 1.0,
    update_at: Literal["local", "mixed"] = "local",
    **options: Unpack[Options],
) -> Algorithm:
    """Send the parameters while the gradient is computed; add the update to the mix.

    Everything overlaps: messages are posted before the forward pass and needed after the backward pass.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: the schedule of mixing matrices.
        gamma: γ in [0, 1], or a function of `t` (0-d int64 tensor) that returns it.
        update_at: the parameters that the optimizer sees (weight decay acts there): the worker's own `x`, or the
            mixed ones, as in Decent-DP.
        options: `bucket_mb`, `wire_dtype`; see `Options`.
    """
    worker = Worker(loss_fn, optimizer, topology, shows_mix=True, **options)
    if update_at not in ("local", "mixed"):
        raise ValueError(f"adapt_while_communicate(update_at={update_at!r}): choose 'local' or 'mixed'.")
    if not callable(gamma) and not 0 <= gamma <= 1:
        raise ValueError(f"adapt_while_communicate(gamma={gamma}): γ is in [0, 1], or a function of t.")

    factor = as_input("adapt_while_communicate", "gamma", gamma)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        x = state.params
        posted = worker.post(x, t)
        g, local = worker.gradient(x, state.local, batch, t, after=posted)
        mixed = collect(posted, at(factor, t, x), after=g.grads)
        seen = mixed if update_at == "mixed" else x
        u, local = worker.update(g.grads, g, local, seen, posted=posted)
        return State(add(mixed, u), local), g.metrics

    return worker.algorithm(step)
