"""DiLoCo: many local steps, then one step of Nesterov's momentum on the workers' mean progress.

    θ ← θ + u(θ, g(θ))                 in every step               (Douillard et al., 2023; arXiv:2311.08105)
    Δ = φ - Σ_i w_i θ_i / Σ_i w_i      after every H steps, and then
    b⁺ = β b + Δ
    φ⁺ = φ - η (Δ + β b⁺)
    θ ← φ⁺

with a compressor C (MuLoCo; Thérien et al., 2025; arXiv:2505.23725)

    e ← ρ e + n w_i (φ - θ_i) / Σ_i w_i;    q = C(e);    e ← e - q;    Δ = mean_i q_i

with SPARTA (Beton et al., ICLR 2025 workshop MCDC), after every update

    θ_k ← mean_i θ_{i,k}               for k in M_t, a random share p of the elements

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; w_i: a worker's weight, by default 1; Δ: the outer gradient, with the sign of a gradient; b: the outer momentum, β: its decay;
η: the outer learning rate; e: a worker's own error, ρ: its decay. SNOO is DiLoCo with one worker (Kallusky et al.,
2025; arXiv:2510.15830).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Means, local_steps, nesterov, no_weight
from decentfn.algorithms.sparta import mix_some
from decentfn.core.arguments import real, require


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    b: kit.PyTree  # outer momentum, likewise, None if β = 0; or the outer optimizer's state
    weight: Tensor | None = None  # 0-d: this worker's weight since the last outer step; None if all are equal
    error: kit.Buckets | None = None  # e; None without a compressor
    averaged = ("phi", "b", "weight", "error")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 500,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    outer_optimizer: Any = None,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    weight: Callable[[kit.PyTree], Tensor] | None = None,
    fraction: float = 0.0,
    seed: int = 0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, then move the common parameters along the workers' mean progress.

    Sent: 2(N-1)/N times the parameters in every H-th step, after the update, so it does not overlap with the
    gradient (`streaming_diloco` does); nothing in all other steps. With a narrow `wire_dtype` the differences φ - θ
    are sent, so that rounding does not lose small progress (the workers must then start equal). `weight` sends them, too,
    and first one number, for which all wait.
    With `outer_learning_rate=1, outer_momentum=0` it is local SGD: adapt-then-combine on `every(H, complete)`
    with steps counted from 1 (averages in steps H-1, 2H-1, …).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer (AdamW in the paper); its state stays the worker's own.
        topology: only its `num_workers` counts: outer steps average over all workers (`noloco`: over neighbors).
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        outer_optimizer: a pair `(init, update)` in place of η and β. It sees Δ as the gradient and φ as the parameters, in
            float32 or wider; its schedules count outer steps. `df.sgd(rate, momentum=0.9, nesterov=True)` warms up or decays.
        compressor: C, with error feedback: a `df.compressors.quantize(bits=4)`, `chunk_top_k(64)`, `sign()`. Sent then: one
            compressed message per bucket to each of the N - 1 others. None, or `identity()`: as without.
        error_decay: ρ in [0, 1]; with 1 nothing that was learned is lost.
        weight: function from the loss's aux to this worker's weight of a step, 0-d and >= 0, such as
            `lambda aux: aux["tokens"]`; it is summed over the H steps, and 0 leaves the worker out. None: all weights are equal.
        fraction: p in [0, 1] of SPARTA, the share of the parameters that is averaged after every step: 0.005 in the paper,
            2(N-1)/N times as much is sent per step. 0: nothing is sent between outer steps.
        seed: seed of SPARTA's draws.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, β or ρ outside [0, 1], η or β beside an outer optimizer, `wire_dtype` beside a
            compressor; from `init`, a narrow `wire_dtype` or a compressor and unequal parameters.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    weigh = kit.as_weight("diloco", weight)
    require(0 <= real("diloco", "fraction", fraction) <= 1, "diloco", "the fraction lies in [0, 1].", fraction=fraction)
    outer_optimizer = nesterov("diloco", outer_learning_rate, outer_momentum, outer_optimizer)
    means = Means("diloco", inner_steps, compressor, error_decay, worker, sends_progress=weight is not None)

    def start(x: kit.Buckets) -> Memory:
        phi = kit.copy_wide(x)
        own = None if weight is None else no_weight(x)
        return Memory(phi, outer_optimizer.init(phi), own, means.start(x))

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        phi, b, own, error = memory
        delta, error = means.outer_gradient(phi, theta, error, t, own)
        u, b = outer_optimizer.update(delta, b, phi)
        phi = kit.add(phi, u)
        return phi, Memory(phi, b, None if own is None else torch.zeros_like(own), error)

    def mix(theta: kit.Buckets, t: Tensor) -> kit.Buckets:
        return mix_some(worker, theta, t, fraction, seed, worker.everyone) if fraction else theta

    step = local_steps(worker, means.schedule, outer, weight=weigh, mix=mix)
    whole = means.is_on or fraction > 0
    return means.algorithm(step, start, (means.schedule,), whole_buckets=whole, outer_optimizers=(outer_optimizer,))
