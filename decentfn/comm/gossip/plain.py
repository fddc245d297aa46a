"""Mixing of buckets with the neighbors of step `t`: `post` starts the messages, `collect` turns them into `W x`.

Do not overwrite `x` between the two; the code between them overlaps with the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.gossip import guarding
from decentfn.core import context, rounded
from decentfn.core.buckets import Buckets, cast_like, is_finite, known_finite, where, wide
from decentfn.optim.transforms import MixContext
from decentfn.topologies import Topology
from decentfn.torch_private import functorch


class Posted(NamedTuple):
    """In-flight buckets: as stored, as sent, and the flights of their messages and means.

    `row.worker` is the number of the worker that posted them (0-d int64), `row.t` the step.
    """

    own: Buckets  # [D] each, or [K, D] with a separate message for each slot
    sent: Sequence[Tensor]  # `own` as sent
    messages: tuple[collectives.Flight | None, ...]  # empty if no messages are sent; None for what is not shared
    means: tuple[collectives.Flight | None, ...]  # empty when the schedule has no groups; likewise
    row: collectives.Row
    landed: dict[Any, Any]  # arrived messages: nothing is waited for twice
    flags: guarding.Flags | None = None  # in a guarded step, the flags of good messages
    scale: Tensor | None = None  # factor of the means, known once the flags have arrived
    after: tuple[Tensor, ...] = ()  # tensors that compiled code computes before it waits

    @property
    def numbers(self) -> list[Tensor]:
        """Numbers of the flights; compiled code with these as arguments runs after this post (`Worker.gradient`)."""
        return [flight.number for flight in (*self.messages, *self.means) if flight is not None]

    @property
    def is_active(self) -> Tensor:
        """False (0-d bool) if the schedule rests in this round."""
        return self.row.is_active


def post(
    x: Buckets, row: collectives.Row, *, wire_dtype: torch.dtype | None = None, good: Tensor | None = None
) -> Posted:
    """Start to send `x` to the neighbors of a round; an algorithm calls it as `Worker.post`.

    One message for each bucket and neighbor; with `[K, D]`, one for each slot's listener (see `arrived`). Values wider
    than the plan's dtypes, or than `wire_dtype`, are sent rounded; buckets that are not shared are not sent. In a
    guarded step, `good` (0-d bool) tells if the message is good, if `x` does not show it.
    """
    plans = x.plan.buckets
    pairs = zip(x.tensors, plans, strict=True)
    sent = [narrow(b, plan.dtype, wire_dtype if plan.is_shared else None) for b, plan in pairs]
    if collectives.rests(row.topology) and x.tensors[0].dim() == 1 and not context.guarded:
        return Posted(x, sent, (), (), row, {})
    if good is not None:
        context.guarded[-1].messages.append(good)
    elif context.guarded:
        good = guarding.judged(sent)
    messages = means = ()
    told = sent
    for lie in context.hostile:
        told = [lie(b, row.worker, row.t) for b in told]

    def flights(operator: Callable[..., collectives.Flight]) -> tuple[collectives.Flight | None, ...]:
        pairs = zip(reversed(told), reversed(plans), strict=True)  # the last bucket's gradient is ready first
        return tuple([operator(b, row, good=good) if plan.is_shared else None for b, plan in pairs][::-1])

    if row.topology.degree or x.tensors[0].dim() == 2:
        messages = flights(collectives.exchange)
    if row.topology.has_groups:
        means = flights(collectives.group_mean)
    flags = None if good is None else guarding.post_flags(good, row)
    return Posted(x, sent, messages, means, row, {}, flags)


def is_active(topology: Topology, t: Tensor, like: Buckets) -> Tensor:
    """Return True (0-d bool on the device of `like`) if `topology` has a round in step t, False if it rests."""
    return collectives.look_up(like[0], topology, t).is_active


def collect(posted: Posted, gamma: float | Tensor = 1.0, *, after: Iterable[Tensor] = ()) -> Buckets:
    """Wait for the messages and mix: `(1 - γ) x + γ W x`, each bucket as soon as its own messages have arrived.

    Computed by differences: `x + γ Σ_j W[i,j] (Q(x_j) - Q(x))`, where Q rounds to the wire dtype. Rounding (of weights,
    on the wire) gives to other workers what it takes from one; nothing changes if workers agree; updates far smaller
    than Q's resolution are not lost. With a column-stochastic W: `x + γ Σ_j (W[i,j] Q(x_j) - W[j,i] Q(x))`. (A group's
    mean is summed in the wire's dtype, rounded at each hop, so the workers' mean is kept only to some of Q's steps.)

    Args:
        posted: from `Worker.post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
        after: tensors that compiled code computes before it waits: the gradient, which then hides the communication.
    """
    posted, gamma = with_flags(posted, after), own_gamma(posted, gamma)
    mixed = [_mixed(posted, index, gamma) for index in reversed(range(len(posted.sent)))]  # as they were posted
    return Buckets(mixed[::-1], posted.own.plan)


def difference(
    posted: Posted, gamma: float | Tensor = 1.0, *, after: Iterable[Tensor] = (), exact: bool = False
) -> Buckets:
    """Wait for the messages and return the mixing term `γ (W - I) Q(x) = γ Σ_j W[i,j] (Q(x_j) - Q(x_i))`.

    In float32 or float64. Two workers get the same difference with opposite signs, so the mean over workers is 0 up to
    rounding of the differences, not of x. A sum over many steps must not accumulate the rounding of x: add this, not
    `W x - x`. If `exact`, a term of two workers that hear each other keeps eight bits, none below the resolution of the
    two values, so that sums of them are exact. Other arguments as for `collect`.
    """
    posted, gamma = with_flags(posted, after), own_gamma(posted, gamma)
    moved = [_moved(posted, index, gamma, exact) for index in reversed(range(len(posted.sent)))]  # as they were posted
    return Buckets(moved[::-1], posted.own.plan)


def repaired(posted: Posted, x: Buckets, mix: Buckets | None = None) -> Buckets:
    """Return `x`, or the neighbors' mix if a guarded step finds that this worker posted a bad message.

    For the term that is added to a `difference`, which is 0 for such a worker. Without `df.guard` the result is `x`.

    Args:
        posted: from `Worker.post`.
        x: buckets of the same plan.
        mix: the neighbors' mix, if it is not `collect(posted)`.
    """
    if posted.flags is None or functorch.holds(posted.flags.own):
        return x
    return where(posted.flags.own, x, cast_like(collect(posted) if mix is None else mix, x))


def with_flags(posted: Posted, after: Iterable[Tensor] = ()) -> Posted:
    """Return it with `after` set; a guarded step's waits for the flags, and others get the weights of bad messages."""
    posted = posted._replace(after=tuple(after))
    if posted.flags is None:
        return posted
    if "flags" not in posted.landed:
        posted.landed["flags"] = guarding.hear(posted.flags, posted.row)
    flags, row, scale = posted.landed["flags"]
    return posted._replace(flags=flags, row=row, scale=scale)


def arrived(posted: Posted, otherwise: Sequence[Tensor], *, after: Iterable[Tensor] = ()) -> list[Tensor]:
    """Wait for the messages of each slot, `[K, D]`, in their own dtypes; `otherwise` replaces bad ones."""
    posted = posted._replace(after=tuple(after))
    inboxes = [inbox_of(posted, index) for index in range(len(posted.own))]
    if posted.flags is None or posted.flags.inbox is None:
        return inboxes
    good = collectives.wait(posted.flags.inbox) > 0
    return [torch.where(good, inbox, old.to(inbox.dtype)) for inbox, old in zip(inboxes, otherwise, strict=True)]


def neighbors_sum(posted: Posted, dtypes: Sequence[torch.dtype], *, after: Iterable[Tensor] = ()) -> list[Tensor]:
    """Wait and return `Σ_{j≠i} W[i,j] Q(x_j)`, in wider or equal `dtypes`; of group averages, own share included."""
    posted, sums = with_flags(posted, after), []
    for index, dtype in enumerate(dtypes):
        zeros = torch.zeros_like(posted.sent[index], dtype=wide(dtype))
        pairs = _weighted(posted, index, own_gamma(posted, 1.0), wide(dtype))
        sums.append(sum((weight * message for weight, message in pairs), zeros).to(dtype))
    return sums


def mix_context(posted: Posted) -> MixContext:
    """Wait for the messages and return each of them, with its weight; also the context of a mix-aware optimizer.

    In a guarded step the weight of a bad message is 0, as of an idle slot.

    Args:
        posted: from `Worker.post`; `collect(posted)` may come before or after.
    """
    posted = with_flags(posted)
    row, count = posted.row, len(posted.own)
    return MixContext(
        tuple(inbox_of(posted, index) for index in range(count)) if posted.messages else (),
        row.sources,
        row.weights,
        tuple(_mean(posted, index) for index in range(count)) if posted.means else (),
        row.mean_weight,
        posted.own.plan,
    )


def mean(x: Buckets, everyone: Topology, t: Tensor, *, wire_dtype: torch.dtype | None = None) -> Buckets:
    """Average Q(x) over all workers, bit for bit the same on each, in the dtypes of `x`.

    `everyone` is the complete topology; if it rests in this round, the result is Q(x).
    """
    return collect_mean(post(x, collectives.look_up(x[0], everyone, t), wire_dtype=wire_dtype))


def collect_mean(posted: Posted, *, after: Iterable[Tensor] = ()) -> Buckets:
    """Wait and return `mean`'s result, for what was posted on a complete topology; `after` as for `collect`."""
    posted, x = with_flags(posted, after), posted.own
    triples = zip(range(len(x)), x, x.plan.buckets, strict=True)
    return Buckets([_weighted_sum(posted, i).to(plan.dtype).to(b.dtype) for i, b, plan in triples], x.plan)


def narrow(x: Tensor, *dtypes: torch.dtype | None) -> Tensor:
    """Round `x` to each of these dtypes in turn if it is narrower; return `x` itself if none is."""
    for dtype in dtypes:
        if dtype is not None and x.dtype.itemsize > dtype.itemsize:
            x = rounded(x, dtype)
    return x


def inbox_of(posted: Posted, index: int) -> Tensor:
    """Wait for one tensor's messages, `[K, D]`; compiled code posts all tensors first."""
    if (flight := posted.messages[index]) is None:
        return posted.sent[index].expand(posted.row.weights.shape[0] - 1, -1)
    return _landed(posted, flight, index)


def _landed(posted: Posted, flight: collectives.Flight, index: int) -> Tensor:
    """Wait for a flight once; compiled code waits after the whole post, and after the flights waited for so far."""
    landed, key = posted.landed, ("mean" if flight.is_mean else "messages", index)
    if key not in landed:
        before = landed.get("last", ())
        landed[key] = collectives.wait(flight, (*posted.numbers, *posted.after, *before))
        landed["last"] = (landed[key],)
    return landed[key]


def _weighted(posted: Posted, index: int, gamma: float | Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Wait for one tensor's inbox; return weights and messages in this dtype (the last may be the group's mean)."""
    pairs = []
    if posted.messages:
        weights = (posted.row.weights * gamma).to(dtype)
        pairs += zip(weights[1:].unbind(), inbox_of(posted, index).unbind(), strict=True)
    if posted.means and posted.row.mean_weight is not None:
        pairs.append(((posted.row.mean_weight * gamma).to(dtype), _mean(posted, index)))
    return [(weight, message if message.dtype == dtype else message.to(dtype)) for weight, message in pairs]


def _mean(posted: Posted, index: int) -> Tensor:
    if (flight := posted.means[index]) is None:
        return posted.sent[index]
    mean = _landed(posted, flight, index)
    if posted.scale is None:
        return mean
    dtype = wide(mean.dtype)
    return (mean.to(dtype) * posted.scale.to(dtype)).to(mean.dtype)


def own_gamma(posted: Posted, gamma: float | Tensor) -> float | Tensor:
    """Return γ, or 1 for a worker whose own message is bad: it takes all of the mix."""
    if posted.flags is None:
        return gamma
    one = torch.ones_like(posted.row.weights[0])
    return torch.where(posted.flags.own, one * gamma, one)


def coarse(posted: Posted, term: Tensor, spacing: Tensor | None = None) -> Tensor:
    """Round the float32 term that one worker takes from another to 8 bits, so that adding it to parameters is exact.

    Differences of rounded messages run in cycles, in which the rounding of a sum would move the workers' mean. Two that
    hear each other round opposite terms. With `spacing`, a power of two each, the result is also a multiple of it.
    """
    if term.dtype != torch.float32:
        return term
    is_coarse = posted.row.are_pairs if posted.flags is None else posted.row.are_pairs & posted.flags.own
    short = rounded(term, torch.bfloat16).to(term.dtype)
    return torch.where(is_coarse, short if spacing is None else torch.round(short / spacing) * spacing, term)


def _weighted_sum(posted: Posted, index: int) -> Tensor:
    """Return `Σ_j W[i, j] Q(x_j)`: bit for bit equal on two workers with equal weights, unlike differences."""
    own = posted.sent[index]
    dtype = wide(own.dtype)
    x, kept = own.to(dtype), posted.row.weights[0].to(dtype)
    if posted.flags is not None and not functorch.holds(posted.flags.own):
        x = torch.where(posted.flags.own, x, torch.zeros_like(x))
    pairs = _weighted(posted, index, own_gamma(posted, 1.0), dtype)
    return sum((weight * message for weight, message in pairs), kept * x)


def _mixed(posted: Posted, index: int, gamma: float | Tensor) -> Tensor:
    own, row = posted.own.tensors[index], posted.row
    if not posted.own.plan.buckets[index].is_shared:
        return own.clone()
    dtype = wide(own.dtype)  # sixteen-bit values are mixed in float32; weights are exact to 1e-12
    pairs = _weighted(posted, index, gamma, dtype)
    if not pairs and posted.flags is None:
        return own.clone()
    x = own if own.dtype == dtype else own.to(dtype)
    sent = x if posted.sent[index] is own else posted.sent[index].to(dtype)
    if posted.flags is not None and not functorch.holds(posted.flags.own):
        in_place_of_bad = row.weights[0].to(dtype)  # 0, or NaN if no good message arrived
        x, sent = (torch.where(posted.flags.own, values, in_place_of_bad) for values in (x, sent))
    before = x
    if posted.means and posted.sent[index] is own:
        weight, mean = pairs.pop()
        x = (x - mean).mul_(1.0 - weight).add_(mean)  # with weight 1 the mean itself, the same on all workers
    given = _given(row)
    if given is None:
        terms = [(message - sent).mul_(weight) for weight, message in pairs]
        terms = terms if posted.sent[index] is own else [coarse(posted, term) for term in terms]
    else:
        terms = [weight * message for weight, message in pairs]
        terms += [-weight * sent for weight in (given * gamma).to(dtype).unbind()]
        if posted.means and posted.sent[index] is not own:  # of a group's mean, the last of the pairs, too
            terms.append(-pairs[-1][0] * sent)
    mixed = functools.reduce(Tensor.add_, [*terms[1:], x], terms[0]) if terms else x  # in the first term's memory
    if (not isinstance(gamma, Tensor) or functorch.holds(gamma != 0)) and known_finite([before]):
        return own.clone() if mixed is own else mixed if own.dtype == dtype else mixed.to(own.dtype)
    moves = is_finite(before)  # an infinite value stays, also where all have it: inf - inf is NaN
    return torch.where(moves & (gamma != 0) if isinstance(gamma, Tensor) else moves, mixed, before).to(own.dtype)


def _given(row: collectives.Row) -> Tensor | None:
    """Return the weights of the shares of `x` given away; None if they are the received weights, as rows sum to one."""
    if not row.topology.rows_sum_to_one:
        return (1.0 - row.weights[0] - (0.0 if row.mean_weight is None else row.mean_weight)).view(1)
    return row.given if row.topology.needs_push_sum else None


def _moved(posted: Posted, index: int, gamma: float | Tensor, exact: bool) -> Tensor:
    own = posted.own.tensors[index]
    dtype = wide(own.dtype)
    sent, terms = posted.sent[index].to(dtype), []
    exact = exact and len(posted.means) == 0 and dtype == torch.float32
    for weight, message in _weighted(posted, index, gamma, dtype):
        term = weight * (message - sent)
        if exact:
            term = coarse(posted, term, _spacing(sent, message, posted.own.plan.buckets[index].dtype))
        terms.append(term if exact or posted.sent[index] is own else coarse(posted, term))
    total = sum(terms, torch.zeros_like(sent))
    if posted.flags is None or functorch.holds(posted.flags.own):
        return total
    return torch.where(posted.flags.own, total, torch.zeros_like(total))


def _spacing(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of a dtype's numbers near the larger of two float32 values."""
    power = (torch.maximum(a.abs(), b.abs()).view(torch.int32) & 0x7F800000).view(torch.float32)  # of two
    return (power * torch.finfo(dtype).eps).clamp(min=torch.finfo(torch.float32).tiny)
