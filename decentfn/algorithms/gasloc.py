"""GASLoC: local steps, and then gossip with Nesterov's momentum on the workers' own progress.

    θ ← θ + u(θ, g(θ))               in every step                 (Cagnasso, Belilovsky, Oyallon, 2026;
    y⁺ = φ + η (θ - φ)               after every H steps,           arXiv:2606.11081)
    φ⁺ = y⁺ + α (W y⁺ - y⁺)          and then
         + γ (y⁺ - y)
    θ ← φ⁺

θ: a worker's parameters; g: its gradient; u: the inner optimizer's update; φ: its parameters at the start of the
round; y: the end point of its last round, at the start φ; W: the mixing matrix of this outer step (random pairs
suffice), I - W the paper's Laplacian Λ; α: the gossip step; η: the outer learning rate; γ: the outer momentum.

Momentum acts on the mixing too, and repeats a round's move in later rounds, whose links do not correct it. With γ = 0.9 and
16 workers disagreement grows per round, without gradients, by 9% on random-matching and 22% on one-peer-exp if α = 1,
and shrinks by 2% and 5% if α = 0.25; with the default γ = 0.7, α = 0.6 by 8% and 7%. On most directed graphs it grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Feedback, after_steps, local_steps, progress
from decentfn.core.arguments import real, require


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # parameters at the start of the round
    y: kit.Buckets  # end point of the last round
    error: kit.Buckets | None = None  # error of compressed payloads; None without a compressor
    averaged = ("phi", "y")  # over the workers, by df.resize
    restart = kit.restarting("phi", "y")


@kit.algorithm
def gasloc(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int | list[int] | tuple[int, ...] = 50,
    outer_learning_rate: float = 0.3,
    outer_momentum: float = 0.7,
    gossip_step: float = 0.6,
    gossip_rounds: int = 1,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, then mix with one or two neighbors and continue along the own progress.

    On every topology the workers' mean follows DiLoCo's equation: Nesterov's method on the mean progress. (With y = φ
    at the start this holds from the first round on; y = y⁺ in the first round would leave its momentum out.)
    Sent: the parameters, once per neighbor, in every H-th step, after the update, so it does not overlap with the
    gradient; nothing in all other steps. Outer step k is round k of the topology.
    With `inner_steps=1, outer_learning_rate=1, outer_momentum=0, gossip_step=1` it is adapt_then_combine; on `complete`
    with `outer_momentum=0, gossip_step=1` it is DiLoCo without momentum.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: the schedule of outer steps, doubly stochastic, on which disagreement must not grow (1,000 rounds without
            gradients are tried); `random-matching` is one random peer.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …; or a number for each worker, H_i >= 1, of which H is
            the largest: a slower worker's parameters move in the last H_i steps of each H.
        outer_learning_rate: η > 0. A round's progress counts η / (1 - γ) times in the end: by default once, and 7 times with
            DiLoCo's η = 0.7 and γ = 0.9, too much for a run of few rounds.
        outer_momentum: γ in [0, 1].
        gossip_step: α in (0, 1]; the larger γ, or the longer the period of links that change (`one-peer-exp` of 64), the
            smaller. On static undirected ones 1 is safe, too.
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        compressor: C of the payload, with error feedback; as for `noloco`.
        error_decay: decay of the error, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, γ outside [0, 1], α outside (0, 1], a push-sum topology, or one on which
            disagreement grows.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, gossip_rounds=gossip_rounds, **options)
    steps = tuple(inner_steps) if isinstance(inner_steps, (list, tuple)) else (inner_steps,) * topology.num_workers
    for its in steps:
        kit.require_whole("gasloc", inner_steps=its)
    rule = f"one number of steps for each of the {topology.num_workers} workers."
    require(len(steps) == topology.num_workers, "gasloc", rule, inner_steps=inner_steps)
    kit.require_positive("gasloc", outer_learning_rate=outer_learning_rate)
    kit.require_fractions("gasloc", outer_momentum=outer_momentum)
    require(0 < real("gasloc", "gossip_step", gossip_step) <= 1, "gasloc", "α is in (0, 1].", gossip_step=gossip_step)

    def free(x: Tensor, m: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        m = gossip_step * (mix(x) - x) + outer_momentum * m
        return x + m, m

    call = f"gasloc(gossip_step={gossip_step}, outer_momentum={outer_momentum})"
    way_out = "use 'random-matching' or a static undirected topology, a smaller gossip_step, or outer_momentum=0"
    kit.require_settling(call, topology, free, way_out, gossip_rounds)
    feedback = Feedback("gasloc", compressor, error_decay, worker)
    schedule, due = feedback.with_peers(max(steps), topology), after_steps(max(steps), worker.everyone)  # also if idle
    rate = kit.as_input("gasloc", "outer_learning_rate", outer_learning_rate)
    momentum = kit.as_input("gasloc", "outer_momentum", outer_momentum)
    strength = kit.as_input("gasloc", "gossip_step", gossip_step)

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        phi, y_old, error = memory
        eta, gamma = kit.at(rate, t, phi), kit.at(momentum, t, phi)
        y = kit.each(lambda phi, back: phi - eta * back, phi, progress(phi, theta))
        alpha, (mixed, error) = kit.at(strength, t, phi), feedback.mix(y, error, schedule, t)
        phi = kit.each(lambda mixed, y, old: y + alpha * (mixed - y) + gamma * (y - old), mixed, y, y_old)
        return phi, Memory(phi, y, error)

    def start(x: kit.Buckets) -> Memory:
        return Memory(kit.copy_wide(x), kit.copy_wide(x), feedback.start(x, with_peers=True))

    step = local_steps(worker, due, outer, own_steps=steps if min(steps) < max(steps) else ())
    return worker.algorithm(step, start, schedules=(due,), whole_buckets=feedback.is_on)
