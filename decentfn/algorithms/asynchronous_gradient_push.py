"""Asynchronous gradient push (Assran, Rabbat, IEEE TAC 66(1), 2021; arXiv:1803.08950): workers wait for nobody.

In its own step k, worker i takes the messages (z_j, m_j) that have arrived, trains, and offers shares of its mass w:

    z ← (w z + Σ m_j z_j) / (w + Σ m_j);    w ← w + Σ m_j;    w⁰ = 1
    z ← z - η g(z)
    send (z, a_ji w) to the out-neighbors j of round k;    w ← w - Σ_j a_ji w

z: a worker's parameters; w: its push-sum weight, the mass with which they count; a_ji: the mixing weight of the round of
its *own* step; -η g: the optimizer's update. If the last message to j still travels, or w would fall below 2^-20, that
mass stays. So memory is bounded, and a slow, stopped or lost worker slows nobody. Σ w z and Σ w, messages in flight
included, change only by updates.

Fast workers take more steps. In the paper worker i moves w z by η_i g, so that workers at rates r_i minimize Σ r_i f_i
unless η_i ∝ 1/r_i. Here it moves z by η g, and w z by η w g, as in GoSGD (Blot, Picard, Cord, Thome, 2016;
arXiv:1611.09726): on doubly stochastic schedules mass flows to the slow workers until all r_i w_i are equal, which is that
step size without the need to know the rates. It also bounds the step where nothing arrives for long: η, and not η / w.
Mass that stays because a message still travels keeps a part of the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import collectives, gossip
from decentfn.core.arguments import require
from decentfn.core.buckets import loose
from decentfn.timing import LEAST_MASS
from decentfn.topologies import every as every_steps

_CALL = "asynchronous_gradient_push"
_SAMPLED = 64
"""Rounds of a schedule whose self-weights are checked."""


class Memory(NamedTuple):
    """Memory of one worker."""

    weight: Tensor  # w, 0-d float64
    ring: collectives.Ring  # its messages in flight in the simulator; ranks have them in their mailboxes

    def restart(self, x: kit.Buckets) -> Memory:
        """Keep all mass, also that in flight in the simulator, and give it the new parameters."""
        boxes = tuple(b.to(box.dtype).expand_as(box).clone() for b, box in zip(x, self.ring.values, strict=True))
        return self._replace(ring=self.ring._replace(values=boxes))


@kit.algorithm
def asynchronous_gradient_push(
    loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, *, every: int = 1, **options: Unpack[kit.Options]
) -> kit.Algorithm:
    """Push-sum in which each worker takes its own steps, as fast as it can; `t` is the worker's own step.

    On ranks each process is a worker, and `t` differs between them: end the loop with `df.data.until`, and call
    `df.settle(state)` before anything that all workers do together (means, evaluation of replicas, checkpoints). In the
    simulator all workers step at once, and each message is taken in the next step; with a `df.timing.Trace`, steps and
    arrivals are those of a recorded or predicted run (`df.simulate(step, N, arrivals=trace)`).

    Sent per step: the parameters, and 16 bytes, to each out-neighbor whose last message has arrived. A message travels
    while its sender goes on. `init` opens connections, with a thread for each neighbor's mail in and out.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees z and the gradient there.
        topology: any schedule of messages with positive self-weights, column-stochastic ones too.
        every: H >= 1: a worker offers messages in every H-th of its own steps.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: `every` < 1, averages in groups, a self-weight of 0, `shared`, workers of several processes, or a loss scale that
            all workers agree on.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole(_CALL, every=every)
    mail = Mail(_CALL, worker, every_steps(every, topology) if every > 1 else topology)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        z, memory = mail.take(state.params, state.memory, t)
        g, local = worker.gradient(z, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, z)
        z, memory = mail.offer(kit.add(z, u), memory, t)
        return kit.State(z, local, memory), g.metrics

    return mail.algorithm(step, mail.start)


