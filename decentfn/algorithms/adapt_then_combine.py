"""Adapt then combine (ATC): diffusion.

    x⁺ = W (x + u(x, g(x)))                     (Sayed, Foundations and Trends in ML 2014)
    x⁺ = W (w (x + u(x, g(x)))) / (W w)         with weights, as in push-sum

x: a worker's parameters; W: the mixing matrix of step t; g(x): its gradient; u: the optimizer's update; w: a worker's
weight since it mixed last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import no_weight
from decentfn.comm import collectives


class Memory(NamedTuple):
    """Memory of one worker, if workers have weights."""

    weight: Tensor  # 0-d: this worker's since it mixed last
    averaged = ("weight",)  # over the workers, by df.resize
    restart = kit.restarting()


@kit.algorithm
def adapt_then_combine(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    gossip_rounds: int = 1,
    weight: Callable[[kit.PyTree], Tensor] | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Update, then mix the updated parameters.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation. In return,
    every neighbor's gradient enters the next step's parameters. Local SGD (periodic averaging) is this algorithm on
    `every(H, complete)`; Gossip-PGA is this algorithm on `pga(H, topology)`.
    Sent per step: the parameters, once per neighbor (or one all-reduce within the group) and gossip round; with `weight`
    one number more, and 16-bit parameters in float32.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: the schedule of mixing matrices.
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        weight: function from the loss's aux to this worker's weight of a step, one number >= 0, such as
            `lambda aux: aux["tokens"]`, summed until the worker mixes: a group's mean is then weighted by tokens, and
            gossip keeps the mean weighted by `W w`. 0 leaves the worker out, which takes its neighbors' mean. None: all
            weights are equal.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a push-sum topology; `weight` together with `wire_dtype` or several gossip rounds.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, gossip_rounds=gossip_rounds, **options)
    weigh = kit.as_weight("adapt_then_combine", weight)
    if weigh is not None and (worker.wire_dtype is not None or gossip_rounds > 1):
        raise ValueError(
            f"adapt_then_combine(weight=..., wire_dtype={worker.wire_dtype}, gossip_rounds={gossip_rounds}): products w x "
            "are sent and divided by W w, so a rounded wire would move parameters that agree, and fast gossip could "
            "divide by 0; leave both out, or the weight."
        )

    def mix(y: kit.Buckets, w: Tensor, t: Tensor) -> tuple[kit.Buckets, Memory]:
        mixed, total = kit.unpack(worker.mix(kit.pack(kit.scale(kit.widen(y), w), w), t), y.plan)
        has_mixed = meets_others(collectives.look_up(y[0], topology, t)) & (total != 0)
        x = kit.cast_like(kit.divide(mixed, torch.where(total != 0, total, torch.ones_like(total))), y)
        return kit.where(has_mixed, kit.with_own(x, y), y), Memory(torch.where(has_mixed, torch.zeros_like(w), w))

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x = state.params
        g, local = worker.gradient(x, state.local, batch, t, weight=weigh)
        u, local = worker.update(g.grads, g, local, x)
        if g.weight is None:
            return kit.State(worker.mix(kit.add(x, u), t), local), g.metrics
        w = state.memory.weight
        x, memory = mix(kit.add(x, u), w + g.weight.to(w.dtype), t)
        return kit.State(x, local, memory), g.metrics

    return worker.algorithm(step, None if weigh is None else lambda x: Memory(no_weight(x)))


def meets_others(row: collectives.Row) -> Tensor:
    """Return True (0-d bool) if this worker mixes with another one in this round."""
    has_met = ((row.sources >= 0) & (row.sources != row.worker)).any()
    if row.mean_weight is not None:
        has_met = has_met | ((row.group_size > 1) & (row.mean_weight > 0))
    return row.is_active & has_met
