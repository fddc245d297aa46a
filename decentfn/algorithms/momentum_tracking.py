"""Momentum tracking: momentum whose rate does not depend on how the workers' data differ.

    u⁺ = β u + g                                       (Takezawa et al., TMLR 2023; arXiv:2209.15505)
    x⁺ = W x - η (u⁺ - c)
    c⁺ = W (c - u⁺) + u⁺

or, with the direction y⁺ = u⁺ - c in place of c,

    y⁺ = W y + u⁺ - u                                  (W of the step before)
    x⁺ = W x - η y⁺

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; u: the worker's own
momentum, β: its decay; c: its deviation from the workers' mean; y: the tracked momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.topologies import later


class Memory(NamedTuple):
    """Own and tracked momentum."""

    u: kit.Buckets  # own momentum
    y: kit.Buckets  # tracked momentum, the last direction; the paper's c is W y subtracted from u
    averaged = ("u", "y")  # over the workers, by df.resize
    restart = classmethod(kit.zeroed)

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Keep the own momentum, and track that of the others from there."""
        return Memory(self.u, kit.each(torch.clone, self.u))


@kit.algorithm
def momentum_tracking(
    loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, *, beta: float = 0.9, **options: Unpack[kit.Options]
) -> kit.Algorithm:
    """Track the mean momentum of all workers and step along it.

    Everything overlaps: both messages are posted before the forward pass. (In the form with c, the correction could
    be sent only after the backward pass; here it waits in the state and is sent in the next step, to the neighbors of
    its own step.)
    Sent per step: parameters and tracked momentum, once per neighbor (or two all-reduces within the group).
    Invariant: mean(y) = mean(u). With `beta=0` it is gradient tracking in its adapt-while-communicate form.

    It starts with c = u = 0 instead of the paper's (g⁰ - ḡ⁰)/(1 - β), which needs all workers' first gradients.
    Both have mean zero, so the mean of the parameters is the same.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that sees the tracked momentum instead of the gradient and turns it into
            -η y, without its own momentum: `df.sgd(lr)`.
        topology: the schedule of mixing matrices, doubly stochastic.
        beta: β in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: β outside [0, 1], a push-sum topology.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, shows_mix=True, **options)
    kit.require_fractions("momentum_tracking", beta=beta)
    late = later(1, topology)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (u, y) = state.params, state.memory
        x_posted, y_posted = worker.post(x, t), worker.post(y, t, late)
        g, local = worker.gradient(x, state.local, batch, t, after=(x_posted, y_posted))
        u_new = g.keep(kit.each(lambda u, g: beta * u + g, u, g.grads), u)
        y_mixed = kit.collect(y_posted, after=g.grads)
        y = kit.each(lambda mixed, new, u: (mixed + (new - u)).to(mixed.dtype), y_mixed, u_new, u)
        update, local = worker.update(kit.cast_like(y, x), g, local, x, posted=x_posted)
        x = kit.add(kit.collect(x_posted, after=g.grads), update)
        return kit.State(x, local, Memory(u_new, y)), g.metrics

    return worker.algorithm(step, Memory.restart)
