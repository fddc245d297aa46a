"""SPARTA: in every step the workers average a few random parameters (Beton et al., ICLR 2025 workshop MCDC).

    x ← x + u(x, g(x))
    x_k ← mean_i x_{i,k}               for k in M_t

x: a worker's parameters; g: its gradient; u: the optimizer's update; M_t: a random set of elements, the same on all workers, drawn by
(seed, t, bucket), each with probability p. Without updates E Σ‖x_i - x̄‖² falls by 1 - p per step. `diloco(fraction=p)` does it
between two outer steps, as the paper also does.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.compressors.sparse import spread
from decentfn.core.arguments import require
from decentfn.core.buckets import loose


@kit.algorithm
def sparta(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    fraction: float = 0.005,
    seed: int = 0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Adapt, then average a random share of the parameters.

    Nothing can be sent before the update, so it does not overlap with the gradient.
    Sent per step: p times the parameters, once per neighbor (or one all-reduce within the group); no places, which all draw.
    With `fraction=1` it is `adapt_then_combine`. The workers drift apart by about the steps of 1/p steps: evaluate the mean.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; its state stays the worker's own.
        topology: the schedule of mixing matrices, doubly stochastic; `complete` in the paper.
        fraction: p, in (0, 1]; at least one value of a bucket is sent.
        seed: seed of the draws.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: p outside (0, 1], a push-sum topology.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    require(0 < fraction <= 1, "sparta", "the fraction lies in (0, 1].", fraction=fraction)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        g, local = worker.gradient(state.params, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, state.params)
        x = mix_some(worker, kit.add(state.params, u), t, fraction, seed)
        return kit.State(x, local), g.metrics

    return worker.algorithm(step, whole_buckets=True)


def mix_some(
    worker: kit.Worker, x: kit.Buckets, t: Tensor, fraction: float, seed: int, topology: kit.Topology | None = None
) -> kit.Buckets:
    """Return `x` with the values mixed that (seed, t, bucket) draws; `topology` as for `Worker.mix`."""
    everyone = torch.zeros((), dtype=torch.int64, device=x[0].device)  # the same draws
    counts = [min(b.shape[0], max(1, round(fraction * b.shape[0]))) for b in x]
    where = [
        spread(seed, t, i, count, b.shape[0], everyone) for i, (count, b) in enumerate(zip(counts, x, strict=True))
    ]
    some = loose([torch.gather(b, 0, k) for b, k in zip(x, where, strict=True)], x.plan.buckets)
    mixed = worker.mix(some, t, topology)
    return kit.Buckets([b.scatter(0, k, m.to(b.dtype)) for b, k, m in zip(x, where, mixed, strict=True)], x.plan)
