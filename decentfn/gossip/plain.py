"""Mixing buckets with the neighbours of step t: `post` starts what travels, `collect` turns it into `W x`.

Between the two nothing may be written over `x`; whatever stands between them overlaps with the communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.buckets import Buckets, each, wide
from decentfn.scalars import once, rounded
from decentfn.topologies import Round, Topology
from decentfn.transforms.mix_aware import MixContext


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


def post(
    x: Buckets, topology: Topology, t: Tensor, *, wire_dtype: torch.dtype | None = None, when: Tensor | None = None
) -> Posted:
    """Start to send `x` to the neighbours that `topology` names for step `t`.

    Args:
        x: buckets, `[D]` each.
        topology: the schedule.
        t: 0-d int64 on the CPU.
        wire_dtype: floating buckets wider than this dtype travel rounded to it (half the bytes for bfloat16).
        when: 0-d bool on the CPU, the same on all workers; where it is False nothing travels and `W` is the identity.
    """
    sent = narrow(x, wire_dtype)
    this = topology.round(t)
    peers, groups = topology.peers, topology.groups
    if when is not None:
        this = _resting_unless(when, this)
    if when is not None or topology.draw is not None:
        peers = torch.stack([this.sources, this.destinations])[None]
        groups = None if this.groups is None else this.groups[None]
    inboxes = tuple(collectives.exchange(bucket, peers, t) for bucket in sent) if topology.degree else ()
    means = () if groups is None else tuple(collectives.group_mean(bucket, groups, t) for bucket in sent)
    return Posted(x, sent, inboxes, means, row(this, x[0]))


def row(this: Round, token: Tensor) -> Row:
    """This worker's row of one round's mixing matrix, on the device of `token` (one of its buckets)."""
    me = collectives.worker_index(token).view(1)
    weights = this.weights.to(token.device).index_select(0, me)[0]
    mean_weight = this.mean_weights
    if mean_weight is not None:
        mean_weight = mean_weight.to(token.device).index_select(0, me)[0]
    return Row(weights, mean_weight)


def collect(posted: Posted, gamma: float | Tensor = 1.0) -> Buckets:
    """Wait for what was posted and mix: `(1 - γ) x + γ W x`, each bucket as soon as its own messages are in.

    With a wire dtype Q: `x + γ (Σ_j W[i,j] Q(x_j) - (1 - W[i,i]) Q(x))`, so that what the rounding takes from one
    worker it gives back, and updates far smaller than Q's resolution are not lost. (A mean over a group is rounded once
    more on its way: there the workers' mean is kept to Q's resolution only.)

    Args:
        posted: from `post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return Buckets([_mix(posted, index, gamma) for index in range(len(posted.own))], posted.own.plan)


def difference(posted: Posted, gamma: float | Tensor = 1.0) -> Buckets:
    """Wait for what was posted and return what mixing adds: `γ (W - I) Q(x) = γ Σ_j W[i,j] (Q(x_j) - Q(x_i))`.

    In float32 or float64. Two workers get the same difference with opposite signs, so that the mean over workers is 0 to
    a rounding of the differences and not of x: what is added up over many steps must not gather the roundings of x.

    Args:
        posted: from `post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return Buckets([_difference(posted, index, gamma) for index in range(len(posted.own))], posted.own.plan)


def heard(posted: Posted, like: Buckets) -> Buckets:
    """Wait for what was posted and return what was heard, without the own share: `Σ_{j≠i} W[i,j] Q(x_j)`.

    Where the schedule averages in groups, that average (own share included) is what is heard.

    Args:
        posted: from `post`.
        like: buckets of the posted ones' sizes, in whose dtypes the sum is returned.
    """
    silence = each(torch.zeros_like, like)
    return collect(posted._replace(own=silence, sent=silence))


