"""DeMo: decoupled momentum optimization (Peng, Quesnelle, Kingma, 2024).

    δ = κ δ + η g
    q = topk(DCT_chunk δ);    δ⁺ = δ - IDCT q
    θ⁺ = θ - η sign(IDCT Σ_i q_i)

θ: the parameters, the same on every worker; δ: a worker's own momentum, of which only the fast-moving part q is sent;
g: its gradient; κ: the decay; η: the learning rate; DCT_chunk: the cosine transform of tiles of chunk x chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn.comm.gossip.compressed import everyone, post_compressed, sum_compressed
from decentfn.compressors import Compressor, dct_top_k
from decentfn.core.trees import PyTree
from decentfn.kit import (
    Algorithm,
    Buckets,
    LossFn,
    Metrics,
    Options,
    State,
    Worker,
    add,
    algorithm,
    at,
    cast_like,
    each,
    require_compressor,
    require_rate,
    zeros_like,
)
from decentfn.topologies import Topology


class Memory(NamedTuple):
    """What a worker remembers."""

    momentum: Buckets  # δ
    averaged = ("momentum",)  # over the workers, by df.resize

    @classmethod
    def restart(cls, x: Buckets) -> Memory:
        """The momentum starts anew."""
        return cls(zeros_like(x))


@algorithm
def demo(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    learning_rate: float | Callable[[Tensor], Tensor] = 1.0,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 64,
    compressor: Compressor | None = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Send everyone the largest cosine components of the momentum, forget them, and step by the sign of their sum.

    The transform is linear, so Σ_i IDCT q_i stands for IDCT Σ_i q_i; it is added in the order of the workers, which
    keeps replicas identical to the last bit. What travels is known after the gradient only, so messages overlap with
    the compression of later buckets and with nothing else.
    Sent per step: one compressed message per bucket to each of the N - 1 others (k values and k places per tile).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that sees sign(...) for a gradient; sgd(η) is the paper's.
        topology: only its `num_workers` counts.
        learning_rate: the η that weighs new gradients in δ. The sign forgets a constant, so it matters only if it is a
            function of t (0-d int64 tensor): the optimizer's schedule, into which an algorithm cannot look.
        decay: κ in [0, 1).
        k: components sent per tile.
        chunk: longest side of a tile, in values.
        compressor: what takes the place of `dct_top_k(k, chunk=chunk)`.
        options: `bucket_mb`; see `Options`.

    Raises:
        ValueError: η not positive, κ outside [0, 1), k or chunk not positive, `wire_dtype`; from `init`, unequal parameters.
    """
    compressor = dct_top_k(k, chunk=chunk) if compressor is None else compressor
    require_compressor("demo", compressor, 1.0, options)
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_rate("demo", learning_rate=learning_rate)
    if not 0 <= decay < 1:
        raise ValueError(f"demo(decay={decay}): κ lies in [0, 1); the paper's is 0.999.")
    others = everyone(topology.num_workers)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        theta, (delta,) = state.params, state.memory
        eta = at(learning_rate, t, theta)
        g, local = worker.gradient(theta, state.local, batch, t)
        grown = each(lambda delta, g: (decay * delta + eta * g).to(delta.dtype), delta, g.grads)
        delta = g.keep(grown, delta)
        q = post_compressed(delta, compressor, others, t)
        delta = each(torch.sub, delta, q.sent)
        direction = cast_like(each(torch.sign, sum_compressed(q)), theta)
        # All take the same step, a worker with a bad gradient too, or replicas would part.
        u, local = worker.update(direction, g._replace(good=None), local, theta)
        return State(add(theta, u), local, Memory(delta)), g.metrics

    return worker.algorithm(step, Memory.restart, topology=worker.everyone, must_equal=("params",))
