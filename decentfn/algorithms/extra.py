"""EXTRA: an exact first-order algorithm (Shi, Ling, Wu, Yin, SIAM J. Optim. 2015).

    x¹ = W x⁰ - η g⁰
    x^{t+2} = (I + W) x^{t+1} - ½ (I + W) x^t - η (g^{t+1} - g^t)

summed up over the steps (the paper's cumulative form, which this file computes):

    x⁺ = W x - η g - p;    p⁺ = p + ½ (x - W x);    p⁰ = 0

p is an exact sum, as c in exact_diffusion. Measured in float32 without gradients, for |x| about 2 and four workers on
'static-ring', the mean of an element has moved by 2e-7 (rms) after 100 steps and after 3,000.

x: a worker's parameters; W: the mixing matrix; g: its gradient at x; -η g: the optimizer's update; p: the sum of
half the disagreement seen so far, mean(p) = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit


class Memory(NamedTuple):
    """Half the disagreement, summed over the steps."""

    p: kit.Buckets
    restart = classmethod(kit.zeroed)


@kit.algorithm
def extra(loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, **options: Unpack[kit.Options]) -> kit.Algorithm:
    """Mix and descend; the sum of past disagreement cancels the bias.

    Everything overlaps: x is posted before the forward pass and needed after the backward pass.
    Sent per step: the parameters, once per neighbor.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: static and symmetric.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that changes with time, or is not symmetric.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, shows_mix=True, **options)
    kit.require_static_symmetric("extra", topology)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (p,) = state.params, state.memory
        posted = worker.post(x, t)
        g, local = worker.gradient(x, state.local, batch, t, after=posted)
        u, local = worker.update(g.grads, g, local, x, posted=posted)
        pull, x = kit.difference(posted, after=g.grads, exact=True), kit.repaired(posted, x)  # W x - x
        p_next = kit.each(lambda p, d: p - d / 2, p, pull)
        x_next = kit.each(lambda x, d, u, p: (x.to(d.dtype) + d + u - p).to(x.dtype), x, pull, u, p)
        return kit.State(x_next, local, Memory(p_next)), g.metrics

    return worker.algorithm(step, Memory.restart)
