"""Factored Gossip DiLoCo: two gossip rounds in place of DiLoCo's average, of which one does not block.

    θ ← θ + u(θ, g(θ))                   in every step                 (Koneputugodage et al., ICML 2026;
    φ̂ = W₁ φ                             during the H steps,            arXiv:2606.22768)
    Δ = φ - θ                            after them, and then
    φ⁺ = W₂ (φ̂ + v(Δ))
    θ ← φ⁺

θ: a worker's parameters; g: its gradient; u: the inner optimizer's update; φ: its parameters at the start of the
round; W₁, W₂: mixing matrices; Δ: the outer gradient, with the sign of a gradient; v: the outer optimizer's update, by
default Nesterov's momentum; Δ and the state of v are the worker's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Arrive, Feedback, after_steps, local_steps, progress, require_outer
from decentfn.optim.transforms import sgd
from decentfn.topologies import nth_round


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # parameters at the start of the round
    opt: kit.PyTree  # state of the outer optimizer
    errors: tuple[kit.Buckets | None, ...] = (None, None)  # e of φ and of φ̂ + v; None without a compressor
    averaged = ("phi", "opt")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def factored_gossip_diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 50,
    outer_optimizer: Any = None,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps; mix what the round started from meanwhile, and the result again at the end.

    The first mix needs only φ, known since the start of the round; it is sent in the round's last step and overlaps
    with that gradient. The second one blocks. Outer step k takes rounds 2k and 2k + 1 of the topology as W₁ and W₂:
    `df.topologies.alternate(ring(N), idle(N))` never blocks, and `alternate(idle(N), complete(N))` is `diloco`. So this is
    also DiLoCo with any outer optimizer over any topology.
    Sent: the parameters, once per neighbor of each mix, in every H-th step; nothing in all other steps.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: the schedule of mixes, doubly stochastic, two rounds for each outer step.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        outer_optimizer: a pair `(init, update)` that sees Δ as the gradient and φ as the parameters, in float32 or wider;
            None is DiLoCo's, `df.sgd(0.7, momentum=0.9, nesterov=True)`.
        compressor: C of both payloads, each with its own error feedback; as for `noloco`.
        error_decay: decay of the errors, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, a push-sum topology, an outer optimizer that is no pair, ascends or wants the mix.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("factored_gossip_diloco", inner_steps=inner_steps)
    feedback = Feedback("factored_gossip_diloco", compressor, error_decay, worker)
    first, second = (feedback.with_peers(inner_steps, nth_round(k, 2, topology)) for k in range(2))
    schedule = after_steps(inner_steps, worker.everyone)  # is active even if W₁ or W₂ is idle
    outer_optimizer = sgd(0.7, momentum=0.9, nesterov=True) if outer_optimizer is None else outer_optimizer
    require_outer("factored_gossip_diloco", outer_optimizer)

    def post(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Posted, Arrive]:
        return feedback.post_mix(memory.phi, memory.errors[0], first, t)

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor, arrived: Any) -> tuple[kit.Buckets, Memory]:
        v, opt = outer_optimizer.update(progress(memory.phi, theta), memory.opt, memory.phi)
        phi_hat, error = arrived
        phi, other = feedback.mix(kit.add(phi_hat, v), memory.errors[1], second, t)
        return phi, Memory(phi, opt, (error, other))

    def start(x: kit.Buckets) -> Memory:
        phi = kit.copy_wide(x)
        errors = tuple(feedback.start(x, with_peers=True) for _ in range(2))
        return Memory(phi, outer_optimizer.init(phi), errors)

    step = local_steps(worker, schedule, outer, post=post)
    outer_optimizers = (outer_optimizer,)
    return worker.algorithm(
        step, start, schedules=(schedule,), outer_optimizers=outer_optimizers, whole_buckets=feedback.is_on
    )
