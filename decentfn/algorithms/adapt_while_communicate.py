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

from decentfn import kit


@kit.algorithm
def adapt_while_communicate(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    gamma: float | Callable[[Tensor], Tensor] = 1.0,
    update_at: Literal["local", "mixed"] = "local",
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
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
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, shows_mix=True, **options)
    if update_at not in ("local", "mixed"):
        raise ValueError(f"adapt_while_communicate(update_at={update_at!r}): choose 'local' or 'mixed'.")
    if not callable(gamma) and not 0 <= gamma <= 1:
        raise ValueError(f"adapt_while_communicate(gamma={gamma}): γ is in [0, 1], or a function of t.")

    factor = kit.as_input("adapt_while_communicate", "gamma", gamma)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x = state.params
        posted = worker.post(x, t)
        g, local = worker.gradient(x, state.local, batch, t, after=posted)
        mixed = kit.collect(posted, kit.at(factor, t, x), after=g.grads)
        seen = mixed if update_at == "mixed" else x
        posted = posted if worker.wants_mix else None  # else the messages are freed before there is an update
        u, local = worker.update(g.grads, g, local, seen, posted=posted)
        metrics = g.metrics
        del g  # and so is the gradient, before there are new parameters
        return kit.State(kit.add(mixed, u), local), metrics

    return worker.algorithm(step)
