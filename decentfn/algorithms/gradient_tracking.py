"""Gradient tracking: every worker follows the mean gradient, so heterogeneous data leaves no bias.

    x⁺ = W (x - η y);   y⁺ = W (y + g⁺ - g)       form="atc": NEXT (Di Lorenzo, Scutari, IEEE TSIPN 2016), Aug-DGM, ATC-DIGing
    x⁺ = W (x - η y);   y⁺ = W y + g⁺ - g         form="semi-atc"
    x⁺ = W x - η y;     y⁺ = W y + g⁺ - g         form="awc": DIGing (Nedić, Olshevsky, Shi, SIAM J. Optim. 2017)
    y⁰ = g⁰

x: a worker's parameters; W: the mixing matrix of a step, the same for x and y; g, g⁺: its gradients at x and x⁺;
y: its estimate of the mean gradient, mean(y) = mean(g) at every step; -η y: the optimizer's update for y.

Why "atc" is the default: a round of pairs removes the pairs' disagreement d from x at once, and the gradients change by
g⁺ - g = -a d (a: the curvature). The other two forms add this change to y unmixed, and it stays in y until the same
pairs meet again. Meanwhile y pushes x back, and momentum pushes it further. "atc" mixes the change over the same link.
Disagreement grows in these ranges (spectral radius of one period, 16 workers of equal curvature, momentum 0.9; in
parentheses without momentum):

    one-peer-exp     "atc": η a > 2 (2)     "semi-atc": η a > 0.065 (1)         "awc": η a > 0.065 (0.5)
    ring             "atc": η a > 2 (2)     "semi-atc": η a > 0.0079 (0.076)    "awc": η a > 0.0079 (0.076)

(The 2 of "atc" without momentum is where the mean diverges. Disagreement grows from 2.1 on, on one-peer-exp never.)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.core import require
from decentfn.topologies import later


class Memory(NamedTuple):
    """Memory of one worker."""

    y: kit.Buckets  # the tracked gradient
    g: kit.Buckets  # this worker's own gradient
    started: Tensor | None  # 0-d bool: a step was taken; only form="atc" needs it
    restart = kit.restarting()


@kit.algorithm
def gradient_tracking(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    form: Literal["atc", "semi-atc", "awc"] = "atc",
    gossip_rounds: int = 1,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Descend along a gossiped estimate of the mean gradient; the optimizer sees y instead of the gradient.

    Step t first completes the last step's `W y`, with the last step's mixing matrix, and then uses y for its update.
    Overlaps: nothing with "atc", the default: y waits for the gradient and x for y, so a step takes as long as both
    messages and the gradient together. With "semi-atc" y overlaps; with "awc" both do.
    The latter two suit static topologies, and others at small learning rates.
    Sent per step: the parameters and the tracker, each once per neighbor (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees y.
        topology: any doubly stochastic schedule.
        form: the equation; with "semi-atc" and "awc" disagreement may grow on time-varying schedules (see the module).
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: an unknown form, or a push-sum topology.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, shows_mix=form == "awc", gossip_rounds=gossip_rounds, **options)
    call, rule = "gradient_tracking", "several rounds cannot overlap; use 'atc'."
    require(form in ("atc", "semi-atc", "awc"), call, "choose 'atc', 'semi-atc' or 'awc'.", form=form)
    require(form == "atc" or gossip_rounds == 1, call, rule, form=form, gossip_rounds=gossip_rounds)

    late = later(1, topology)  # y is completed with the last step's matrix

    def start(x: kit.Buckets) -> Memory:
        # From y = g = 0 the first y is W 0 + g - 0; in the form W (y + g⁺ - g) it would be W g.
        started = torch.zeros((), dtype=torch.bool, device=x[0].device) if form == "atc" else None
        return Memory(kit.zeros_like(x), kit.zeros_like(x), started)

    def atc(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (y, g, started) = state.params, state.memory
        gradient, local = worker.gradient(x, state.local, batch, t)
        g_new = gradient.keep(kit.widen(gradient.grads), g)
        assert started is not None
        y = kit.where(started, worker.mix(kit.add(y, kit.each(torch.sub, g_new, g)), t, late), g_new)
        u, local = worker.update(kit.cast_like(y, x), gradient, local, x)
        return kit.State(
            worker.mix(kit.add(x, u), t), local, Memory(y, g_new, torch.ones_like(started))
        ), gradient.metrics

    def semi_atc(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (y, g, _) = state.params, state.memory
        y_posted = worker.post(y, t, late)
        gradient, local = worker.gradient(x, state.local, batch, t, after=y_posted)
        g_new = gradient.keep(kit.widen(gradient.grads), g)
        y = kit.add(kit.collect(y_posted, after=gradient.grads), kit.each(torch.sub, g_new, g))
        u, local = worker.update(kit.cast_like(y, x), gradient, local, x)
        return kit.State(worker.mix(kit.add(x, u), t), local, Memory(y, g_new, None)), gradient.metrics

    def awc(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (y, g, _) = state.params, state.memory
        y_posted, x_posted = worker.post(y, t, late), worker.post(x, t)
        gradient, local = worker.gradient(x, state.local, batch, t, after=(y_posted, x_posted))
        g_new = gradient.keep(kit.widen(gradient.grads), g)
        y = kit.add(kit.collect(y_posted, after=gradient.grads), kit.each(torch.sub, g_new, g))
        u, local = worker.update(kit.cast_like(y, x), gradient, local, x, posted=x_posted)
        return kit.State(
            kit.add(kit.collect(x_posted, after=gradient.grads), u), local, Memory(y, g_new, None)
        ), gradient.metrics

    return worker.algorithm({"atc": atc, "semi-atc": semi_atc, "awc": awc}[form], start)
