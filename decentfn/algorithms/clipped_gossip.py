"""ClippedGossip: mixing that limits what any neighbor can do (He, Karimireddy, Jaggi, 2022; arXiv:2202.01545).

    y = x + u(x, g(x))
    x⁺ = y + Σ_j W[i,j] clip(y_j - y, τ),     clip(z, τ) = min(1, τ / ‖z‖) z
    τ² = Σ_near W[i,j] ‖y_j - y‖² / Σ_far W[i,j]

x: a worker's parameters; g: its gradient; u: the optimizer's update; y: the updated parameters, which are sent; W: the
mixing matrix; ‖·‖: the norm over the whole model; τ: the radius, given or computed by each worker for itself, where far
are the b neighbors with the largest distances, and near are the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm.gossip.compressed import as_messages
from decentfn.optim.transforms import MixContext


@kit.algorithm
def clipped_gossip(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    tau: float | Callable[[Tensor], Tensor] | None = None,
    hostile: int = 1,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Update, then mix the updated parameters with every difference to a neighbor clipped.

    Whatever a worker sends moves a neighbor by at most W[i,j] τ; a message with infinite or NaN values moves nothing.
    The mean over the workers is not preserved: workers clip differently. With one neighbor, or data that differ much,
    honest workers are clipped, too. With a τ that nothing reaches it is `adapt_then_combine`.
    Nothing overlaps. Sent per step: the parameters, once per neighbor (to everyone else on a topology of groups).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; the paper uses momentum.
        topology: the schedule of mixing matrices, doubly stochastic.
        tau: τ > 0, or a function of t (0-d int64 tensor); None computes it from the distances.
        hostile: b >= 1, the neighbors of a worker that may be hostile; used without `tau`. A worker with b neighbors or
            fewer then keeps its own parameters.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: τ not positive, b < 1, a push-sum topology, or one without tables that averages in groups.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("clipped_gossip", hostile=hostile)
    if tau is not None:
        kit.require_rate("clipped_gossip", tau=tau)
    neighbors = as_messages(topology)
    bound = None if tau is None else kit.as_input("clipped_gossip", "tau", tau)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x = state.params
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        y = kit.add(x, u)
        posted = worker.post(y, t, neighbors)
        mix = kit.mix_context(posted)
        if not mix.inboxes:
            return kit.State(y, local), g.metrics
        differences = _differences(posted, mix)
        # In float64: a norm scales buckets of all dtypes.
        distances = torch.stack([kit.global_norm(kit.each(Tensor.double, z)) for z in differences])
        weights = mix.weights[1:]
        radius = _radius(distances, weights, hostile) if bound is None else kit.at(bound, t, y)
        shares = weights * torch.where(distances > radius, radius / distances, 1.0)
        shares = kit.once(torch.where(torch.isfinite(distances), shares, 0.0))
        for share, z in zip(shares.unbind(), differences, strict=True):
            y = kit.each(functools.partial(_moved, share), y, z)
        return kit.State(kit.repaired(posted, y), local), g.metrics

    return worker.algorithm(step)


def _differences(posted: kit.Posted, mix: MixContext) -> list[kit.Buckets]:
    """Return `y_j - y` for each slot, in float32 or wider."""
    pairs = [
        (inbox.to(kit.wide(y.dtype)), y.to(kit.wide(y.dtype)))
        for inbox, y in zip(mix.inboxes, posted.sent, strict=True)
    ]
    return [kit.Buckets([inbox[k] - y for inbox, y in pairs], mix.plan) for k in range(mix.inboxes[0].shape[0])]


def _radius(distances: Tensor, weights: Tensor, hostile: int) -> Tensor:
    """Return τ from the distances `[K]` of the neighbors; weight 0 marks an idle slot."""
    far = torch.where(weights > 0, distances.nan_to_num(nan=torch.inf), -1.0).argsort(descending=True)[:hostile]
    are_far = torch.zeros_like(weights).scatter(0, far, torch.ones_like(weights[: len(far)])) > 0
    near = torch.where(are_far | (weights == 0), 0.0, weights * distances**2).sum()
    return torch.sqrt(near / torch.where(are_far, weights, 0.0).sum().clamp(min=1e-12))


def _moved(share: Tensor, y: Tensor, z: Tensor) -> Tensor:
    step = torch.where(share > 0, z, 0.0)  # 0 times NaN would be NaN
    return (y.to(z.dtype) + share.to(z.dtype) * step).to(y.dtype)
