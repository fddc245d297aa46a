"""Building blocks of algorithms with an outer loop.

Communication every H steps is the schedule `after_steps(H, topology)`, whose rounds in between are inactive. A step in
which it `rests` leaves the memory as it is and is compiled separately: one graph for inner steps, one for all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
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
from decentfn.core import Numbers, require, trees
from decentfn.core.buckets import loose
from decentfn.optim.transforms.transform import descending, require_descent, require_pair, wants_mix
from decentfn.topologies import every, later


def after_steps(inner_steps: int, topology: kit.Topology) -> kit.Topology:
    """Return the schedule whose round k is in step (k + 1) H - 1, at the end of each H = `inner_steps` steps."""
    return later(inner_steps - 1, every(inner_steps, topology))


Arrive = Callable[..., Any]
"""Wait for posted messages, `(after) -> result`, with `after` as for `collect`."""
Fed = tuple[kit.Buckets, kit.Buckets | None]  # a result, and the new e


def rounds(
    worker: kit.Worker,
    schedules: Sequence[kit.Topology],
    outer: Callable[..., tuple[kit.Buckets, Any]],
    *,
    post: Callable[[kit.Buckets, Any, Tensor], tuple[Any, Arrive]] | None = None,
    weight: kit.Weight | None = None,
    count: Callable[[Any, Tensor | None], Any] = lambda memory, weight: memory,
    own_steps: Sequence[int] = (),
    correction: Callable[[Any, Tensor], kit.Buckets] | None = None,
    mix: Callable[[kit.Buckets, Tensor], kit.Buckets] = lambda theta, t: theta,
) -> Callable[[kit.State, kit.PyTree, Tensor], tuple[kit.State, kit.Metrics]]:
    """Return the step `θ ← θ + u(θ, g(θ))`, followed by `outer` unless all schedules rest.

    Args:
        worker: the worker; its optimizer is the inner one.
        schedules: of the messages.
        outer: the outer step, `(θ, memory, t) -> (θ, memory)`, which looks what is due in step t. `memory[0]` are the
            parameters at the start of the round.
        post: messages `(θ, memory, t) -> (Posted, arrive)` that overlap with the gradient; `arrive` waits for them, and what it
            returns is the fourth argument of `outer`.
        weight: weight of the gradient.
        count: `(memory, weight) -> memory`, in every step; the weight is None without one.
        own_steps: number of steps that each worker takes before each outer step; none: all.
        correction: `(memory, t) -> c`, wide, which is subtracted in every step: `θ ← θ + u - c`.
        mix: `(θ, t) -> θ`, done after every update.
    """
    longest, counts = max(own_steps, default=1), Numbers(*own_steps)

    def takes_part(theta: kit.Buckets, t: Tensor) -> Tensor:
        """Return True (0-d bool) in the last steps of a round, as many as this worker takes."""
        number, own = step_and_worker(theta[0], schedules[0], t)
        mine = counts.vector(theta[0]).index_select(0, own.view(1))[0]
        return number % longest >= longest - mine

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        theta, memory, rest = state.params, state.memory, kit.rests(*schedules)
        posted, arrive = (None, None) if post is None or rest else post(theta, memory, t)
        g, local = worker.gradient(theta, state.local, batch, t, after=posted, weight=weight)
        moves = g
        if own_steps:
            trains = takes_part(theta, t)
            moves = g._replace(good=trains if g.good is None else g.good & trains)
        u, local = worker.update(g.grads, moves, local, theta)
        if correction is not None:
            u = kit.each(lambda u, c: u.to(c.dtype) - c, u, correction(memory, t))
        theta = mix(kit.unless_bad(kit.add(theta, u), lambda: memory[0]), t)
        memory = count(memory, g.weight)
        if rest:
            return kit.State(theta, local, memory), g.metrics
        arrived = () if arrive is None else (arrive(after=g.grads),)
        theta, memory = outer(theta, memory, t, *arrived)
        return kit.State(theta, local, memory), g.metrics

    return step


def local_steps(
    worker: kit.Worker, schedule: kit.Topology, outer: Callable[..., tuple[kit.Buckets, Any]], **options: Any
) -> Callable[[kit.State, kit.PyTree, Tensor], tuple[kit.State, kit.Metrics]]:
    """Return the step of `rounds` whose outer step is of all parameters: its result is taken when `schedule` is active.

    Where t has no value, as in a user's own trace, it is computed in every step. A weight is added to `memory.weight`.
    """

    def count(memory: Any, weight: Tensor | None) -> Any:
        return memory if weight is None else memory._replace(weight=memory.weight + weight.to(memory.weight.dtype))

    def when_due(theta: kit.Buckets, memory: Any, t: Tensor, *arrived: Any) -> tuple[kit.Buckets, Any]:
        due = kit.is_active(schedule, t, theta)
        new, memory_new = outer(theta, memory, t, *arrived)
        memory = trees.map(lambda old, new: torch.where(due, new.to(old.dtype), old), memory, memory_new)
        return kit.where(due, new, theta), memory

    return rounds(worker, (schedule,), when_due, count=count, **options)


def step_and_worker(like: Tensor, topology: kit.Topology, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and the number of this worker, 0-d int64 on the device of `like`."""
    return collectives.on_device(like, t), collectives.look_up(like, topology, t).worker


