"""DeMo: decoupled momentum optimization (Peng, Quesnelle, Kingma, 2024).

    δ = κ δ + η g
    q = topk(DCT_chunk δ);    δ⁺ = δ - IDCT q
    θ⁺ = θ - η sign(IDCT Σ_i q_i)

θ: the parameters, the same on every worker; δ: a worker's own momentum; q: its fast-moving part, which is sent;
g: its gradient; κ: the decay; η: the learning rate; DCT_chunk: the cosine transform of tiles of chunk x chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm.gossip.compressed import all_to_all, post_compressed, sum_compressed
from decentfn.compressors import dct_top_k


class Memory(NamedTuple):
    """Memory of one worker."""

    momentum: kit.Buckets  # δ
    averaged = ("momentum",)  # over the workers, by df.resize
    restart = classmethod(kit.zeroed)


@kit.algorithm
def demo(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    learning_rate: float | Callable[[Tensor], Tensor] = 1.0,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 64,
    compressor: kit.Compressor | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Send all workers the largest cosine components of the momentum, remove them, and step by the sign of their sum.

    The transform is linear, so Σ_i IDCT q_i replaces IDCT Σ_i q_i. It is added in the order of the workers, which
    keeps replicas bitwise identical. Messages are known only after the gradient, so they overlap only with the
    compression of later buckets.
    Sent per step: one compressed message per bucket to each of the N - 1 others (k values and k places per tile).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that sees sign(...) as the gradient; the paper uses sgd(η).
        topology: only its `num_workers` counts.
        learning_rate: the η that weights new gradients in δ. The sign ignores a constant, so it matters only as a
            function of t (0-d int64 tensor). Pass the optimizer's schedule, which an algorithm cannot read.
        decay: κ in [0, 1).
        k: components sent per tile.
        chunk: longest side of a tile, in values.
        compressor: a replacement for `dct_top_k(k, chunk=chunk)`.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: η not positive, κ outside [0, 1), k or chunk not positive, `wire_dtype`; from `init`, unequal
            parameters.
    """
    compressor = dct_top_k(k, chunk=chunk) if compressor is None else compressor
    kit.require_compressor("demo", compressor, 1.0, options)
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_rate("demo", learning_rate=learning_rate)
    rate = kit.as_input("demo", "learning_rate", learning_rate)
    if not 0 <= decay < 1:
        raise ValueError(f"demo(decay={decay}): κ is in [0, 1); the paper uses 0.999.")
    others = all_to_all(topology.num_workers)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        theta, (delta,) = state.params, state.memory
        eta = kit.at(rate, t, theta)
        g, local = worker.gradient(theta, state.local, batch, t)
        grown = kit.each(lambda delta, g: (decay * delta + eta * g).to(delta.dtype), delta, g.grads)
        delta = g.keep(grown, delta)
        q = post_compressed(delta, compressor, others, t)
        delta = kit.each(torch.sub, delta, q.sent)
        direction = kit.cast_like(kit.each(torch.sign, sum_compressed(q)), theta)
        # A worker with a bad gradient, or with unused leaves, takes the same step, or replicas would diverge.
        u, local = worker.update(direction, g._replace(good=None, used=None), local, theta)
        return kit.State(kit.add(theta, u), local, Memory(delta)), g.metrics

    return worker.algorithm(step, Memory.restart, topology=worker.everyone, must_equal=("params",), whole_buckets=True)
