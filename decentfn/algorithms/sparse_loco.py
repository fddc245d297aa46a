"""SparseLoCo: DiLoCo whose workers send the largest parts of their progress and keep the rest.

    θ ← θ + u(θ, g(θ))             in every step             (Sarfi et al., 2025; arXiv:2508.15706)
    e ← β e + (φ - θ)              after every H steps, and then
    q = C(e);    e ← e - q
    φ⁺ = φ - α mean_i q_i
    θ ← φ⁺

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; e: a worker's own error, β: its decay, which acts as the outer momentum; C: the compressor; α: the outer
learning rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Feedback, after_steps, local_steps, progress
from decentfn.comm.gossip.compressed import sum_compressed
from decentfn.compressors import chunk_top_k


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    error: kit.Buckets  # e
    averaged = ("phi", "error")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def sparse_loco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 30,
    outer_learning_rate: float = 1.0,
    decay: float = 0.95,
    compressor: kit.Compressor | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, then move the common parameters along the mean of the compressed progress.

    The messages are added in the order of the workers, which keeps φ bitwise identical.
    Sent: one compressed message per bucket to each of the N - 1 others in every H-th step, after the update, so it
    does not overlap with the gradient; nothing in all other steps.
    It is `diloco(outer_momentum=0, compressor=..., error_decay=...)`, which keeps a momentum too; with
    `decay=0, compressor=identity()` it is `diloco` without momentum.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: only its `num_workers` counts.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_learning_rate: α > 0.
        decay: β in [0, 1]; the paper uses 0.95.
        compressor: a replacement for the paper's `chunk_top_k(64, chunk=4096, bits=2)`.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, α not positive, β outside [0, 1], `wire_dtype`; from `init`, unequal parameters.
    """
    compressor = chunk_top_k(64, chunk=4096, bits=2) if compressor is None else compressor
    kit.require_compressor("sparse_loco", compressor, 1.0, options)
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("sparse_loco", inner_steps=inner_steps)
    kit.require_positive("sparse_loco", outer_learning_rate=outer_learning_rate)
    kit.require_fractions("sparse_loco", decay=decay)
    feedback = Feedback("sparse_loco", compressor, decay, topology.num_workers)
    schedule = after_steps(inner_steps, feedback.everyone)
    rate = kit.as_input("sparse_loco", "outer_learning_rate", outer_learning_rate)

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        phi, error = memory
        error = feedback.add(progress(phi, theta), error, t)
        q = feedback.post(error, schedule, t)
        share = kit.once(kit.at(rate, t, phi) / (1 + (q.posted.row.sources >= 0).sum()).double())
        phi = kit.each(lambda phi, total: phi - share.to(phi.dtype) * total, phi, sum_compressed(q))
        return phi, Memory(phi, kit.each(torch.sub, error, q.sent))

    step = local_steps(worker, schedule, outer)
    return worker.algorithm(
        step,
        lambda x: Memory(kit.copy_wide(x), kit.zeros_like(x)),
        topology=worker.everyone,
        schedules=(schedule,),
        must_equal=("params",),
        whole_buckets=True,
    )
