"""Adapt then combine (ATC): diffusion.

    x⁺ = W (x + u(x, g(x)))                     (Sayed, Foundations and Trends in ML 2014)

x: a worker's parameters; W: the mixing matrix of step t; g(x): its gradient; u: the optimizer's update.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.preconditions import require_doubly_stochastic
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, State, Worker, as_step
from decentfn.buckets import add
from decentfn.topologies import Topology
from decentfn.trees import PyTree


@algorithm
def adapt_then_combine(loss_fn: LossFn, optimizer: Any, topology: Topology, **options: Unpack[Options]) -> Algorithm:
    """Update, then mix what was updated.

    Nothing can be sent before the update, so only the last buckets' messages overlap with anything; in exchange every
    neighbour's gradient is in the next step's parameters. Local SGD (periodic averaging) is this algorithm on
    `every(H, complete)`, Gossip-PGA is it on `pga(H, topology)`.
    Sent per step: the parameters, once per neighbour (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: the schedule of mixing matrices.
        options: `bucket_mb`, `wire_dtype`, `average_buffers`; see `Options`.
    """
    understands = ("loss_scale", "average_buffers")
    worker = Worker(loss_fn, optimizer, topology, understands=understands, **options)
    require_doubly_stochastic("adapt_then_combine", topology)

    def step(state: State, batch: PyTree, t: int | Tensor) -> tuple[State, Metrics]:
        t = as_step(t)
        x = state.params
        g = worker.gradient(x, state.buffers, batch, state.opt_state)
        u, opt_state = worker.update(g.grads, state.opt_state, x, t)
        return State(worker.mix(add(x, u), t), opt_state, g.buffers), g.metrics

    return worker.algorithm(worker.init, worker.then_mixing_buffers(step, topology))
