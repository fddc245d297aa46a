"""Mixing tensors with the neighbours of step `t`: `post` starts what travels, `collect` turns it into `W x`.

Between the two nothing may be written over `x`; whatever stands between them overlaps with the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.buckets import Part, Plan, defer, evaluated, wide
from decentfn.gossip import guarding
from decentfn.scalars import moved, once, rounded
from decentfn.topologies import Round, Topology
from decentfn.transforms.mix_aware import MixContext


class Row(NamedTuple):
    """This worker's row of the mixing matrix of one step."""

    weights: Tensor  # [K+1] float64, own weight first
    mean_weight: Tensor | None  # 0-d float64, the weight of the mean over this worker's group
    given: Tensor | None = (
        None  # [K] float64, of a column-stochastic matrix, what this worker's messages weigh where they are heard
    )


class Posted(NamedTuple):
    """What is on its way: the tensors, as they are here and as they travel, and the inboxes for those of the others."""

    own: Sequence[Tensor]  # [D] each
    sent: Sequence[Tensor]  # `own` as it travels
    inboxes: tuple[Tensor, ...]  # for each [K, D]; empty when no messages travel
    means: tuple[Tensor, ...]  # for each [D]; empty when the schedule has no groups
    round: Round
    row: Row
    flags: guarding.Flags | None = None  # in a guarded step, which of the messages are good
    scale: Tensor | None = None  # once the flags are in, of the means


def post(
    x: Sequence[Tensor],
    topology: Topology,
    t: Tensor,
    *,
    wire_dtype: torch.dtype | None = None,
    when: Tensor | None = None,
    own: Sequence[Tensor] | None = None,
    good: Tensor | None = None,
) -> Posted:
    """Start to send `x` to the neighbours that `topology` names for step `t`.

    Args:
        x: vectors, `[D]` each; a message for each.
        topology: the schedule.
        t: 0-d int64 on the CPU.
        wire_dtype: floating vectors wider than this dtype travel rounded to it (half the bytes for bfloat16).
        when: 0-d bool on the CPU, the same on all workers; where it is False nothing travels and `W` is the identity.
        own: the own share, where it is mixed in a wider dtype than `x`.
        good: 0-d bool, whether the message is good, where that cannot be seen from `x`; only a guarded step asks.
    """
    sent = [narrow(tensor, wire_dtype) for tensor in x]
    this = topology.round(t)
    peers, groups = topology.peers, topology.groups
    if when is not None:
        this = _resting_unless(when, this)
    if when is not None or topology.draw is not None:
        peers = torch.stack([this.sources, this.destinations])[None]
        groups = None if this.groups is None else this.groups[None]
    own = x if own is None else own
    if good is not None:
        guarding.note_replaced(~good)
    elif guarding.is_guarded():
        good = guarding.judged(sent)
    inboxes = tuple(collectives.exchange(tensor, peers, t, good=good) for tensor in sent) if topology.degree else ()
    means = () if groups is None else tuple(collectives.group_mean(tensor, groups, t, good=good) for tensor in sent)
    flags = None if good is None else guarding.post_flags(good, peers if topology.degree else None, groups, t)
    return Posted(own, sent, inboxes, means, this, row(topology, this, x[0]), flags)


def row(topology: Topology, this: Round, token: Tensor) -> Row:
    """This worker's row of the mixing matrix of a round of `topology`, on the device of `token` (a tensor of this worker's)."""
    me = None if topology.weighs_alike else collectives.worker_index(token).view(1)

    def own(table: Tensor) -> Tensor:
        table = moved(table, token.device)
        return table[0] if me is None else table.index_select(0, me)[0]

    weights, mean_weight = own(this.weights), None if this.mean_weights is None else own(this.mean_weights)
    given = own(_given(this)) if topology.is_column_stochastic else None
    if not topology.rows_sum_to_one:
        given = (1.0 - weights[0] - (0.0 if mean_weight is None else mean_weight)).view(1)
    return Row(weights, mean_weight, given)


def given(this: Round, token: Tensor) -> Tensor:
    """`[K]` float64, the weights of this worker's messages where they are heard; one more for what goes into a group's mean."""
    me = collectives.worker_index(token).view(1)
    table = _given(this)
    if this.mean_weights is not None:
        table = torch.cat([table, this.mean_weights[:, None]], 1)
    return moved(table, token.device).index_select(0, me)[0]


def _given(this: Round) -> Tensor:
    heard = this.weights[:, 1:].gather(0, this.destinations.clamp(min=0))
    return torch.where(this.destinations < 0, 0.0, heard)


