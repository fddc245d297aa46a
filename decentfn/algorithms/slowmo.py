"""SlowMo: slow momentum around any communication-efficient method.

    x ← W (x + v(x, g(x)))             in every step               (Wang et al., ICLR 2020)
    x_H = mean_i x                     after every H steps, and then
    u⁺ = β u + (x_0 - x_H) / η
    x⁺ = x_0 - α η u⁺

x: a worker's parameters, x_0: those of H steps before; W: the mixing matrix of the step; g: its gradient; v: the base
optimizer's update; η: the base (fast) learning rate; u: the slow momentum, β: its decay; α: the slow learning rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Means, local_steps
from decentfn.optim.transforms.basic import Scalar
from decentfn.topologies import paused


class Memory(NamedTuple):
    """Memory of one worker."""

    x0: kit.Buckets  # parameters after the last slow step
    u: kit.Buckets  # slow momentum, in units of a gradient (of an update if learning_rate is 1)
    error: kit.Buckets | None = None  # error of compressed progress; None without a compressor
    averaged = ("x0", "u", "error")  # over the workers, by df.resize
    restart = kit.restarting("x0")


@kit.algorithm
def slowmo(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 12,
    alpha: float = 1.0,
    beta: float = 0.7,
    learning_rate: Scalar = 1.0,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Adapt then combine on `topology`; every H steps, average over all workers and take a step of slow momentum.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group); in every H-th step one
    all-reduce instead. For SlowMo around local SGD pass `idle(N)`, which sends nothing in between.
    With `alpha=1, beta=0` it is Gossip-PGA, or local SGD: adapt-then-combine that averages in steps H-1, 2H-1, …
    (`pga(H, topology)` averages in steps 0, H, …). The base optimizer's state is kept across slow steps.
    With a narrow `wire_dtype` the average is of x - x_0, so that rounding does not lose small progress (the workers must then
    start equal).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the base optimizer.
        topology: the schedule of the base method between slow steps, doubly stochastic.
        inner_steps: H, steps between two slow steps; the slow step follows steps H-1, 2H-1, …
        alpha: α > 0.
        beta: β in [0, 1].
        learning_rate: η as a function of t, if the optimizer's learning rate changes (then u is in units of a
            gradient). The parameters do not depend on a constant η, so omit a constant one.
        compressor: C of what is averaged, with error feedback; as for `diloco`.
        error_decay: its decay, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, α or η not positive, β outside [0, 1], a push-sum topology; from `init`, a narrow `wire_dtype` or
            a compressor and unequal parameters.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_fractions("slowmo", beta=beta)
    kit.require_positive("slowmo", alpha=alpha)
    kit.require_rate("slowmo", learning_rate=learning_rate)
    rate = kit.as_input("slowmo", "learning_rate", learning_rate)
    means = Means("slowmo", inner_steps, compressor, error_decay, worker)
    # The mean of all W x is that of all x, so a step that averages need not mix.
    between = paused(topology, means.schedule)

    def outer(x: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        (x0, u, error), eta = memory, kit.at(rate, t, memory.x0)
        (moved, error), per_eta = means.outer_gradient(x0, x, error, t), kit.reciprocal(eta)
        # Not α η u⁺, which would lose the round if η has fallen to 0 in it.
        slow = kit.each(lambda x0, u, d: x0 - alpha * (eta * beta * u + d), x0, u, moved)
        return slow, Memory(slow, kit.each(lambda u, d: beta * u + d * per_eta, u, moved), error)

    def start(x: kit.Buckets) -> Memory:
        return Memory(kit.copy_wide(x), kit.zeros_like(x), means.start(x))

    step = local_steps(worker, means.schedule, outer, mix=lambda x, t: worker.mix(x, t, between))
    return means.algorithm(step, start, (means.schedule,), topology=topology)