def nesterov(call: str, rate: float, momentum: float, given: Any = None) -> Any:
    """Return the pair of `b⁺ = β b + Δ; u = -η (Δ + β b⁺)`, whose state is b, None if β = 0; or the outer optimizer given."""
    kit.require_positive(call, outer_learning_rate=rate)
    kit.require_fractions(call, outer_momentum=momentum)
    if given is not None:
        rule = "an outer optimizer has its own rate and momentum: df.sgd(0.7, momentum=0.9, nesterov=True)."
        require((rate, momentum) == (0.7, 0.9), call, rule, outer_learning_rate=rate, outer_momentum=momentum)
        return require_outer(call, given)
    numbers = Numbers(rate, momentum)

    def update(delta: kit.Buckets, b: kit.Buckets | None, phi: kit.Buckets) -> tuple[kit.Buckets, kit.Buckets | None]:
        eta, beta = numbers.on(phi[0])
        if b is None:
            return kit.each(lambda delta: -eta * delta, delta), None
        b = kit.each(lambda b, delta: beta * b + delta, b, delta)
        return kit.each(lambda delta, b: -eta * (delta + beta * b), delta, b), b

    return descending(lambda phi: kit.zeros_like(phi) if momentum > 0 else None, update)


class Feedback:
    """Mix of a payload, compressed with error feedback: `e ← β e + Δ; q = C(e); e ← e - q`.

    With β = 1 nothing is lost: what was sent and what e holds add up to all that was to be sent. Without a compressor, or
    with `identity()`, which leaves no error, the worker's own mix is taken, and e is None.
    """

    def __init__(self, call: str, compressor: kit.Compressor | None, decay: float, worker: kit.Worker) -> None:
        if compressor is not None:
            kit.require_compressor(call, compressor, 1.0, worker.options)
            rule = "a compressed message is mixed once; leave gossip_rounds out."
            require(worker.gossip_rounds == 1, call, rule, gossip_rounds=worker.gossip_rounds)
        kit.require_fractions(call, error_decay=decay)
        self._call, self._worker, self._decay = call, worker, kit.as_input(call, "error_decay", decay)
        self.compressor = None if compressor is None or compressor.name == "identity()" else compressor
        self.is_on = self.compressor is not None

    def start(self, x: kit.Buckets, with_peers: bool = False) -> kit.Buckets | None:
        """Return the first e; raise ValueError if peers receive the payload and its compressor has δ < 1/2."""
        if self.compressor is not None and with_peers:
            deltas = [self.compressor.delta(plan) or 0.0 for plan in x.plan.buckets]
            rule = f"peers receive parameters, so δ >= 1/2, not {min(deltas):.2g}; use quantize(bits=8), or choco_sgd or beer."
            require(min(deltas) >= 0.5, self._call, rule, compressor=self.compressor)
        return kit.zeros_like(x) if self.is_on else None

    def with_peers(self, inner_steps: int, topology: kit.Topology) -> kit.Topology:
        """Return the schedule of rounds with peers; compressed values cannot be averaged in groups."""
        return after_steps(inner_steps, as_messages(topology) if self.is_on else topology)

    def _fed(self, x: kit.Buckets, e: kit.Buckets, t: Tensor) -> kit.Buckets:
        beta = kit.at(self._decay, t, e)
        return kit.each(lambda e, x: beta * e + x, e, x)

    def _post(
        self, x: kit.Buckets, e: kit.Buckets, schedule: kit.Topology, t: Tensor
    ) -> tuple[Compressed, kit.Buckets]:
        """Start to send q; also return the new e."""
        assert self.compressor is not None
        e = self._fed(x, e, t)
        q = post_compressed(e, self.compressor, schedule, t)
        return q, kit.each(torch.sub, e, q.sent)

    def mix(self, x: kit.Buckets, e: kit.Buckets | None, schedule: kit.Topology, t: Tensor) -> Fed:
        """Return `x + (W - I) q`, with x for Δ, whose mean over the workers is that of x, and the new e; without C, W x."""
        return (self._worker.mix(x, t, schedule), None) if e is None else self.post_mix(x, e, schedule, t)[1]()

    def post_mix(self, x: kit.Buckets, e: kit.Buckets | None, schedule: kit.Topology, t: Tensor) -> tuple[Any, Arrive]:
        """Start to send x; also return what waits for `mix`'s result."""
        if e is None:
            posted = self._worker.post(x, t, schedule)
            return posted, lambda after=(): (kit.collect(posted, after=after), None)
        q, e = self._post(x, e, schedule, t)

        def arrive(after: Iterable[Tensor] = ()) -> Fed:
            pull = difference_compressed(q, after=after)
            return kit.repaired(q.posted, kit.add(x, pull), pull), e  # a bad worker sent zeros, so the pull is the mix

        return q.posted, arrive


