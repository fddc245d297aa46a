"""Gossip with compressed messages: `post_compressed` sends the compressor's bytes and nothing else.

Every worker decodes every message in its inbox and its own message, so it knows what the others received.
A schedule that averages in groups sends messages here instead (`as_messages`), because bytes cannot be averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.gossip.guarding import are_finite
from decentfn.comm.gossip.plain import Posted, coarse, inbox_of, own_gamma, post, with_flags
from decentfn.compressors import Compressor, Key, identity
from decentfn.core import context, once, rounded
from decentfn.core.buckets import BucketPlan, Buckets, add, each, loose, wide
from decentfn.topologies import Topology, complete, from_permutations
from decentfn.topologies.combine import combination
from decentfn.topologies.rounds import noted


class Compressed(NamedTuple):
    """In-flight compressed buckets: the messages, and the decoded value of this worker's own."""

    sent: Buckets  # C(x) of this worker, in float32 or wider
    posted: Posted  # per bucket [B] uint8
    compressor: Compressor


def post_compressed(x: Buckets, compressor: Compressor, topology: Topology, t: Tensor) -> Compressed:
    """Compress `x`, rounded to the parameters' dtypes, and start to send it: one message per bucket and neighbor."""
    row = collectives.look_up(x[0], topology, t)
    pairs = [(b.to(plan.dtype), plan) for b, plan in zip(x, x.plan.buckets, strict=True)]
    # Stored; otherwise the sent and the decoded values would be computed separately and might be rounded differently.
    messages = tuple(
        once(_of(compressor, plan).compress(b, plan, Key(t, row.worker, index)))
        for index, (b, plan) in enumerate(pairs)
    )
    good = None
    if context.guarded:
        # A message of zeros stands for zeros.
        decoded = [_decoded(compressor, m, plan) for m, plan in zip(messages, x.plan.buckets, strict=True)]
        good = are_finite([*(b for b, _ in pairs), *decoded])
        messages = tuple(once(torch.where(good, m, torch.zeros_like(m))) for m in messages)
    posted = post(loose(messages, x.plan.buckets), row, good=good)
    sent = [_decoded(compressor, m, plan) for m, plan in zip(messages, x.plan.buckets, strict=True)]
    return Compressed(Buckets(sent, x.plan), posted, compressor)


def difference_compressed(
    compressed: Compressed, gamma: float | Tensor = 1.0, *, after: Iterable[Tensor] = ()
) -> Buckets:
    """Wait for the messages and return the mixing term `γ (W - I) C(x) = γ Σ_j W[i,j] (C(x_j) - C(x))`, wide.

    Its mean over workers is 0 up to rounding of the differences. `after` is as for `collect`.
    """
    pulls, posted = [], with_flags(compressed.posted, after)
    weights = posted.row.weights * own_gamma(posted, gamma)
    for index, (own, plan) in enumerate(zip(compressed.sent, compressed.sent.plan.buckets, strict=True)):
        pull = weights[0].to(own.dtype) * torch.zeros_like(own)  # 0, or NaN where a bad worker hears nothing good
        if posted.messages:
            inbox = inbox_of(posted, index)
            for slot in range(inbox.shape[0]):
                term = weights[1 + slot].to(own.dtype) * (_decoded(compressed.compressor, inbox[slot], plan) - own)
                pull = pull + coarse(posted, term)
        pulls.append(pull)
    return Buckets(pulls, compressed.sent.plan)


def running_sum(pull: Buckets, compressed: Compressed, *, after: Iterable[Tensor] = ()) -> Buckets:
    """Wait for the messages and return `pull + (W - I) C(x)` in float64, the dtype of `pull`.

    A sum repeats each error in every later step; two terms of float64 are opposite to its resolution.
    """
    wide_sent = each(torch.Tensor.double, compressed.sent)
    return add(pull, difference_compressed(compressed._replace(sent=wide_sent), after=after))


def no_sum(x: Buckets) -> Buckets:
    """Return zeros in the shapes of `x`, float64: a `running_sum` to begin with."""
    return each(lambda b: torch.zeros_like(b, dtype=torch.float64), x)


def sum_compressed(compressed: Compressed) -> Buckets:
    """Wait for messages on `all_to_all`, and return `Σ_j C(x_j)` in the order of the workers: equal on all."""
    posted = compressed.posted
    if not posted.messages:
        return compressed.sent
    order = torch.cat([posted.row.worker.view(1), posted.row.sources]).argsort()
    totals = []
    for index, (message, plan) in enumerate(zip(posted.own, compressed.sent.plan.buckets, strict=True)):
        everything = torch.cat([message[None], inbox_of(posted, index)]).index_select(0, order)
        total = torch.zeros(plan.numel, dtype=wide(plan.dtype), device=message.device)
        for worker in range(everything.shape[0]):
            total = total + _decoded(compressed.compressor, everything[worker], plan)
        totals.append(total)
    return Buckets(totals, compressed.sent.plan)


def _of(compressor: Compressor, plan: BucketPlan) -> Compressor:
    """Return the compressor of a bucket; what is not sent is not compressed."""
    return compressor if plan.is_shared else identity()


def _decoded(compressor: Compressor, message: Tensor, plan: BucketPlan) -> Tensor:
    """Decode a message, in float32 or wider; rounded to the bucket's dtype if that is narrower."""
    x, dtype = _of(compressor, plan).decompress(message, plan), wide(plan.dtype)
    return x if x.dtype == dtype else rounded(x.to(dtype), plan.dtype).to(dtype)


def all_to_all(num_workers: int) -> Topology:
    """Topology in which every worker sends to every other in one step: N - 1 messages each."""
    return noted(as_messages(complete(num_workers)), family=all_to_all)


@combination
def as_messages(topology: Topology) -> Topology:
    """Replace averages within groups by messages, with the same mixing matrices; a group of r needs r - 1 slots."""
    if topology.groups is None or topology.mean_weights is None:
        return topology
    if topology.draw is not None:
        raise ValueError(
            f"{topology.name!r} averages in groups and has no tables (random, too long, or with a start), but compressed messages "
            "cannot be averaged on their way; use a topology whose rounds are messages, such as 'random-matching' or "
            "'static-exp'."
        )
    period, n = topology.groups.shape
    slots = max(int(row.bincount().max()) for row in topology.groups) - 1
    sources = torch.arange(n)[None, :, None].repeat(period, 1, 1 + slots)
    weights = torch.zeros(period, n, 1 + slots, dtype=torch.float64)
    for p in range(period):
        for group in topology.groups[p].unique():
            members = (topology.groups[p] == group).nonzero()[:, 0]
            share = topology.mean_weights[p, members] / len(members)
            for slot in range(len(members)):  # slot 0 is the worker's own
                sources[p, members, slot] = members.roll(slot)
                weights[p, members, slot] = share
    weights[..., 0] += topology.weights[..., 0]
    return from_permutations(
        topology.name,
        torch.cat([topology.sources, sources[..., 1:]], -1),
        torch.cat([weights[..., :1], topology.weights[..., 1:], weights[..., 1:]], -1),
        needs_push_sum=topology.needs_push_sum,
    )
