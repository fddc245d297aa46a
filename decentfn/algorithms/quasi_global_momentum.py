"""Quasi-global momentum (QG): momentum from the difference of two consecutive, already mixed parameters.

    x½ = x - η (β m + g)                               QG-DSGDm          (Lin et al., ICML 2021)
    x½ = x - η (g + β (β m + g))                       with Nesterov's momentum
    x⁺ = W x½
    m⁺ = μ m + (1 - μ) (x - x⁺) / η

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; m: the quasi-global
momentum, β: its weight, μ: its decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.optim.transforms.basic import Scalar


class Memory(NamedTuple):
    """Quasi-global momentum, in units of a gradient (of an update if learning_rate is 1)."""

    m: kit.Buckets
    averaged = ("m",)  # over the workers, by df.resize
    restart = classmethod(kit.zeroed)


@kit.algorithm
def quasi_global_momentum(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    beta: float = 0.9,
    mu: float = 0.9,
    nesterov: bool = False,
    learning_rate: Scalar = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Use momentum that is nearly the same on all workers, even with heterogeneous data.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group); momentum is free.
    With `beta=0` it is `adapt_then_combine`. The Adam variant is `quasi_global_adam`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that turns g into -η g, without its own momentum: `df.sgd(lr)`.
        topology: the schedule of mixing matrices, doubly stochastic.
        beta: β in [0, 1], the weight of m.
        mu: μ in [0, 1], the decay of m; the authors use β.
        nesterov: use Nesterov's momentum.
        learning_rate: η as a function of t, if the learning rate of the optimizer changes. The parameters do not depend
            on a constant η (it only sets the unit of m), so omit a constant one.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: β or μ outside [0, 1], η not positive, a push-sum topology, or one on which disagreement grows
            (1,000 steps without gradients are tried).
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_fractions("quasi_global_momentum", beta=beta, mu=mu)
    kit.require_rate("quasi_global_momentum", learning_rate=learning_rate)
    rate = kit.as_input("quasi_global_momentum", "learning_rate", learning_rate)
    # g + β (β m + g) = (1 + β) g + β² m.
    of_g, of_m = (1 + beta, beta**2) if nesterov else (1, beta)

    def free(x: Tensor, m: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        new = mix(x - of_m * m)
        return new, mu * m + (1 - mu) * (x - new)

    way_out = "use a topology such as 'static-ring' or 'base', or a smaller beta"
    kit.require_settling(f"quasi_global_momentum(beta={beta}, mu={mu})", topology, free, way_out)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        eta = kit.at(rate, t, state.params)
        per_eta = kit.reciprocal(eta)
        x, (m,) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(kit.each(lambda g: of_g * g, g.grads), g, local, x)
        move = kit.each(lambda u, m: u - eta * of_m * m, u, m)
        half = kit.each(lambda x, move: x.to(move.dtype) + move, x, move)
        posted = worker.post(half, t)
        pull, half = kit.difference(posted), kit.repaired(posted, half)  # (W - I) x½
        mixed = kit.each(lambda half, d, x: (half + d).to(x.dtype), half, pull, x)
        # (x - x⁺) / η without x, whose roundings momentum would accumulate.
        m_new = kit.each(lambda m, move, d: (mu * m - (1 - mu) * (move + d) * per_eta).to(m.dtype), m, move, pull)
        return kit.State(mixed, local, Memory(m_new)), g.metrics

    return worker.algorithm(step, Memory.restart)