class Means(Feedback):
    """Means over all workers after every H steps, compressed with error feedback; `schedule` has their rounds."""

    def __init__(
        self,
        call: str,
        inner_steps: int,
        compressor: Any,
        decay: float,
        worker: kit.Worker,
        sends_progress: bool = False,
    ) -> None:
        super().__init__(call, compressor, decay, worker)
        kit.require_whole(call, inner_steps=inner_steps)
        self.everyone = all_to_all(worker.topology.num_workers) if self.is_on else worker.everyone
        self.schedule = after_steps(inner_steps, self.everyone)
        self.sends_progress = sends_progress or self.is_on or worker.wire_dtype is not None
        self.whole = self.is_on  # the algorithm takes a bucket for one vector

    def to_send(self, phi: kit.Buckets, theta: kit.Buckets) -> kit.Buckets:
        """Return a worker's contribution to Δ: θ, or φ - θ if what is sent is rounded, weighted or compressed.

        The mean of θ also corrects unequal starts, but rounding θ would hide small progress.
        """
        return progress(phi, theta) if self.sends_progress else theta

    def of_mean(self, phi: kit.Buckets, mean: kit.Buckets) -> kit.Buckets:
        """Return `Δ = φ - mean_i θ_i` from the mean of the contributions."""
        return kit.each(lambda phi, m: m.to(phi.dtype), phi, mean) if self.sends_progress else progress(phi, mean)

    def outer_gradient(
        self, phi: kit.Buckets, theta: kit.Buckets, e: kit.Buckets | None, t: Tensor, weight: Tensor | None = None
    ) -> Fed:
        """Return Δ, the same on all, and the new e; the weight is as for `Worker.mean`."""
        x = self.to_send(phi, theta)
        x = x if weight is None else self._worker.weighted(x, t, self.schedule, weight)
        if e is None:
            return self.of_mean(phi, self._worker.mean(x, t, self.schedule)), None
        q, e = self._post(x, e, self.schedule, t)
        return self.of_mean(phi, mean_compressed(q)), e

    def algorithm(self, step: Any, start: Any, schedules: Sequence[kit.Topology], **options: Any) -> kit.Algorithm:
        """Return the algorithm of this step and first memory, of means over all workers if `options` do not say otherwise."""
        equal = ("params",) if self.sends_progress else ()
        options = {"topology": self._worker.everyone, "must_equal": equal, "whole_buckets": self.whole} | options
        return self._worker.algorithm(step, start, schedules=schedules, **options)