def collect(posted: Posted, gamma: float | Tensor = 1.0) -> list[Tensor]:
    """Wait for what was posted and mix: `(1 - γ) x + γ W x`, each tensor as soon as its own messages are in.

    By differences: `x + γ Σ_j W[i,j] (Q(x_j) - Q(x))`, Q the rounding to a wire dtype. What rounding (of weights, on the wire) takes
    from one worker it gives to others, where workers agree nothing changes, and updates far smaller than Q's resolution are not
    lost. With a column-stochastic W: `x + γ Σ_j (W[i,j] Q(x_j) - W[j,i] Q(x))`. (A mean over a group is rounded once more on its way:
    there the workers' mean is kept to Q's resolution only.)

    Args:
        posted: from `post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return list(evaluated(mixed(posted, gamma)))


def mixed(posted: Posted, gamma: float | Tensor = 1.0) -> list[Part]:
    """`collect`, the arithmetic perhaps put off."""
    posted = heard(posted)
    return [_mixed(posted, index, gamma) for index in range(len(posted.own))]


def difference(posted: Posted, gamma: float | Tensor = 1.0) -> list[Part]:
    """Wait for what was posted and return what mixing adds, perhaps put off: `γ (W - I) Q(x) = γ Σ_j W[i,j] (Q(x_j) - Q(x_i))`.

    In float32 or float64. Two workers get the same difference with opposite signs, so that the mean over workers is 0 to
    a rounding of the differences and not of x: what is added up over many steps must not gather the roundings of x.

    Args:
        posted: from `post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    posted = heard(posted)
    return [_moved(posted, index, gamma) for index in range(len(posted.own))]


def repaired(posted: Posted, x: Sequence[Tensor]) -> list[Tensor]:
    """`x`, or where a guarded step finds this worker's own message bad, the neighbours' mix in its place.

    For what is computed beside the mix, as with `difference`, which is 0 for such a worker.

    Args:
        posted: from `post`.
        x: in the shapes of what was posted.
    """
    if posted.flags is None:
        return list(x)
    good, mixed = posted.flags.own, collect(posted)
    return [torch.where(good, a, m.to(a.dtype)) for a, m in zip(x, mixed, strict=True)]


def heard(posted: Posted) -> Posted:
    """In a guarded step wait for the flags, and give the weights of bad messages to others."""
    if posted.flags is None:
        return posted
    weights, mean_weight, given = posted.row
    found = guarding.hear(posted.flags, posted.round, weights, mean_weight)
    if given is not None:  # what a bad worker does not hear stays here
        given = torch.cat([given, (weights[0] - found.weights[0])[None]])
    return posted._replace(row=Row(found.weights, found.mean_weight, given), scale=found.scale)


def neighbours_sum(posted: Posted, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Wait for what was posted and return the neighbours' share alone: `Σ_{j≠i} W[i,j] Q(x_j)`.

    Where the schedule averages in groups, that average (own share included) is what is returned.

    Args:
        posted: from `post`.
        dtypes: of the sums, at least as wide as what travelled.
    """
    posted, sums = heard(posted), []
    for index, dtype in enumerate(dtypes):
        zeros = torch.zeros_like(posted.sent[index], dtype=wide(dtype))
        arrived = zip(*_arrived(posted, index, 1.0, wide(dtype)), strict=True)
        sums.append(sum((w * x.to(w.dtype) for w, x in arrived), zeros).to(dtype))
    return sums


def mix_context(posted: Posted, plan: Plan) -> MixContext:
    """Wait for what was posted and show it as it is: what an optimizer may ask for beside its gradient.

    Args:
        posted: from `post`.
        plan: what lies in the tensors that were posted.
    """
    posted, token = heard(posted), posted.own[0]
    me = collectives.worker_index(token).view(1)
    members = None
    if posted.round.groups is not None:
        groups = moved(posted.round.groups, token.device)
        members = groups == groups.index_select(0, me)
    return MixContext(
        tuple(collectives.wait(inbox) for inbox in posted.inboxes),
        moved(posted.round.sources, token.device).index_select(0, me)[0],
        posted.row.weights,
        tuple(_mean(posted, index) for index in range(len(posted.means))),
        members,
        posted.row.mean_weight,
        plan,
    )


def mean(
    x: Sequence[Tensor],
    everyone: Topology,
    t: Tensor,
    *,
    wire_dtype: torch.dtype | None = None,
    when: Tensor | None = None,
) -> list[Tensor]:
    """The mean of Q(x) over all workers, bit for bit the same on each; `everyone` is the complete topology.

    Where `when` (0-d bool) is False nothing travels and the result is Q(x).
    """
    total = collect(post([narrow(tensor, wire_dtype) for tensor in x], everyone, t, when=when))
    return [m.to(tensor.dtype) for m, tensor in zip(total, x, strict=True)]


def narrow(x: Tensor, wire_dtype: torch.dtype | None) -> Tensor:
    """`x` rounded to the wire's dtype where that is narrower; `x` itself without one."""
    return rounded(x, wire_dtype) if wire_dtype is not None and x.dtype.itemsize > wire_dtype.itemsize else x


def _resting_unless(when: Tensor, this: Round) -> Round:
    """The round itself when `when` holds; else one in which everybody keeps what they have and nothing is posted."""
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


def _arrived(
    posted: Posted, index: int, gamma: float | Tensor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Wait for one tensor's inbox: the weights, in this dtype, and the messages; the last may be the group's mean."""
    weights, messages = [], []
    gamma = _own_gamma(posted, gamma)
    if posted.inboxes:
        inbox = collectives.wait(posted.inboxes[index])
        its_weights = once((posted.row.weights * gamma).to(dtype))
        weights += [its_weights[1 + slot] for slot in range(inbox.shape[0])]
        messages += [inbox[slot] for slot in range(inbox.shape[0])]
    if posted.means and posted.row.mean_weight is not None:
        weights.append(once((posted.row.mean_weight * gamma).to(dtype)))
        messages.append(_mean(posted, index))
    return weights, messages


def _mean(posted: Posted, index: int) -> Tensor:
    """A group's mean; in a guarded step that of its good members."""
    mean = collectives.wait(posted.means[index])
    if posted.scale is None:
        return mean
    dtype = wide(mean.dtype)
    return (mean.to(dtype) * posted.scale.to(dtype)).to(mean.dtype)


def _own_gamma(posted: Posted, gamma: float | Tensor) -> float | Tensor:
    """A worker whose own message is bad takes all of the mix."""
    if posted.flags is None:
        return gamma
    one = torch.ones_like(posted.row.weights[0])
    return torch.where(posted.flags.own, one * gamma, one)


def _mixed(posted: Posted, index: int, gamma: float | Tensor) -> Part:
    own, sent = posted.own[index], posted.sent[index]
    dtype = wide(own.dtype)  # sixteen-bit values are mixed in float32; weights are exact to 1e-12
    good, gamma = None if posted.flags is None else posted.flags.own, _own_gamma(posted, gamma)
    weights, messages = _arrived(posted, index, gamma, dtype)
    given = None if posted.row.given is None else once((posted.row.given * gamma).to(dtype))
    in_place_of_bad = posted.row.weights[0]  # 0, or NaN where nothing good was heard
    averages = bool(posted.means) and posted.row.mean_weight is not None
    is_narrow = sent is not own

    def mix(own: Tensor, sent: Tensor, *messages: Tensor) -> Tensor:
        x, sent = own.to(dtype), sent.to(dtype)
        if good is not None:
            x, sent = (torch.where(good, values, in_place_of_bad.to(dtype)) for values in (x, sent))
        pairs = [(weight, message.to(dtype)) for weight, message in zip(weights, messages, strict=True)]
        if averages and not is_narrow:
            weight, mean = pairs.pop()
            x = mean + (1.0 - weight) * (x - mean)  # with weight 1 the mean itself, the same on all workers
        if given is None:
            terms = [weight * (message - sent) for weight, message in pairs]
        else:
            terms = [weight * message for weight, message in pairs] + [-weight * sent for weight in given.unbind()]
        return (x + sum(terms[1:], terms[0]) if terms else x).to(own.dtype)

    return defer(mix, own, sent, *messages)


def _moved(posted: Posted, index: int, gamma: float | Tensor) -> Part:
    dtype = wide(posted.own[index].dtype)
    weights, messages = _arrived(posted, index, gamma, dtype)
    good = None if posted.flags is None else posted.flags.own

    def moved(sent: Tensor, *messages: Tensor) -> Tensor:
        sent = sent.to(dtype)
        terms = [weight * (x.to(dtype) - sent) for weight, x in zip(weights, messages, strict=True)]
        total = sum(terms, torch.zeros_like(sent))
        return total if good is None else torch.where(good, total, torch.zeros_like(total))

    return defer(moved, posted.sent[index], *messages)
