"""DecentLaM: decentralized momentum without momentum's bias, for large batches.

    g̃ = (x - W (x - η g)) / η                          (Yuan et al., ICCV 2021)
    m⁺ = β m + g̃
    x⁺ = x - η m⁺

x: a worker's parameters; g: its gradient; W: the mixing matrix of the step; η: the learning rate; g̃: the direction
that adapt-then-combine takes; m: its momentum; β: how much of it is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from decentfn import trees
from decentfn.algorithms.hyperparameters import at, reciprocal, require_fractions, require_positive
from decentfn.algorithms.preconditions import require_doubly_stochastic
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, add, as_step
from decentfn.buckets import Buckets
from decentfn.topologies import Topology
from decentfn.transforms.basic import Scalar, zeros_like
from decentfn.trees import PyTree


class DecentLaMState(NamedTuple):
    """The state of one worker."""

    params: Buckets
    opt_state: PyTree
    m: Buckets  # momentum, in units of a gradient (of an update where learning_rate is left at 1)
    buffers: PyTree = None

    def with_params(self, x: Buckets) -> DecentLaMState:
        """The momentum starts anew."""
        return self._replace(params=x, m=zeros_like(x))


def decentlam(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    beta: float = 0.9,
    learning_rate: Scalar = 1.0,
    **options: Unpack[Options],
) -> Algorithm:
    """Momentum on the whole step of adapt-then-combine, the mixing included.

    As with adapt-then-combine nothing can be sent before the update, so only the last buckets' messages overlap.
    Sent per step: the parameters, once per neighbour (or one all-reduce within the group).
    With `beta=0` it is `adapt_then_combine`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `decentfn.functional`.
        optimizer: a pair `(init, update)` that turns g into -η g, without momentum of its own: `df.sgd(lr)`.
        topology: the schedule of mixing matrices, doubly stochastic. The paper analyses a static one.
        beta: β in [0, 1].
        learning_rate: η as a function of t, where the optimizer's changes. The parameters do not depend on a constant
            η (it only fixes the unit of m), so a constant one need not be named twice.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: β outside [0, 1], η not positive, a topology that is column-stochastic only.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_fractions("decentlam", beta=beta)
    require_positive("decentlam", learning_rate=learning_rate)
    require_doubly_stochastic("decentlam", topology)

    def init(params: PyTree, buffers: PyTree = None) -> DecentLaMState:
        x, opt_state, buffers = worker.init(params, buffers)
        return DecentLaMState(x, opt_state, zeros_like(x), buffers)

    def step(state: DecentLaMState, batch: PyTree, t: int | Tensor) -> tuple[DecentLaMState, Metrics]:
        t = as_step(t)
        eta = at(learning_rate, t)
        per_eta = reciprocal(eta)
        x, opt_state, m, buffers = state
        g = worker.gradient(x, buffers, batch)
        u, opt_state = optimizer.update(g.grads, opt_state, x)
        mixed = worker.mix(add(x, u), t)
        # x - η m⁺ = W (x - η g) - η β m, which for β = 0 is adapt-then-combine to the bit.
        new = trees.map(lambda mixed, m: (mixed - eta * beta * m).to(mixed.dtype), mixed, m)
        m = trees.map(lambda m, x, mixed: (beta * m + (x - mixed) * per_eta).to(m.dtype), m, x, mixed)
        return DecentLaMState(new, opt_state, m, g.buffers), g.metrics

    return Algorithm(init, step)