def mix_context(posted: Posted, topology: Topology, t: Tensor) -> MixContext:
    """Wait for what was posted and show it as it is: what an optimizer may ask for beside its gradient.

    Args:
        posted: from `post`, of step `t`.
        topology: the schedule that it was posted with.
        t: 0-d int64 on the CPU.
    """
    this, token = topology.round(t), posted.own[0]
    me = collectives.worker_index(token).view(1)
    members = None
    if this.groups is not None:
        groups = this.groups.to(token.device)
        members = groups == groups.index_select(0, me)
    return MixContext(
        tuple(collectives.wait(inbox) for inbox in posted.inboxes),
        this.sources.to(token.device).index_select(0, me)[0],
        posted.row.weights,
        tuple(collectives.wait(bucket) for bucket in posted.means),
        members,
        posted.row.mean_weight,
        posted.own.plan,
    )


def mean(
    x: Buckets,
    everyone: Topology,
    t: Tensor,
    *,
    wire_dtype: torch.dtype | None = None,
    when: Tensor | None = None,
) -> Buckets:
    """The mean of Q(x) over all workers, bit for bit the same on each; `everyone` is the complete topology.

    Where `when` (0-d bool) is False nothing travels and the result is Q(x).
    """
    total = collect(post(narrow(x, wire_dtype), everyone, t, when=when))
    return Buckets([m.to(bucket.dtype) for m, bucket in zip(total, x, strict=True)], x.plan)


def narrow(x: Buckets, wire_dtype: torch.dtype | None) -> Buckets:
    """`x` rounded to the wire's dtype where that is narrower; `x` itself without one."""
    if wire_dtype is None:
        return x
    narrower = [rounded(b, wire_dtype) if b.dtype.itemsize > wire_dtype.itemsize else b for b in x]
    return Buckets(narrower, x.plan)


def _resting_unless(when: Tensor, this: Round) -> Round:
    """The round itself when `when` holds; else one in which everybody keeps what they have and nobody speaks."""
    nobody = torch.full_like(this.sources, -1)
    keep = torch.zeros_like(this.weights)
    keep[:, 0] = 1.0
    groups, mean_weights = this.groups, this.mean_weights
    return Round(
        torch.where(when, this.sources, nobody),
        torch.where(when, this.destinations, nobody),
        torch.where(when, this.weights, keep),
        None if groups is None else torch.where(when, groups, torch.arange(groups.shape[0])),
        None if mean_weights is None else torch.where(when, mean_weights, torch.zeros_like(mean_weights)),
    )


def _mix(posted: Posted, index: int, gamma: float | Tensor) -> Tensor:
    own, sent = posted.own[index], posted.sent[index]
    # Weights are exact to 1e-12; sixteen-bit buckets are mixed in float32.
    dtype = wide(own.dtype)
    weights = once((posted.row.weights * gamma).to(dtype))
    kept = once((posted.row.weights[0] * gamma + (1.0 - gamma)).to(dtype))
    heard = torch.zeros((), dtype=dtype)
    if posted.inboxes:
        inbox = collectives.wait(posted.inboxes[index]).to(dtype)
        terms = [weights[1 + slot] * inbox[slot] for slot in range(inbox.shape[0])]
        heard = sum(terms[1:], terms[0])
    if posted.means and posted.row.mean_weight is not None:
        mean = collectives.wait(posted.means[index]).to(dtype)
        heard = heard + once((posted.row.mean_weight * gamma).to(dtype)) * mean
    if sent is own:
        return (kept * own.to(dtype) + heard).to(own.dtype)
    return (own.to(dtype) + (heard - (1.0 - kept) * sent.to(dtype))).to(own.dtype)


def _difference(posted: Posted, index: int, gamma: float | Tensor) -> Tensor:
    dtype = wide(posted.own[index].dtype)
    sent = posted.sent[index].to(dtype)
    weights = once((posted.row.weights * gamma).to(dtype))
    total = torch.zeros_like(sent)
    if posted.inboxes:
        inbox = collectives.wait(posted.inboxes[index]).to(dtype)
        total = sum((weights[1 + slot] * (inbox[slot] - sent) for slot in range(inbox.shape[0])), total)
    if posted.means and posted.row.mean_weight is not None:
        mean = collectives.wait(posted.means[index]).to(dtype)
        total = total + once((posted.row.mean_weight * gamma).to(dtype)) * (mean - sent)
    return total
