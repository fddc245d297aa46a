"""Push-DIGing: gradient tracking over directed graphs (Nedić, Olshevsky, Shi, SIAM J. Optim. 2017).

    u⁺ = A (u - η y);    v⁺ = A v;    x⁺ = u⁺ / v⁺;    y⁺ = A y + g⁺ - g;    v⁰ = 1, y⁰ = g⁰

u: a worker's biased parameters; v: its push-sum weight; x: its de-biased parameters, at which the gradient g is taken;
y: its share of the mean gradient, Σ y = Σ g; A: the column-stochastic mixing matrix of a step, the same for u, v and y;
-η y: the optimizer's update for y.

g⁺ - g enters y unmixed, as in gradient_tracking's form="semi-atc", to which this reduces if A is doubly stochastic. So
it also diverges on one-peer schedules unless the learning rate is small (with momentum 0.9: η x curvature below 0.065
on one-peer-exp with 16 workers). If A is doubly stochastic, use gradient_tracking's default form, which does not
diverge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import gossip
from decentfn.topologies import later


class Memory(NamedTuple):
    """Push-sum weight, tracker y and gradient g of the last step."""

    weight: Tensor  # v, 0-d; the biased parameters are u = v x
    y: kit.Buckets
    g: kit.Buckets

    @classmethod
    def start(cls, x: kit.Buckets) -> Memory:
        """Start from y = g = 0, so that the first y is A 0 + g - 0."""
        return cls(kit.first_weight(x), kit.zeros_like(x), kit.zeros_like(x))

    def restart(self, x: kit.Buckets) -> Memory:
        """Reset the tracker; the weight does not depend on parameters."""
        return self._replace(y=kit.zeros_like(x), g=kit.zeros_like(x))

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Give each worker weight 1, and reset the tracker."""
        return self.restart(x)._replace(weight=torch.ones_like(self.weight))


@kit.algorithm
def push_diging(
    loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, **options: Unpack[kit.Options]
) -> kit.Algorithm:
    """Descend along a pushed estimate of the gradients' sum; exact on directed and time-varying graphs.

    Step t first completes the last step's `A y`, with the last step's mixing matrix, which overlaps with the gradient;
    u and v can be sent only after the update.
    Sent per step: the parameters, the tracker and one more number, once per neighbor.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees y.
        topology: any schedule, column-stochastic ones too; one-peer schedules need small learning rates.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    late = later(1, topology)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (v, y, g) = state.params, state.memory
        y_posted = worker.post(y, t, late)
        gradient, local = worker.gradient(x, state.local, batch, t, after=y_posted)
        g_new = gradient.keep(kit.widen(gradient.grads), g)
        ay = kit.collect(y_posted, after=gradient.grads)
        y = kit.each(lambda ay, new, old: ay + new - old, ay, g_new, g)
        update, local = worker.update(kit.cast_like(y, x), gradient, local, x)
        u, v = kit.unpack(worker.mix(gossip.moved(x, v, update), t), x.plan)
        x = kit.with_own(kit.divide(u, v), kit.add(x, update))
        return kit.State(x, local, Memory(v, y, g_new)), gradient.metrics

    return worker.algorithm(step, Memory.start, push_sum=True)
