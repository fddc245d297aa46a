"""Building blocks of algorithms with an outer loop.

Communication every H steps is the schedule `after_steps(H, topology)`, whose rounds in between are inactive. A step in
which it `rests` leaves the memory as it is and is compiled separately: one graph for inner steps, one for all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import collectives, gossip
from decentfn.comm.gossip.compressed import (
    Compressed,
    all_to_all,
    as_messages,
    difference_compressed,
    post_compressed,
    sum_compressed,
)
from decentfn.core import trees
from decentfn.core.arguments import require
from decentfn.core.buckets import loose
from decentfn.core.scalars import Numbers
from decentfn.optim.transforms.transform import require_descent, require_pair, wants_mix
from decentfn.topologies import every, later


def after_steps(inner_steps: int, topology: kit.Topology) -> kit.Topology:
    """Return the schedule whose round k is in step (k + 1) H - 1, at the end of each H = `inner_steps` steps."""
    return later(inner_steps - 1, every(inner_steps, topology))


def local_steps(
    worker: kit.Worker,
    schedule: kit.Topology,
    outer: Callable[..., tuple[kit.Buckets, Any]],
    post: Callable[[Any, Tensor], kit.Posted] | None = None,
    weight: kit.Weight | None = None,
    own_steps: Sequence[int] = (),
    correction: Callable[[Any, Tensor], kit.Buckets] | None = None,
    mix: Callable[[kit.Buckets, Tensor], kit.Buckets] = lambda theta, t: theta,
) -> Callable[[kit.State, kit.PyTree, Tensor], tuple[kit.State, kit.Metrics]]:
    """Return the step `θ ← θ + u(θ, g(θ))`, followed by an outer step whenever `schedule` is active.

    Args:
        worker: the worker; its optimizer is the inner one.
        schedule: from `after_steps`.
        outer: the outer step, `(θ, memory, t) -> (θ, memory)`. Its result is taken when it is due. Where t has no
            value, as in a user's own trace, it is computed in every step. `memory.phi` are the parameters at the start of
            the round.
        post: messages `(memory, t) -> Posted` that overlap with the gradient; what they mix to is the fourth argument
            of `outer`.
        own_steps: number of steps that each worker takes before each outer step; none: all.
        weight: weight of the gradient, which is added to `memory.weight` in every step.
        correction: `(memory, t) -> c`, wide, which is subtracted in every step: `θ ← θ + u - c`.
        mix: `(θ, t) -> θ`, done after every update.
    """
    longest, counts = max(own_steps, default=1), Numbers(*own_steps)

    def takes_part(theta: kit.Buckets, t: Tensor) -> Tensor:
        """Return True (0-d bool) in the last steps of a round, as many as this worker takes."""
        number, row = collectives.on_device(theta[0], t), collectives.look_up(theta[0], schedule, t)
        mine = counts.vector(theta[0]).index_select(0, row.worker.view(1))[0]
        return number % longest >= longest - mine

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        theta, memory = state.params, state.memory
        posted = None if post is None or kit.rests(schedule) else post(memory, t)
        g, local = worker.gradient(theta, state.local, batch, t, after=posted, weight=weight)
        moves = g
        if own_steps:
            trains = takes_part(theta, t)
            moves = g._replace(good=trains if g.good is None else g.good & trains)
        u, local = worker.update(g.grads, moves, local, theta)
        if correction is not None:
            u = kit.each(lambda u, c: u.to(c.dtype) - c, u, correction(memory, t))
        theta = mix(kit.unless_bad(kit.add(theta, u), lambda: memory.phi), t)
        if g.weight is not None:
            memory = memory._replace(weight=memory.weight + g.weight.to(memory.weight.dtype))
        if kit.rests(schedule):
            return kit.State(theta, local, memory), g.metrics
        due = kit.is_active(schedule, t, theta)
        mixed = () if posted is None else (kit.collect(posted, after=g.grads),)
        new, memory_new = outer(theta, memory, t, *mixed)
        memory = trees.map(lambda old, new: torch.where(due, new.to(old.dtype), old), memory, memory_new)
        return kit.State(kit.where(due, new, theta), local, memory), g.metrics

    return step


class Feedback:
    """Compressed messages with error feedback, `e ← β e + Δ; q = C(e); e ← e - q`; a method without it has `None`.

    With β = 1 nothing is lost: what was sent and what e holds add up to all that was to be sent.
    """

    def __init__(self, call: str, compressor: kit.Compressor, decay: float, num_workers: int) -> None:
        kit.require_fractions(call, error_decay=decay)
        self.compressor, self.everyone = compressor, all_to_all(num_workers)
        self._decay = kit.as_input(call, "error_decay", decay)

    @classmethod
    def of(
        cls, call: str, compressor: kit.Compressor | None, decay: float, worker: kit.Worker, options: Mapping[str, Any]
    ) -> Feedback | None:
        """Return None without a compressor, or with `identity()`, which leaves no error."""
        if compressor is None:
            return None
        kit.require_compressor(call, compressor, 1.0, options)
        rule = "a compressed message is mixed once; leave gossip_rounds out."
        require(worker.gossip_rounds == 1, call, rule, gossip_rounds=worker.gossip_rounds)
        feedback = cls(call, compressor, decay, worker.topology.num_workers)
        return None if compressor.name == "identity()" else feedback

    def add(self, delta: kit.Buckets, e: kit.Buckets, t: Tensor) -> kit.Buckets:
        """Return `β e + Δ`."""
        beta = kit.at(self._decay, t, e)
        return kit.each(lambda e, delta: beta * e + delta, e, delta)

    def post(self, e: kit.Buckets, schedule: kit.Topology, t: Tensor) -> Compressed:
        """Start to send q; `schedule` has rounds of `everyone`, or of messages to neighbors."""
        return post_compressed(e, self.compressor, schedule, t)

    def post_fragments(
        self, fragments: Fragments, e: kit.Buckets, schedules: Sequence[kit.Topology], t: Tensor
    ) -> tuple[list[Compressed], kit.Buckets]:
        """Start to send q of each fragment of e; also return `e - q`."""
        pieces = [gossip.narrow(b, plan.dtype) for b, plan in zip(e, e.plan.buckets, strict=True)]
        pairs = zip(fragments.split(pieces), schedules, strict=True)
        posted = [self.post(loose(fragment, e.plan.buckets), schedule, t) for fragment, schedule in pairs]
        return posted, kit.each(torch.sub, e, fragments.join([q.sent for q in posted], e.plan))

    def mean(
        self, delta: kit.Buckets, e: kit.Buckets, schedule: kit.Topology, t: Tensor
    ) -> tuple[kit.Buckets, kit.Buckets]:
        """Return the mean of all q and the new e."""
        e = self.add(delta, e, t)
        q = self.post(e, schedule, t)
        return mean_compressed(q), kit.each(torch.sub, e, q.sent)

    def mix(self, x: kit.Buckets, e: kit.Buckets, schedule: kit.Topology, t: Tensor) -> tuple[kit.Buckets, kit.Buckets]:
        """Return `x + (W - I) q`, with x for Δ, whose mean over the workers is that of x, and the new e."""
        e = self.add(x, e, t)
        q = self.post(e, schedule, t)
        pull = difference_compressed(q)
        mixed = kit.repaired(q.posted, kit.add(x, pull), pull)  # a bad worker sent zeros, so the pull is the mix
        return mixed, kit.each(torch.sub, e, q.sent)


def peers(feedback: Feedback | None, inner_steps: int, topology: kit.Topology) -> kit.Topology:
    """Return the schedule of rounds with peers; compressed values cannot be averaged in groups."""
    return after_steps(inner_steps, topology if feedback is None else as_messages(topology))


def no_error(feedback: Feedback | None, call: str, x: kit.Buckets) -> kit.Buckets | None:
    """Return the first error of a payload for peers; raise ValueError unless its compressor has δ >= 1/2."""
    if feedback is None:
        return None
    deltas = [feedback.compressor.delta(plan) or 0.0 for plan in x.plan.buckets]
    rule = f"peers receive parameters, so δ >= 1/2, not {min(deltas):.2g}; use quantize(bits=8), or choco_sgd or beer."
    require(min(deltas) >= 0.5, call, rule, compressor=feedback.compressor)
    return kit.zeros_like(x)


def mix_with_peers(
    worker: kit.Worker,
    feedback: Feedback | None,
    x: kit.Buckets,
    e: kit.Buckets | None,
    schedule: kit.Topology,
    t: Tensor,
) -> tuple[kit.Buckets, kit.Buckets | None]:
    """Return W x and the error, which is None without feedback."""
    if feedback is None or e is None:
        return worker.mix(x, t, schedule), None
    return feedback.mix(x, e, schedule, t)


def mean_compressed(q: Compressed, after: Iterable[Tensor] = ()) -> kit.Buckets:
    """Wait for the messages of all workers, and return their mean, bit for bit equal on all; `after` as for `collect`."""
    total = sum_compressed(q._replace(posted=q.posted._replace(after=tuple(after))))
    share = kit.once((1 + (q.posted.row.sources >= 0).sum()).double().reciprocal())
    return kit.each(lambda total: share.to(total.dtype) * total, total)


def no_weight(x: kit.Buckets, *shape: int) -> Tensor:
    """Return zeros of this shape, to count tokens in: float32, or float64 if any of the parameters are."""
    dtype = functools.reduce(torch.promote_types, [kit.wide(b.dtype) for b in x])
    return torch.zeros(shape, dtype=dtype, device=x[0].device)


def require_outer(call: str, outer_optimizer: Any) -> None:
    """Raise ValueError unless the outer optimizer is a pair that descends and does not want the mix."""
    require_pair(f"{call}(outer_optimizer)", outer_optimizer)
    require_descent(outer_optimizer)
    if wants_mix(outer_optimizer):
        raise ValueError(
            f"{call}(outer_optimizer=MixAware(...)): an outer step does not show the mix; use df.sgd(0.7)."
        )


def progress(phi: kit.Buckets, theta: kit.Buckets) -> kit.Buckets:
    """Return `φ - θ` in float32 or wider, where θ began as φ rounded to the parameters' dtype.

    That rounding error is excluded: slow momentum would treat it as a gradient and, in 16 bits, keep moving without
    one.
    """
    start = [gossip.narrow(p, plan.dtype) for p, plan in zip(phi, phi.plan.buckets, strict=True)]
    return kit.Buckets([s.to(p.dtype) - x.to(p.dtype) for s, x, p in zip(start, theta, phi, strict=True)], phi.plan)


def to_send(phi: kit.Buckets, theta: kit.Buckets, wire_dtype: torch.dtype | None) -> kit.Buckets:
    """Return a worker's contribution to the outer gradient: θ, or the difference φ - θ if the wire rounds.

    The mean of θ also corrects unequal starts, but rounding θ would hide small progress.
    """
    return theta if wire_dtype is None else progress(phi, theta)


def outer_gradient(phi: kit.Buckets, mean: kit.Buckets, wire_dtype: torch.dtype | None) -> kit.Buckets:
    """Return `Δ = φ - mean_i θ_i` from the mean of the contributions."""
    return progress(phi, mean) if wire_dtype is None else kit.each(lambda phi, m: m.to(phi.dtype), phi, mean)


class Fragments:
    """P equal slices of every bucket; fragment p, the p-th slice of each, is due after ⌊(p+1) H / P⌋ steps of H."""

    def __init__(self, count: int, inner_steps: int, everyone: kit.Topology) -> None:
        self.count = count
        self._offsets = [(p + 1) * inner_steps // count for p in range(count)]
        self._every = every(inner_steps, everyone)

    def schedules(self, steps: int) -> list[kit.Topology]:
        """Return each fragment's schedule: its round is `steps` steps after the step in which it is due."""
        return [later(offset + steps, self._every) for offset in self._offsets]

    def split(self, x: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the slices of each fragment."""
        return list(zip(*[bucket.tensor_split(self.count) for bucket in x], strict=True))

    def join(self, fragments: Iterable[Iterable[Tensor]], plan: kit.Plan) -> kit.Buckets:
        """Join slices into buckets; the inverse of `split`."""
        return kit.Buckets([torch.cat(slices) for slices in zip(*fragments, strict=True)], plan)

    def turn(self, like: kit.Buckets, schedules: Sequence[kit.Topology], t: Tensor) -> Tensor:
        """Return True for each fragment whose schedule is active in step t, [P] bool."""
        return torch.stack([kit.is_active(schedule, t, like) for schedule in schedules])

    def mask(self, like: kit.Buckets, due: Tensor) -> kit.Buckets:
        """Return a mask of the elements whose fragment is due, [P] bool."""
        pairs = zip(due.unbind(), self.split(list(like)), strict=True)
        slices = [[due.expand(piece.shape) for piece in fragment] for due, fragment in pairs]
        return self.join(slices, like.plan)
