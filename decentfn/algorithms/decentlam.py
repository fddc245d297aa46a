"""DecentLaM: decentralized momentum without momentum's bias, for large batches.

    g̃ = (x - W (x - η g)) / η                          (Yuan et al., ICCV 2021)
    m⁺ = β m + g̃
    x⁺ = x - η m⁺

Momentum acts on the mixing too: without gradients x⁺ = W x - η β m, η m⁺ = η β m + x - W x, and disagreement shrinks
for every static symmetric W and β < 1. On links that change from step to step, or are directed, momentum repeats a
round's move in later rounds that do not correct it: for β = 0.9 and 16 workers disagreement grows by 1.22 per step on
one-peer-exp and by 1.25 on static-exp, at every learning rate.

The rounding error of x⁺ is added to m, which returns it: mean(x - η β / (1 - β) m), which mixing keeps, does not drift.
Otherwise momentum would keep single roundings alive, and in a cycle of them the mean would drift in one direction.

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; g̃: the direction
of adapt-then-combine; m: its momentum; β: its decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.optim.transforms.basic import Scalar


class Memory(NamedTuple):
    """The momentum m, in units of a gradient (of an update if learning_rate is 1)."""

    m: kit.Buckets
    averaged = ("m",)  # over the workers, by df.resize
    restart = classmethod(kit.zeroed)


@kit.algorithm
def decentlam(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    beta: float = 0.9,
    learning_rate: Scalar = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Apply momentum to the whole step of adapt-then-combine, mixing included.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group).
    With `beta=0` it is `adapt_then_combine`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)` that turns g into -η g, without its own momentum: `df.sgd(lr)`.
        topology: doubly stochastic, and disagreement must not grow on it (1,000 steps without gradients are tried). Every
            static undirected topology qualifies; the paper analyzes those.
        beta: β in [0, 1].
        learning_rate: η as a function of t, if the learning rate of the optimizer changes. The parameters do not depend
            on a constant η (it only sets the unit of m), so omit a constant one.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: β outside [0, 1], η not positive, a push-sum topology, or one on which the method
            diverges at every learning rate.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_fractions("decentlam", beta=beta)
    kit.require_rate("decentlam", learning_rate=learning_rate)
    rate = kit.as_input("decentlam", "learning_rate", learning_rate)

    def free(x: Tensor, m: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        mixed = mix(x)
        return mixed - beta * m, beta * m + x - mixed

    way_out = "use a static undirected topology such as 'static-ring', a smaller beta, or quasi_global_momentum"
    kit.require_settling(f"decentlam(beta={beta})", topology, free, way_out)
    # Momentum returns r in the next steps: β r (1 - β) / β, β² r (1 - β) / β, ...
    repay = (1 - beta) / beta if beta else 0.0

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        eta = kit.at(rate, t, state.params)
        per_eta = kit.reciprocal(eta)
        x, (m,) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        half = kit.each(lambda x, u: x.to(kit.wide(x.dtype)) + u, x, u)
        posted = worker.post(half, t)
        pull, half = kit.difference(posted), kit.repaired(posted, half)  # (W - I)(x - η g)
        new = kit.each(lambda half, d, m, x: (half + d - eta * beta * m).to(x.dtype), half, pull, m, x)

        # Store 16-bit numbers first: a compiled kernel would continue with the values before rounding.
        stored = kit.each(lambda new: kit.once(new) if new.dtype.itemsize < 4 else new, new)

        def momentum(m: Tensor, u: Tensor, d: Tensor, half: Tensor, new: Tensor) -> Tensor:
            # (x - W (x - η g)) / η without x, whose roundings momentum would accumulate; plus the rounding error of x⁺.
            lost = (d - eta * beta * m) - (new.to(half.dtype) - half)
            return (beta * m - (u + d + repay * lost) * per_eta).to(m.dtype)

        m_new = kit.each(momentum, m, u, pull, half, stored)
        return kit.State(new, local, Memory(m_new)), g.metrics

    return worker.algorithm(step, Memory.restart)