def mean_compressed(q: Compressed, after: Iterable[Tensor] = ()) -> kit.Buckets:
    """Wait for the messages of all workers, and return their mean, bit for bit equal on all; `after` as for `collect`."""
    total = sum_compressed(q._replace(posted=q.posted._replace(after=tuple(after))))
    share = kit.once((1 + (q.posted.row.sources >= 0).sum()).double().reciprocal())
    return kit.each(lambda total: share.to(total.dtype) * total, total)


def no_weight(x: kit.Buckets, *shape: int) -> Tensor:
    """Return zeros of this shape, to count tokens in: float32, or float64 if any of the parameters are."""
    dtype = functools.reduce(torch.promote_types, [kit.wide(b.dtype) for b in x])
    return torch.zeros(shape, dtype=dtype, device=x[0].device)


def require_outer(call: str, outer_optimizer: Any) -> Any:
    """Return the outer optimizer; raise ValueError unless it is a pair that descends and does not want the mix."""
    require_pair(f"{call}(outer_optimizer)", outer_optimizer)
    require_descent(outer_optimizer)
    rule = "an outer step does not show the mix; use df.sgd(0.7)."
    require(not wants_mix(outer_optimizer), f"{call}(outer_optimizer=MixAware(...))", rule)
    return outer_optimizer


def progress(phi: kit.Buckets, theta: kit.Buckets) -> kit.Buckets:
    """Return `φ - θ` in float32 or wider, where θ began as φ rounded to the parameters' dtype.

    That rounding error is excluded: slow momentum would treat it as a gradient and, in 16 bits, keep moving without
    one.
    """
    start = [gossip.narrow(p, plan.dtype) for p, plan in zip(phi, phi.plan.buckets, strict=True)]
    return kit.Buckets([s.to(p.dtype) - x.to(p.dtype) for s, x, p in zip(start, theta, phi, strict=True)], phi.plan)


_PARTS: Any = (kit.Buckets, Tensor)
"""Nodes of an outer optimizer's state: of buckets a fragment has a slice, of other tensors its own, [P, ...]."""