class Mail:
    """Mail of an algorithm whose workers wait for nobody: parameters z with a share of their mass, on `schedule`.

    Raises:
        ValueError: the worker's topology averages in groups or has a self-weight of 0; the worker has `shared` parameters, is
            several processes, or agrees on a loss scale. `call` is the algorithm's name.
    """

    def __init__(self, call: str, worker: kit.Worker, schedule: kit.Topology) -> None:
        _check(call, worker.topology, worker)
        self._worker, self._schedule = worker, schedule

    def start(self, z: kit.Buckets) -> Memory:
        """Return a worker's first memory: mass 1, and nothing in flight."""
        is_simulated = collectives.world().size < self._schedule.num_workers
        places, w = int(is_simulated), torch.ones((), dtype=torch.float64, device=z[0].device)
        values, shares = self._sent(z), w.new_zeros((places, self._schedule.slots))
        to = torch.full_like(shares, -1, dtype=torch.int64)
        return Memory(w, collectives.Ring(tuple(x.new_zeros((places, len(x))) for x in values), shares, to))

    def _sent(self, z: kit.Buckets) -> list[Tensor]:
        wire = self._worker.wire_dtype
        return [gossip.narrow(b, plan.dtype, wire) for b, plan in zip(z, z.plan.buckets, strict=True)]

    def take(self, z: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        """Return z and the memory with the mail that has arrived before own step `t`."""
        sums, mass = collectives.take(list(z), memory.ring, self._schedule, t)
        z, w = with_mail(z, memory.weight, sums, mass)
        return z, memory._replace(weight=w)

    def offer(self, z: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        """Offer z at the end of own step `t`; return it, and the memory with the mass that stays."""
        w = memory.weight
        # Drop bad values together with their mass: a worker without mass sends nothing, and takes the next mail as it is.
        *values, w = kit.unless_bad(loose([*z, w[None]]), lambda: kit.each(torch.zeros_like, loose([*z, w[None]])))
        z, w, sent = kit.Buckets(values, z.plan), w[0], self._sent(kit.Buckets(values, z.plan))
        given, ring = collectives.offer(sent, w, memory.ring, self._schedule, t)
        w = w - given
        if self._worker.wire_dtype is not None:  # what rounding takes from the messages stays here
            z = kit.each(lambda b, q: b + (given / w).to(b.dtype) * (b - q.to(b.dtype)), z, kit.Buckets(sent, z.plan))
        return z, Memory(w, ring)

    def algorithm(
        self,
        step: Callable[[kit.State, kit.PyTree, Tensor], tuple[kit.State, kit.Metrics]],
        start: Callable[[kit.Buckets], Any],
        schedules: tuple[kit.Topology, ...] = (),
    ) -> kit.Algorithm:
        """Return the algorithm of this step and first memory, whose `init` opens the mailbox."""
        made = self._worker.algorithm(
            step, start, topology=self._schedule, push_sum=True, own_steps=True, schedules=schedules
        )

        def init(params: kit.PyTree, buffers: kit.PyTree = None) -> kit.State:
            state = made.init(params, buffers)
            collectives.open_mailbox(self._schedule, self._sent(state.params))
            return state

        return made._replace(init=init)


def with_mail(z: kit.Buckets, w: Tensor, sums: list[Tensor], mass: Tensor) -> tuple[kit.Buckets, Tensor]:
    """Return z and w after mail of `mass`, `sums` its differences from z times their mass, so equal values stay."""
    total = w + mass
    divisor = kit.once(total.clamp(min=LEAST_MASS))  # less is none, after bad values, and then no mail has come
    return kit.each(lambda b, s: (b + s / divisor.to(s.dtype)).to(b.dtype), z, kit.Buckets(sums, z.plan)), total


def _check(call: str, topology: kit.Topology, worker: kit.Worker) -> None:
    if topology.has_groups:
        raise ValueError(
            f"{call}: {topology.name!r} averages in groups, for which all of a group wait; use a schedule of messages, such as "
            "'one-peer-exp'."
        )
    smallest = min(float(topology.round(t).weights[:, 0].min()) for t in topology.steps(_SAMPLED))
    if not smallest > 0:
        raise ValueError(
            f"{call}: {topology.name!r} has a self-weight of {smallest:g}, so a worker would give all of its mass away and have "
            "no weight to divide by; use a topology with positive self-weights."
        )
    rule = "mail carries all parameters; leave it out, or use stochastic_gradient_push."
    require(worker.shared is None, call, rule, shared=worker.shared)
    if worker.within_worker.processes > 1:
        raise ValueError(
            f"{call}: a worker of {worker.within_worker.processes} processes, which would take different mail; each worker is "
            "one process."
        )
    if worker.scaling is not None and worker.scaling.agree:
        raise ValueError(
            f"{call}: df.dynamic_loss_scale(agree=True) needs all workers in the same step; pass agree=False, so each worker has its own scale."
        )
