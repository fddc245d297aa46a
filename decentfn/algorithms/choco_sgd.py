"""CHOCO-SGD: gossip of compressed differences to public copies (Koloskova, Stich, Jaggi, ICML 2019).

    x½ = x + u(x, g(x))
    q = C(x½ - x̂);    x̂⁺ = x̂ + q
    d⁺ = d + (W - I) q               d = W x̂ - x̂, a running sum
    x⁺ = x½ + γ d⁺

d is a sum whose errors would stay for ever, so it is kept in float64 for parameters of any dtype. Measured in float32
without gradients, for |x| about 2, four workers on 'static-ring', quantize(8) and γ = 0.3, the mean of an element moved
by 2e-7 (rms) in 100 steps and in 10,000, and workers ended within 2e-6 of their mean.

x: a worker's parameters; u: the optimizer's update at its gradient g; x̂: its public copy, known to all neighbors, 0 at
the start; C: the compressor; W: the mixing matrix; γ: the consensus step size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm.gossip.compressed import as_messages, no_sum, post_compressed, running_sum


class Memory(NamedTuple):
    """Memory of one worker."""

    public: kit.Buckets  # x̂, this worker's public copy
    pull: kit.Buckets  # d = Σ_j W[i,j] (x̂_j - x̂) in float64, whose mean over the workers is 0
    averaged = ("public",)  # over the workers, by df.resize
    of_topology = True  # a sum with the weights of one topology

    @classmethod
    def restart(cls, x: kit.Buckets) -> Memory:
        """Reset the public copy and the running sum."""
        return kit.zeroed(cls, x)._replace(pull=no_sum(x))

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Take the mean public copy, so that those of all neighbors are known."""
        return Memory.restart(x)._replace(public=mean(self.public))


@kit.algorithm
def choco_sgd(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    compressor: kit.Compressor,
    gamma: float,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Update, send the compressed change against the public copy, and move toward the neighbors' public copies.

    Messages are known only after the update, so they overlap only with the compression of later buckets.
    With `compressors.identity()` and γ = 1 it is adapt_then_combine.
    Sent per step: one compressed message per bucket and neighbor (to everyone else on a topology of groups).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: doubly stochastic and static: a worker keeps Σ_j W[i,j] (x̂_j - x̂), not each x̂_j.
        compressor: C, a contraction; a smaller δ needs a smaller γ.
        gamma: γ in (0, 1]; start with about δ, then tune.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that changes over time, γ outside (0, 1], no compressor, `wire_dtype`; at `init`, a
            compressor that is no contraction.
    """
    kit.require_compressor("choco_sgd", compressor, gamma, options)
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_static("choco_sgd", topology, "a worker keeps Σ_j W[i,j] (x̂_j - x̂) as one running sum", "deep_squeeze")
    neighbors, gamma_input = as_messages(topology), kit.as_input("choco_sgd", "gamma", gamma)

    def start(x: kit.Buckets) -> Memory:
        kit.require_contraction("choco_sgd", compressor, x.plan)
        return Memory.restart(x)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (x_hat, pull) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        x_half = kit.unless_bad(kit.add(x, u), lambda: x_hat)
        q = post_compressed(kit.each(torch.sub, x_half, x_hat), compressor, neighbors, t)
        x_hat = kit.add(x_hat, q.sent)
        pull = running_sum(pull, q)
        factor = kit.at(gamma_input, t, x_half)
        x = kit.each(lambda x, pull: (x + factor * pull).to(x.dtype), x_half, pull)
        return kit.State(x, local, Memory(x_hat, pull)), g.metrics

    return worker.algorithm(step, start, whole_buckets=True)