class Fragments(Means):
    """Outer loop over P equal slices of every bucket; fragment p, the p-th slice of each, is due after ⌊(p+1) H / P⌋ steps of H.

    A fragment is launched in the step in which it is due, or, if `is_late`, in the next one: at most one in a step.
    """

    def __init__(
        self, call: str, inner_steps: int, count: int, outer: Any, *feedback: Any, is_late: bool = False
    ) -> None:
        super().__init__(call, inner_steps, *feedback)
        kit.require_whole(call, num_fragments=count)
        rule = "a fragment has a step of its own, so num_fragments <= inner_steps; take more inner steps."
        require(count <= inner_steps, call, rule, inner_steps=inner_steps, num_fragments=count)
        self.count, self.outer, self.whole = count, outer, True
        self._offsets = [(p + 1) * inner_steps // count for p in range(count)]
        self._every = every(inner_steps, self.everyone)
        self.launches = self.schedules(0 if is_late else -1)

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

    def weighted(self, x: kit.Buckets, w: Tensor, counts: Tensor, t: Tensor) -> tuple[kit.Buckets, Tensor, Tensor]:
        """Return `x w / mean_j w_j` of each fragment, where w is not 0; and the share of the workers that count, [P].

        `w` and `counts`, [P] bool, are this worker's, which are exchanged in a fragment's round; all wait for them.
        """
        pairs = zip(self.split(list(x)), torch.stack([w, counts.to(w.dtype)], 1), strict=True)
        own = torch.stack([gossip.beside(pieces, numbers) for pieces, numbers in pairs])
        means = [gossip.mean(loose([its]), schedule, t)[0] for its, schedule in zip(own, self.launches, strict=True)]
        weight, trained = torch.stack(means).unbind(1)
        share = kit.once(torch.where(weight != 0, own[:, 0] / weight, torch.zeros_like(weight)))
        of_x = self.mask(x, share)
        x = kit.each(lambda x, s: torch.where(s != 0, x, 0.0), x, of_x)
        return kit.with_own(kit.each(lambda x, s: x * s.to(x.dtype), x, of_x), x), share != 0, trained

    def init(self, x: kit.Buckets) -> Any:
        """Return b, or the outer optimizer's state, in which each fragment has numbers of its own, [P]."""

        def of_each(node: Any) -> Any:
            rule = "a fragment has parts of leaves, so the optimizer is elementwise, as df.adam(0.1); or take num_fragments=1."
            is_whole = isinstance(node, kit.Buckets)
            require(is_whole or self.count == 1 or node.dim() == 0, f"{self._call}(outer_optimizer)", rule)
            return node if is_whole else torch.stack([node] * self.count)

        return trees.map_nodes(_PARTS, of_each, self.outer.init(kit.copy_wide(x)))

    def step(self, due: Tensor, phi: kit.Buckets, b: Any, delta: kit.Buckets) -> tuple[Any, ...]:
        """Return φ⁺ and b⁺ in the fragment that is `due`, [P] bool, if one is, else φ and b; and its mask."""
        mask, turn = self.mask(phi, due), due.to(torch.uint8).argmax().view(1)
        own = trees.map_nodes(_PARTS, lambda x: x if isinstance(x, kit.Buckets) else x.index_select(0, turn)[0], b)
        u, new = self.outer.update(kit.each(lambda d, m: torch.where(m, d, 0.0), delta, mask), own, phi)

        def put(b: Any, new: Any) -> Any:
            if isinstance(b, kit.Buckets):  # of some of the leaves alone, if the optimizer has masks
                return kit.where(mask if len(b) == len(mask) else self.mask(b, due), new, b)
            return torch.where(due, new, b)

        return kit.where(mask, kit.add(phi, u), phi), trees.map_nodes(_PARTS, put, b, new), mask

    def launch(self, theta: kit.Buckets, memory: Any, t: Tensor) -> tuple[list[kit.Posted], Arrive]:
        """Start to send the fragment whose round is in step t, as `post` does."""
        return self.post(memory.phi, self.to_send(memory.phi, theta), memory.error, t)

    def post(
        self, phi: kit.Buckets, x: kit.Buckets, e: kit.Buckets | None, t: Tensor, sends: Tensor | None = None
    ) -> tuple[list[kit.Posted], Arrive]:
        """Start to send each fragment of x; also return what waits for them, for Δ and e, which is new where this worker sends.

        `sends`, [P] bool, are the fragments whose error is fed back; None: those whose round is in step t.
        """
        plans, wire, fed, sent = x.plan.buckets, self._worker.wire_dtype, x, None
        if e is not None:
            sent = self.mask(e, self.turn(e, self.launches, t) if sends is None else sends)
            fed = kit.each(lambda fed, sent: torch.where(sent, fed, 0.0), self._fed(x, e, t), sent)
        pieces = [gossip.narrow(b, p.dtype, wire if p.is_shared else None) for b, p in zip(fed, plans, strict=True)]
        each = list(zip([loose(f, plans) for f in self.split(pieces)], self.launches, strict=True))
        if e is None or sent is None or self.compressor is None:
            posted = [self._worker.post(fragment, t, schedule) for fragment, schedule in each]
            waits = [functools.partial(gossip.collect_mean, one) for one in posted]
        else:
            several = [post_compressed(fragment, self.compressor, schedule, t) for fragment, schedule in each]
            left = kit.each(torch.sub, fed, self.join([q.sent for q in several], e.plan))
            e = kit.where(sent, left, e)
            posted, waits = [q.posted for q in several], [functools.partial(mean_compressed, q) for q in several]

        def arrive(after: Iterable[Tensor] = ()) -> Fed:
            return self.of_mean(phi, self.join([wait(after=after) for wait in waits], phi.plan)), e

        return posted, arrive
