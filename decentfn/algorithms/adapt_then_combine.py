"""Adapt then combine (ATC): diffusion.

    x⁺ = W (x + u(x, g(x)))                     (Sayed, Foundations and Trends in ML 2014)

x: a worker's parameters; W: the mixing matrix of step t; g(x): its gradient; u: the optimizer's update.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from decentfn.core.trees import PyTree
from decentfn.kit import Algorithm, LossFn, Metrics, Options, State, Worker, add, algorithm, require_doubly_stochastic
from decentfn.topologies import Topology


@algorithm
def adapt_then_combine(
    loss_fn: LossFn, optimizer: Any, topology: Topology, *, gossip_rounds: int = 1, **options: Unpack[Options]
) -> Algorithm:
    """Update, then mix the updated parameters.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation. In return,
    every neighbor's gradient enters the next step's parameters. Local SGD (periodic averaging) is this algorithm on
    `every(H, complete)`; Gossip-PGA is this algorithm on `pga(H, topology)`.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group) and gossip round.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: the schedule of mixing matrices.
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        options: `bucket_mb`, `wire_dtype`; see `Options`.
    """
    worker = Worker(loss_fn, optimizer, topology, gossip_rounds=gossip_rounds, **options)
    require_doubly_stochastic("adapt_then_combine", topology)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        x = state.params
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        return State(worker.mix(add(x, u), t), local), g.metrics

    return worker.algorithm(step)
