"""Push-DIGing: gradient tracking over directed graphs (Nedić, Olshevsky, Shi, SIAM J. Optim. 2017).

    u⁺ = A (u - η y);    v⁺ = A v;    x⁺ = u⁺ / v⁺;    y⁺ = A y + g⁺ - g;    v⁰ = 1, y⁰ = g⁰

u: a worker's biased parameters; v: its push-sum weight; x: its de-biased parameters, at which the gradient g is taken;
y: its share of the mean gradient, Σ y = Σ g; A: the column-stochastic mixing matrix of a step, the same for u, v and y;
-η y: the optimizer's update for y.

g⁺ - g enters y unmixed, as in gradient_tracking's form="semi-atc", which this is where A is doubly stochastic; so on
one-peer schedules it diverges, too, unless the learning rate is small (with momentum 0.9: η x curvature below 0.065 on
one-peer-exp with 16 workers). Where A is doubly stochastic gradient_tracking as it comes does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import gossip, trees
from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, as_step
from decentfn.buckets import Buckets, add, cast_like, divide, each, scale, widen, zeros_like
from decentfn.gossip.push_sum import first_weight, pack, unpack
from decentfn.topologies import Topology
from decentfn.trees import PyTree


class State(NamedTuple):
    """One worker's state; its biased parameters are u = weight · params. y and g belong to the last step."""

    params: Buckets  # x
    opt_state: PyTree
    buffers: PyTree
    weight: Tensor  # v, 0-d
    y: Buckets
    g: Buckets

    def with_params(self, x: Buckets) -> State:
        """The tracker starts anew; the weight knows no parameters."""
        return self._replace(params=x, y=zeros_like(x), g=zeros_like(x))


@algorithm
def push_diging(loss_fn: LossFn, optimizer: Any, topology: Topology, **options: Unpack[Options]) -> Algorithm:
    """Descend along a pushed estimate of the gradients' sum; exact on directed and time-varying graphs.

    Step t first completes the last step's `A y`, with the last step's mixing matrix: it overlaps with the gradient;
    u and v can be sent only after the update.
    Sent per step: the parameters, the tracker and one number more, once per neighbour.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees y.
        topology: any schedule, column-stochastic ones too; where few links speak in a step, at small learning rates.
        options: `bucket_mb`, `wire_dtype`; see `Options`.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)

    def init(params: PyTree, buffers: PyTree = None) -> State:
        x = worker.start(params)
        # From y = g = 0 the first y is A 0 + g - 0.
        y, g = zeros_like(x), zeros_like(x)
        return State(x, optimizer.init(x), trees.map(torch.clone, buffers), first_weight(x), y, g)

    def step(state: State, batch: PyTree, t: int | Tensor) -> tuple[State, Metrics]:
        t = as_step(t)
        x, v = state.params, state.weight
        y_travelling = worker.post(state.y, (t - 1).clamp(min=0))
        gradient = worker.gradient(x, state.buffers, batch)
        g = widen(gradient.grads)
        y = each(lambda ay, new, old: ay + new - old, gossip.collect(y_travelling), g, state.g)
        update, opt_state = optimizer.update(cast_like(y, x), state.opt_state, x)
        u, v = unpack(worker.mix(pack(add(scale(x, v), update), v), t))
        return State(divide(u, v), opt_state, gradient.buffers, v, y, g), gradient.metrics

    return worker.algorithm(init, step)
