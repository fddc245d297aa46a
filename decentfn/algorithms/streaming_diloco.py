"""Streaming DiLoCo: DiLoCo on one fragment of the parameters at a time, overlapped with the next steps.

    θ ← θ + u(θ, g(θ))                       in every step         (Douillard et al., 2025; arXiv:2501.18512)
    Δ_p = φ_p - mean_i θ_{i,p}               launched after s steps, s ≡ ⌊(p+1) H / P⌋ (mod H), and applied τ later:
    b_p⁺ = β b_p + Δ_p
    φ_p⁺ = φ_p - η (Δ_p + β b_p⁺)
    θ_p ← (1 - α) φ_p⁺ + α θ_p

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; p = 0 … P-1: a fragment; Δ: the outer gradient; b: the outer momentum, β: its decay;
η: the outer learning rate; α: the weight of a worker's own θ; H: steps between two rounds of a fragment.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Fragments, nesterov, rounds
from decentfn.core.arguments import require


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    b: kit.PyTree  # outer momentum, likewise, None if β = 0; or the outer optimizer's state
    delta: kit.Buckets | None  # outer gradients that have arrived and wait to be applied; None if delay <= 1
    waits: Tensor | None  # [P] bool: fragments of which one does; None if delay <= 1
    error: kit.Buckets | None = None  # error of compressed progress; None without a compressor
    averaged = ("phi", "b", "delta", "waits", "error")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def streaming_diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 100,
    num_fragments: int = 4,
    delay: int = 1,
    alpha: float = 0.5,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    outer_optimizer: Any = None,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Average one fragment at a time, each every H steps, while training continues.

    Fragment p is the p-th of P equal slices of every bucket, so fragments have equal sizes and each spans the model's
    depth. (The outer step is elementwise, so it may split leaves.)
    Everything overlaps if `delay >= 1`: a fragment's message is posted before the forward pass of the step after its
    launch and waited for after that step's backward pass; if `delay > 1` its outer gradient then waits in the state.
    A slower link needs more fragments, not a longer delay.
    With a narrow `wire_dtype` the differences φ - θ are sent (the workers must then start equal).
    Sent: 2(N-1)/N times 1/P of the parameters, in P of H steps; nothing in all other steps.
    With `num_fragments=1, delay=0, alpha=0` it is `diloco`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: only its `num_workers` counts: outer steps average over all workers.
        inner_steps: H >= 1.
        num_fragments: P, from 1 to H, so that a step sends at most one fragment.
        delay: τ, from 0 to H - 1.
        alpha: α in [0, 1]; 0 uses the outer parameters alone.
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        outer_optimizer: a pair `(init, update)` in place of η and β, as for `diloco`; elementwise unless P = 1. Its counts and
            schedules are each fragment's own.
        compressor: C of what is averaged, with error feedback; as for `diloco`.
        error_decay: its decay, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a hyperparameter outside its range; from `init`, a narrow `wire_dtype` and unequal parameters.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("streaming_diloco", 0, delay=delay)
    kit.require_fractions("streaming_diloco", alpha=alpha)
    outer_optimizer = nesterov("streaming_diloco", outer_learning_rate, outer_momentum, outer_optimizer)
    feedback = compressor, error_decay, worker
    loop = Fragments("streaming_diloco", inner_steps, num_fragments, outer_optimizer, *feedback, is_late=delay > 0)
    rule = "a fragment is applied before its next round, so delay < inner_steps; take more inner steps."
    require(delay < inner_steps, "streaming_diloco", rule, inner_steps=inner_steps, delay=delay)
    arrivals = loop.schedules(delay - 1)

    def start(x: kit.Buckets) -> Memory:
        waits = torch.zeros(num_fragments, dtype=torch.bool, device=x[0].device) if delay > 1 else None
        delta = kit.zeros_like(x) if delay > 1 else None
        return Memory(kit.copy_wide(x), loop.init(x), delta, waits, loop.start(x))

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor, arrived: Any = None) -> tuple[kit.Buckets, Memory]:
        delta, error = loop.launch(theta, memory, t)[1]() if arrived is None else arrived
        phi, b, waiting, waits, _ = memory
        due = loop.turn(phi, arrivals, t)
        if waiting is not None and waits is not None:
            launched = loop.turn(phi, loop.launches, t)
            delta = waiting = kit.where(loop.mask(phi, launched), delta, waiting)
            waits = waits | launched
            due, waits = due & waits, waits & ~due
        phi, b, mask = loop.step(due, phi, b, delta)
        theta_new = kit.each(lambda phi, theta: (1 - alpha) * phi + alpha * theta, phi, theta)
        return kit.where(mask, theta_new, theta), Memory(phi, b, waiting, waits, error)

    schedules = (*loop.launches, *arrivals)
    step = rounds(worker, schedules, outer, post=loop.launch if delay else None)
    return loop.algorithm(step, start, schedules, outer_optimizers=(outer_optimizer,))
