"""Mixing buckets with the neighbours of step t: `post` starts what travels, `collect` turns it into `W x`.

Between the two nothing may be written over `x`; whatever stands between them overlaps with the communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.buckets import Buckets
from decentfn.topologies import Topology


class Row(NamedTuple):
    """This worker's row of the mixing matrix of one step."""

    weights: Tensor  # [K+1] float64, own weight first
    mean_weight: Tensor | None  # 0-d float64, the weight of the mean over this worker's group


class Posted(NamedTuple):
    """What is on its way: the buckets, as they are here and as they travel, and what will be heard of the others."""

    own: Buckets
    sent: Buckets  # `own` in the wire's dtype
    inboxes: tuple[Tensor, ...]  # per bucket [K, D]; empty when no messages travel
    means: tuple[Tensor, ...]  # per bucket [D]; empty when the schedule has no groups
    row: Row


def post(x: Buckets, topology: Topology, t: Tensor, *, wire_dtype: torch.dtype | None = None) -> Posted:
    """Start to send `x` to the neighbours that `topology` names for step `t`.

    Args:
        x: buckets, `[D]` each.
        topology: the schedule.
        t: 0-d int64 on the CPU.
        wire_dtype: floating buckets wider than this dtype travel rounded to it (half the bytes for bfloat16).
    """
    sent = narrow(x, wire_dtype)
    this = topology.round(t)
    peers, phase = topology.peers, t
    if topology.draw is not None:
        peers, phase = torch.stack([this.sources, this.destinations])[None], torch.zeros_like(t)
    inboxes = tuple(collectives.exchange(bucket, peers, phase) for bucket in sent) if topology.degree else ()
    groups = topology.groups
    means = () if groups is None else tuple(collectives.group_mean(bucket, groups, t) for bucket in sent)
    me = collectives.worker_index(x[0]).view(1)
    weights = this.weights.to(x[0].device).index_select(0, me)[0]
    mean_weight = this.mean_weights
    if mean_weight is not None:
        mean_weight = mean_weight.to(x[0].device).index_select(0, me)[0]
    return Posted(x, sent, inboxes, means, Row(weights, mean_weight))


def collect(posted: Posted, gamma: float | Tensor = 1.0) -> Buckets:
    """Wait for what was posted and mix: `(1 - γ) x + γ W x`, each bucket as soon as its own messages are in.

    With a wire dtype Q: `x + γ (Σ_j W[i,j] Q(x_j) - (1 - W[i,i]) Q(x))`, so that what the rounding takes from one
    worker it gives back, and updates far smaller than Q's resolution are not lost.

    Args:
        posted: from `post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return Buckets([_mix(posted, index, gamma) for index in range(len(posted.own))], posted.own.plan)


def mean(x: Buckets, everyone: Topology, t: Tensor, *, wire_dtype: torch.dtype | None = None) -> Buckets:
    """The mean of Q(x) over all workers, bit for bit the same on each; `everyone` is the complete topology."""
    total = collect(post(narrow(x, wire_dtype), everyone, t))
    return Buckets([m.to(bucket.dtype) for m, bucket in zip(total, x, strict=True)], x.plan)


def narrow(x: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """`x` rounded to the wire's dtype where that is narrower; `x` itself without one."""
    if wire_dtype is None:
        return x
    narrower = [b.to(wire_dtype) if b.dtype.itemsize > wire_dtype.itemsize else b for b in x]
    return Buckets(narrower, x.plan)


def _mix(posted: Posted, index: int, gamma: float | Tensor) -> Tensor:
    own, sent = posted.own[index], posted.sent[index]
    # Weights are exact to 1e-12; sixteen-bit buckets are mixed in float32.
    dtype = torch.promote_types(own.dtype, torch.float32)
    weights = posted.row.weights * gamma
    heard = torch.zeros((), dtype=dtype)
    if posted.inboxes:
        inbox = collectives.wait(posted.inboxes[index]).to(dtype)
        terms = [weights[1 + slot].to(dtype) * inbox[slot] for slot in range(inbox.shape[0])]
        heard = sum(terms[1:], terms[0])
    if posted.means and posted.row.mean_weight is not None:
        mean = collectives.wait(posted.means[index]).to(dtype)
        heard = heard + (posted.row.mean_weight * gamma).to(dtype) * mean
    kept = weights[0] + (1.0 - gamma)
    if sent is own:
        return (kept.to(dtype) * own.to(dtype) + heard).to(own.dtype)
    return (own.to(dtype) + (heard - (1.0 - kept).to(dtype) * sent.to(dtype))).to(own.dtype)
