"""Exact diffusion (Yuan, Ying, Zhao, Sayed, IEEE Transactions on Signal Processing 2018).

    ψ⁺ = x - η g                   adapt
    φ  = ψ⁺ + x - ψ                correct
    x⁺ = W̄ φ,   W̄ = (I + W)/2      combine;   ψ⁰ = x⁰

with c = x - ψ, what the last combination and correction moved beside the update: φ = ψ⁺ + c,
c⁺ = x⁺ - ψ⁺ = c + (W̄ - I) φ, c⁰ = 0.

x: a worker's parameters; W: the mixing matrix; g: its gradient at x; -η g: the optimizer's update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import gossip, trees
from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.preconditions import require_static_symmetric
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, as_step
from decentfn.buckets import Buckets, add, each, zeros_like
from decentfn.topologies import Topology
from decentfn.trees import PyTree


class State(NamedTuple):
    """One worker's state."""

    params: Buckets
    opt_state: PyTree
    buffers: PyTree
    c: Buckets  # the correction x - ψ; its mean over the workers is 0

    def with_params(self, x: Buckets) -> State:
        """The correction starts anew."""
        return self._replace(params=x, c=zeros_like(x))


@algorithm
def exact_diffusion(loss_fn: LossFn, optimizer: Any, topology: Topology, **options: Unpack[Options]) -> Algorithm:
    """Adapt then combine, its bias removed by a correction before the combination.

    It is D² on (I + W)/2, which is positive semidefinite for every W: no spectral condition is left.
    Nothing can be sent before the update, so only the last buckets' messages overlap with anything.
    Sent per step: φ, once per neighbour.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: static and symmetric.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: a topology that changes with time, or is not symmetric.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_static_symmetric("exact_diffusion", topology)

    def init(params: PyTree, buffers: PyTree = None) -> State:
        x = worker.start(params)
        return State(x, optimizer.init(x), trees.map(torch.clone, buffers), zeros_like(x))

    def step(state: State, batch: PyTree, t: int | Tensor) -> tuple[State, Metrics]:
        x = state.params
        g = worker.gradient(x, state.buffers, batch)
        u, opt_state = optimizer.update(g.grads, state.opt_state, x)
        phi = each(lambda x, u, c: x.to(c.dtype) + u + c, x, u, state.c)
        pull = gossip.difference(worker.post(phi, as_step(t)), gamma=0.5)  # W̄ φ - φ
        x_next = each(lambda phi, d, x: (phi + d).to(x.dtype), phi, pull, x)
        return State(x_next, opt_state, g.buffers, add(state.c, pull)), g.metrics

    return worker.algorithm(init, step)
