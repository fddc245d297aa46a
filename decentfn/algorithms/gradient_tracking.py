"""Gradient tracking: every worker follows the mean gradient, so heterogeneous data leaves no bias.

    x⁺ = W (x - η y);   y⁺ = W (y + g⁺ - g)       form="atc": NEXT (Di Lorenzo, Scutari, IEEE TSIPN 2016)
    x⁺ = W (x - η y);   y⁺ = W y + g⁺ - g         form="semi-atc"
    x⁺ = W x - η y;     y⁺ = W y + g⁺ - g         form="awc": DIGing (Nedić, Olshevsky, Shi, SIAM J. Optim. 2017)
    y⁰ = g⁰

x: a worker's parameters; W: the mixing matrix of a step, the same for x and y; g, g⁺: its gradients at x and x⁺;
y: its estimate of the mean gradient, mean(y) = mean(g) at every step; -η y: the optimizer's update for y.

Why "atc" is the default. A round of pairs takes all of the pairs' disagreement d out of x at once, and the gradients answer
with g⁺ - g = -a d (a: the curvature). In the other two forms this enters y unmixed, and links that do not join these
pairs leave it there: until the same pairs meet again y pushes x back to where it was, and momentum carries it beyond.
"atc" takes it out of y with the link that made it. Where disagreement grows, by the spectral radius of one period for 16
workers of equal curvature, each with momentum 0.9 (without):

    one-peer-exp     "atc": η a > 2 (2)     "semi-atc": η a > 0.065 (1)         "awc": η a > 0.065 (0.5)
    ring             "atc": η a > 2 (2)     "semi-atc": η a > 0.0079 (0.076)    "awc": η a > 0.0079 (0.076)
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import gossip, trees
from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.preconditions import require_doubly_stochastic
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, as_step
from decentfn.buckets import Buckets, add, cast_like, each, widen, zeros_like
from decentfn.topologies import Topology
from decentfn.trees import PyTree


class State(NamedTuple):
    """One worker's state; y and g belong to the last step that was taken."""

    params: Buckets
    opt_state: PyTree
    buffers: PyTree
    y: Buckets  # the tracked gradient
    g: Buckets  # this worker's own gradient
    started: Tensor | None  # 0-d bool: a step was taken; only form="atc" needs it

    def with_params(self, x: Buckets) -> State:
        """The tracker starts anew."""
        y, g, started = trees.map(torch.zeros_like, (self.y, self.g, self.started))
        return self._replace(params=x, y=y, g=g, started=started)


@algorithm
def gradient_tracking(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    form: Literal["atc", "semi-atc", "awc"] = "atc",
    **options: Unpack[Options],
) -> Algorithm:
    """Descend along a gossiped estimate of the mean gradient; the optimizer sees y in the gradient's place.

    Step t first completes the last step's `W y`, with the last step's mixing matrix, and then uses y for its update.
    Overlaps: "atc", the default, nothing: y waits for the gradient and x for y, so a step takes as long as both
    messages and the gradient together; "semi-atc" y, "awc" everything (x and y travel while the gradient is computed).
    The latter two suit static topologies, and others at small learning rates.
    Sent per step: the parameters and the tracker, each once per neighbour (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees y.
        topology: any doubly stochastic schedule.
        form: which of the three; with "semi-atc" and "awc" disagreement may grow on schedules that vary (above).
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: an unknown form, or a column-stochastic topology.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    if form not in ("atc", "semi-atc", "awc"):
        raise ValueError(f"gradient_tracking(form={form!r}): choose 'atc', 'semi-atc' or 'awc'.")
    require_doubly_stochastic("gradient_tracking", topology)

    def init(params: PyTree, buffers: PyTree = None) -> State:
        x = worker.start(params)
        y, g = zeros_like(x), zeros_like(x)
        # From y = g = 0 the first y is W 0 + g - 0; in the form W (y + g⁺ - g) it would be W g.
        started = torch.zeros((), dtype=torch.bool, device=x[0].device) if form == "atc" else None
        return State(x, optimizer.init(x), trees.map(torch.clone, buffers), y, g, started)

    def step(state: State, batch: PyTree, t: int | Tensor) -> tuple[State, Metrics]:
        t = as_step(t)
        last = (t - 1).clamp(min=0)
        x, started = state.params, state.started
        y_travelling = worker.post(state.y, last) if started is None else None
        x_travelling = worker.post(x, t) if form == "awc" else None

        gradient = worker.gradient(x, state.buffers, batch)
        g = widen(gradient.grads)
        change = each(torch.sub, g, state.g)
        if y_travelling is not None:
            y = add(gossip.collect(y_travelling), change)
        else:
            assert started is not None
            y = each(partial(torch.where, started), worker.mix(add(state.y, change), last), g)
            started = torch.ones_like(started)

        u, opt_state = optimizer.update(cast_like(y, x), state.opt_state, x)
        x = worker.mix(add(x, u), t) if x_travelling is None else add(gossip.collect(x_travelling), u)
        return State(x, opt_state, gradient.buffers, y, g, started), gradient.metrics

    return worker.algorithm(init, step)
