"""NoLoCo: DiLoCo without its all-reduce; outer steps average over a neighbor or two.

    θ ← θ + u(θ, g(θ))                                       in every step      (Kolehmainen et al., 2025;
    d = θ - φ                                                after every H       arXiv:2506.10911)
    b⁺ = α b + β W d + γ (W φ - φ)                           steps, and then
    φ⁺ = φ + b⁺
    θ ← φ⁺

θ: a worker's (fast) parameters; g: its gradient; u: the inner optimizer's update; φ: its slow parameters; d: its
progress; W: the mixing matrix of this outer step (random pairs in the paper); b: the outer momentum, α: its decay;
β: the outer learning rate; γ: the strength of mixing of slow parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Feedback, after_steps, local_steps, progress


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # slow parameters, this worker's own
    b: kit.Buckets  # outer momentum, likewise
    error: kit.Buckets | None = None  # error of compressed payloads; None without a compressor
    averaged = ("phi", "b")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def noloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 50,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    gossip_rounds: int = 1,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, then step along the neighbors' mean progress and toward their slow parameters.

    Sent: one payload of the parameters' size per neighbor in every H-th step, after the update, so it does not overlap
    with the gradient; nothing in all other steps. (By linearity β W d + γ W φ = W (β d + γ φ): half the bytes of the
    authors' code.) Outer step k is round k of the topology.
    With `alpha=0, beta=1, gamma=1` it is local SGD over the topology, with rounds in steps H-1, 2H-1, …

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: the schedule of outer steps, doubly stochastic; `random-matching` in the paper.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        alpha: α in [0, 1].
        beta: β > 0.
        gamma: γ > 0.
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        compressor: C of the payload, with error feedback: x + (W - I) q in place of W x, which keeps the mean for every C. A
            payload has the size of parameters, so C is precise, δ >= 1/2: `df.compressors.quantize()`, 8 bits.
        error_decay: decay of the error, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, α outside [0, 1], β or γ not positive, a push-sum topology, or one on
            which disagreement grows (1,000 rounds without gradients are tried).
    """
    worker = kit.Worker(loss_fn, optimizer, topology, gossip_rounds=gossip_rounds, **options)
    kit.require_whole("noloco", inner_steps=inner_steps)
    kit.require_fractions("noloco", alpha=alpha)
    kit.require_positive("noloco", beta=beta, gamma=gamma)

    def free(phi: Tensor, b: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        b = alpha * b + gamma * (mix(phi) - phi)
        return phi + b, b

    topologies = "use a topology such as 'random-matching' or 'base', or a smaller alpha"
    way_out = f"use gamma <= {1 + alpha:g}" if gamma > 1 + alpha else topologies
    kit.require_settling(f"noloco(alpha={alpha}, gamma={gamma})", topology, free, way_out, gossip_rounds)
    feedback = Feedback("noloco", compressor, error_decay, worker)
    schedule, gamma_input = feedback.with_peers(inner_steps, topology), kit.as_input("noloco", "gamma", gamma)

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        (phi, b, error), of_phi = memory, kit.at(gamma_input, t, memory.phi)
        sent = kit.each(lambda phi, d: of_phi * phi - beta * d, phi, progress(phi, theta))
        mixed, error = feedback.mix(sent, error, schedule, t)
        b = kit.each(lambda b, mixed, phi: alpha * b + (mixed - of_phi * phi), b, mixed, phi)
        phi = kit.each(torch.add, phi, b)
        return phi, Memory(phi, b, error)

    def start(x: kit.Buckets) -> Memory:
        return Memory(kit.copy_wide(x), kit.zeros_like(x), feedback.start(x, with_peers=True))

    due = after_steps(inner_steps, worker.everyone)  # also in an idle round
    return worker.algorithm(local_steps(worker, due, outer), start, schedules=(due,), whole_buckets=feedback.is_on)
