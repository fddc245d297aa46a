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

from typing import Any, Unpack

from decentfn import kit
from decentfn.algorithms.diloco import diloco
from decentfn.compressors import chunk_top_k


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
    It is `diloco(outer_momentum=0, compressor=..., error_decay=...)`, and with `identity()` `diloco` without momentum.

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
    given = chunk_top_k(64, chunk=4096, bits=2) if compressor is None else compressor
    kit.require_compressor("sparse_loco", given, 1.0, options)
    kit.require_whole("sparse_loco", inner_steps=inner_steps)
    kit.require_positive("sparse_loco", outer_learning_rate=outer_learning_rate)
    kit.require_fractions("sparse_loco", decay=decay)
    return diloco(
        loss_fn,
        optimizer,
        topology,
        inner_steps=inner_steps,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=0.0,
        compressor=given,
        error_decay=decay,
        **options,
    )
