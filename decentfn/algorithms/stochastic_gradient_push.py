"""Stochastic gradient push, SGP and overlap SGP (Assran, Loizou, Ballas, Rabbat, ICML 2019).

    z = x / w;    x⁺ = A (x - η g(z));    w⁺ = A w;    w⁰ = 1

x: a worker's biased parameters; w: its push-sum weight; z: its de-biased parameters, at which the gradient g is taken;
A: the column-stochastic mixing matrix of step t (doubly stochastic ones are too); -η g: the optimizer's update.

Overlap SGP applies messages τ steps late, x and w together, so mass is conserved; with
x½ = x - η g(z) and a = A[i, i]:

    x_i⁺ = a_t x½_i + Σ_{j≠i} A_{t-τ}[i, j] x½_j(t-τ);    w_i⁺ = a_t w_i + Σ_{j≠i} A_{t-τ}[i, j] w_j(t-τ)

With bounded staleness (as in asynchronous gradient push, Assran, Rabbat, IEEE TAC 2021; arXiv:1803.08950) each message
has its own delay d_s(i, j) of least to τ steps, drawn by (seed, s, link); a worker goes on with the mass that it has:

    x_i⁺ = a_t x½_i + Σ_s Σ_{j≠i} [s + d_s(i, j) = t] A_s[i, j] x½_j(s);    w likewise
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.mail import least_self_weight
from decentfn.comm import collectives, gossip
from decentfn.core import trees
from decentfn.core.buckets import loose, wide
from decentfn.topologies import later, nth_round
from decentfn.topologies.lossy import arrivals


class Memory(NamedTuple):
    """Memory of one worker."""

    weight: Tensor  # w, 0-d
    outboxes: tuple[tuple[Tensor, ...], ...]  # the last τ steps' (x½, w) in the wire dtype, the oldest first

    def restart(self, x: kit.Buckets) -> Memory:
        """Keep all weights, also those in flight, and give them the new parameters."""
        boxes = []
        for outbox in self.outboxes:
            w = kit.unpack(outbox, x.plan)[1]
            new = kit.pack(kit.scale(x, w), w)
            boxes.append(tuple(n.to(old.dtype) for n, old in zip(new, outbox, strict=True)))
        return self._replace(outboxes=tuple(boxes))

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Give each worker weight 1, and drop messages in flight."""
        return Memory(torch.ones_like(self.weight), trees.map(torch.zeros_like, self.outboxes))


@kit.algorithm
def stochastic_gradient_push(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    rounds: int = 1,
    delay: int = 0,
    least_delay: int | None = None,
    seed: int = 0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Adapt then combine over directed graphs; push-sum's weight corrects the scale of the mix.

    With delay=0 nothing can be sent before the update. With delay=1 everything overlaps: a step's result is posted
    before the next step's forward pass and needed after its backward pass. More delay only makes messages older.
    With `least_delay` each message is late by its own number of steps, the same draw on every worker. Delays are counted
    in steps: ranks send a message in the step in which it arrives, so a slow worker still holds up the others.

    Sent per step: the parameters and one more number, `rounds` times per neighbor. In 16-bit buckets or with a wire
    dtype the weight is rounded like the parameters.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees z and the gradient there.
        topology: any schedule, column-stochastic ones too.
        rounds: r >= 1 rounds of mixing per step; round k of step t is phase r·t + k of the schedule.
        delay: delay τ >= 0 of messages, in steps. Needs rounds=1 and positive self-weights.
        least_delay: smallest delay of a message, 0 to τ; None: all take τ steps. Messages of 0 steps do not overlap.
            Needs a schedule without group averages.
        seed: seed of the delays.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: rounds or delays out of range, a delay with a self-weight of 0, or delays of group averages that
            differ.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    _check(topology, rounds, delay, least_delay)
    schedule = [nth_round(k, rounds, topology) for k in range(rounds)]
    if least_delay is None or least_delay == delay:
        of_age = {delay: later(delay, topology)}
    else:
        of_age = {age: arrivals(topology, age, least_delay, delay, seed) for age in range(least_delay, delay + 1)}

    def start(z: kit.Buckets) -> Memory:
        w = kit.first_weight(z)
        nothing = [gossip.narrow(torch.zeros_like(b), worker.wire_dtype) for b in kit.pack(z, w)]
        return Memory(w, tuple(tuple(map(torch.clone, nothing)) for _ in range(delay)))

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        z, (w, outboxes) = state.params, state.memory
        late = [worker.post(loose(outboxes[-age], z.plan.buckets), t, of_age[age]) for age in of_age if age > 0]

        g, local = worker.gradient(z, state.local, batch, t, after=late)
        u, local = worker.update(g.grads, g, local, z)
        x_and_w = kit.unless_bad(gossip.moved(z, w, u))  # bad mass is dropped together with its weight

        if not late:
            for this in schedule:
                x_and_w = worker.mix(x_and_w, t, this)
        else:
            sent = tuple(gossip.narrow(x, worker.wire_dtype) for x in x_and_w)
            row = collectives.look_up(z[0], topology, t)
            given = row.given if row.mean_weight is None else torch.cat([row.given, row.mean_weight[None]])
            kept = [_without(x, q, given) for x, q in zip(x_and_w, sent, strict=True)]
            if 0 in of_age:
                late.append(worker.post(loose(sent, z.plan.buckets), t, of_age[0]))
            for posted in late:
                received = gossip.neighbors_sum(posted, [k.dtype for k in kept], after=g.grads)
                kept = [k + r for k, r in zip(kept, received, strict=True)]
            x_and_w = kit.Buckets([k.to(x.dtype) for k, x in zip(kept, x_and_w, strict=True)], x_and_w.plan)
            outboxes = (*outboxes[1:], sent)

        x, w = kit.unpack(x_and_w, z.plan)
        return kit.State(kit.with_own(kit.divide(x, w), kit.add(z, u)), local, Memory(w, outboxes)), g.metrics

    return worker.algorithm(step, start, push_sum=True)


def _without(x: Tensor, sent: Tensor, given: Tensor) -> Tensor:
    """Return `x` minus the sent shares, product by product, so that rounding conserves mass."""
    weights, sent = kit.once(given.to(wide(x.dtype))), sent.to(wide(x.dtype))
    return sum((-weight * sent for weight in weights.unbind()), x.to(sent.dtype))


def _check(topology: kit.Topology, rounds: int, delay: int, least_delay: int | None) -> None:
    kit.require_whole("stochastic_gradient_push", rounds=rounds)
    kit.require_whole("stochastic_gradient_push", 0, delay=delay)
    call = f"stochastic_gradient_push(rounds={rounds!r}, delay={delay!r})"
    if least_delay is not None and not 0 <= least_delay <= delay:
        raise ValueError(
            f"stochastic_gradient_push(least_delay={least_delay!r}): messages take from least_delay to delay={delay!r} "
            "steps; give a number from 0 to delay."
        )
    if delay and rounds > 1:
        raise ValueError(f"{call}: later rounds need the answers to earlier ones; use rounds=1 with a delay.")
    if delay and not (smallest := least_self_weight(topology)) > 0:
        raise ValueError(
            f"{call}: {topology.name!r} has a self-weight of {smallest:g}, so with late messages a worker would have "
            "no weight to divide by; use delay=0, or a topology with positive self-weights."
        )
