"""All-reduce: synchronous data parallelism, the arithmetic of DistributedDataParallel.

    x⁺ = x + u(x, Σ_i w_i g_i(x) / Σ_i w_i)

x: the parameters, the same on every worker; g_i: worker i's gradient; w_i: its weight, by default 1; u: the optimizer's
update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from decentfn import kit


@kit.algorithm
def all_reduce(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    weight: Callable[[kit.PyTree], Tensor] | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Average the gradients over all workers, then update; all replicas stay identical.

    A bucket's all-reduce starts as soon as its gradients are ready and overlaps with the rest of the backward pass.
    Sent per step: 2(N-1)/N times the gradients; with `weight` before them one number, for which all wait.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees the averaged gradient.
        topology: only its `num_workers` counts.
        weight: function from the loss's aux to this worker's weight in the mean, 0-d and >= 0, such as
            `lambda aux: aux["tokens"]`; 0 leaves the worker out. None: all weights are equal.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: from `init`, unequal replicas; make them equal with `df.broadcast`.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    weigh = kit.as_weight("all_reduce", weight)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x = state.params
        g, local = worker.gradient(x, state.local, batch, t, together=True, weight=weigh)
        mean = worker.mean(g.grads, t, weight=g.weight)
        u, local = worker.update(mean, worker.used_by_any(g, t), local, x)
        return kit.State(kit.add(x, u), local), g.metrics

    return worker.algorithm(step, topology=worker.everyone, must_equal=("params", "buffers"))
