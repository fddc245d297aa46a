"""BEER: gradient tracking with compressed messages (Zhao, Li, Li, Richtárik, Chi, NeurIPS 2022; arXiv:2201.13320).

    h⁺ = h + C(x - h)
    s⁺ = s + C(v - s)
    v⁺ = v + γ (W - I) s⁺ + g⁺ - g
    x⁺ = x + γ (W - I) h⁺ - η v⁺

x: a worker's parameters; g, g⁺: its gradients at the last x and at this one; v: its estimate of the mean gradient,
mean(v) = mean(g) at every step; h, s: public copies of x and v, known to all neighbors; C: the compressor; W: the
mixing matrix; γ: the consensus step size; -η v: the optimizer's update for v. All but x start at 0. A worker keeps
(W - I) h and (W - I) s as sums in float64, for parameters of any dtype: an error in them would stay for ever.

A step of the paper ends with its two messages. Here they begin the next step, so that both overlap with the gradient;
the paper's public copies then start at h⁰ = C(x⁰) and s⁰ = C(v⁰), with v⁰ = g⁰.
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

    v: kit.Buckets  # tracker
    m: kit.Buckets  # what it tracks: this worker's gradient (BEER) or its moving average (MoTEF)
    h: kit.Buckets  # public copy of x
    pull_x: kit.Buckets  # (W - I) h, a running sum in float64
    s: kit.Buckets  # public copy of v
    pull_v: kit.Buckets  # (W - I) s
    averaged = ("v", "m", "h", "s")  # over the workers, by df.resize
    of_topology = True  # a sum with the weights of one topology

    @classmethod
    def restart(cls, x: kit.Buckets) -> Memory:
        """Reset the tracker, the public copies and the running sums."""
        return kit.zeroed(cls, x)._replace(pull_x=no_sum(x), pull_v=no_sum(x))

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Take the mean public copies, so that those of all neighbors are known, and track anew from m."""
        v, h, s = kit.each(torch.clone, self.m), mean(self.h), mean(self.s)
        return Memory.restart(x)._replace(v=v, m=self.m, h=h, s=s)


def compressed_tracking(
    call: str, worker: kit.Worker, compressor: kit.Compressor, gamma: float, momentum: float
) -> kit.Algorithm:
    """Return BEER for m⁺ = (1 - λ) m + λ g⁺ in place of g⁺, λ = `momentum`; errors name the `call`."""
    kit.require_static(call, worker.topology, "a worker keeps Σ_j W[i,j] (h_j - h) as one running sum", "deep_squeeze")
    neighbors = as_messages(worker.topology)
    rate, weight = kit.as_input(call, "gamma", gamma), kit.as_input(call, "momentum", momentum)

    def start(x: kit.Buckets) -> Memory:
        kit.require_contraction(call, compressor, x.plan)
        return Memory.restart(x)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        v, m, h, pull_x, s, pull_v = state.memory
        x = kit.unless_bad(state.params, lambda: h)
        factor, share = kit.at(rate, t, x), kit.at(weight, t, x)
        q_x = post_compressed(kit.each(torch.sub, x, h), compressor, neighbors, t)
        q_v = post_compressed(kit.each(torch.sub, v, s), compressor, neighbors, t)
        g, local = worker.gradient(x, state.local, batch, t, after=(q_x.posted, q_v.posted))
        h, pull_x = kit.add(h, q_x.sent), running_sum(pull_x, q_x, after=g.grads)
        s, pull_v = kit.add(s, q_v.sent), running_sum(pull_v, q_v, after=g.grads)
        m_new = g.keep(kit.each(lambda m, g: (1 - share) * m + share * g.to(m.dtype), m, g.grads), m)
        v = kit.each(lambda v, pull, new, old: (v + factor * pull + (new - old)).to(v.dtype), v, pull_v, m_new, m)
        u, local = worker.update(kit.cast_like(v, x), g, local, x)
        x = kit.each(lambda x, pull, u: (x + factor * pull + u).to(x.dtype), x, pull_x, u)
        return kit.State(x, local, Memory(v, m_new, h, pull_x, s, pull_v)), g.metrics

    return worker.algorithm(step, start, whole_buckets=True)


@kit.algorithm
def beer(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    compressor: kit.Compressor,
    gamma: float,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Descend along a tracked estimate of the mean gradient; send compressed changes of parameters and tracker.

    Heterogeneous data leaves no bias, where `choco_sgd` keeps one. Both messages overlap with the gradient.
    With `compressors.identity()` and γ = 1 it is `gradient_tracking(form="awc")`.
    Sent per step: two compressed messages per bucket and neighbor (to everyone else on a topology of groups).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees v.
        topology: doubly stochastic and static: a worker keeps Σ_j W[i,j] (h_j - h), not each h_j.
        compressor: C, a contraction; a smaller δ needs a smaller γ.
        gamma: γ in (0, 1]; start with about δ, then tune.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that changes over time, γ outside (0, 1], no compressor, `wire_dtype`; at `init`, a
            compressor that is no contraction.
    """
    kit.require_compressor("beer", compressor, gamma, options)
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    return compressed_tracking("beer", worker, compressor, gamma, 1.0)
