"""K-GT: gradient tracking with local steps; different data leave no bias, however many steps there are.

    x ← x + u(x, g(x)) - c             in every step               (Liu, Lin, Koloskova, Stich, 2023;
    z = (φ - x) / K                    after every K steps,          arXiv:2301.01313)
    c⁺ = c + W z - z                   and then
    φ⁺ = W (φ - η K z)
    x ← φ⁺;    c⁰ = 0

x: a worker's parameters; g: its gradient; u: the optimizer's update; φ: its parameters at the start of the round;
z: its mean step, corrected; c: its correction, whose mean over the workers is 0; W: the mixing matrix of the round, the
same for z and φ; η: the outer (server) learning rate. The paper's c is c divided by the learning rate, which need not be
known here. At the optimum u = c on every worker, for every K.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import after_steps, local_steps, progress
from decentfn.core.arguments import require


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # parameters at the start of the round
    c: kit.Buckets  # correction of a step, whose mean over the workers is 0
    averaged = ("phi",)  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def k_gt(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 10,
    outer_learning_rate: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for K steps, corrected toward the mean gradient; then mix parameters and mean steps.

    Sent: two payloads of the parameters' size per neighbor in every K-th step, after the update, so it does not overlap
    with the gradient; nothing in all other steps. Outer step k is round k of the topology.
    With `inner_steps=1` and plain SGD it is `gradient_tracking(form="semi-atc")`. With a learning rate that changes between
    two rounds, or Adam, the correction lags by a round.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer, plain SGD in the paper; it sees the own gradient.
        topology: the schedule of outer steps, doubly stochastic. Static ones are safe; see `gradient_tracking` for others.
        inner_steps: K; the outer step follows steps K-1, 2K-1, …
        outer_learning_rate: η > 0.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: K < 1, η not positive, a push-sum topology, one that rests in some rounds.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("k_gt", inner_steps=inner_steps)
    kit.require_positive("k_gt", outer_learning_rate=outer_learning_rate)
    rule = "a correction is of K steps, so the topology must mix in every round; for fewer rounds use a larger inner_steps."
    require(all(map(topology.is_active, topology.steps())), "k_gt", rule, topology=topology)
    rate = kit.as_input("k_gt", "outer_learning_rate", outer_learning_rate)
    schedule = after_steps(inner_steps, topology)

    def outer(x: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        (phi, c), eta = memory, kit.at(rate, t, memory.phi)
        moved = progress(phi, x)  # K z
        posted_z = worker.post(kit.each(lambda moved: moved / inner_steps, moved), t, schedule)
        posted_x = worker.post(kit.each(lambda phi, moved: phi - eta * moved, phi, moved), t, schedule)
        c = kit.add(c, kit.difference(posted_z, exact=True))
        phi = kit.collect(posted_x)
        return phi, Memory(phi, c)

    step = local_steps(worker, schedule, outer, correction=lambda memory, t: memory.c)
    return worker.algorithm(step, lambda x: Memory(kit.copy_wide(x), kit.zeros_like(x)), schedules=(schedule,))
