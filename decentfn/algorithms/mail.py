"""Building blocks of algorithms whose workers wait for nobody: push-sum with the mail that has arrived.

A worker's mass, and in the simulator its messages in flight, are its `Memory`; `Mail` takes and offers by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import collectives, gossip
from decentfn.core import require
from decentfn.core.buckets import loose


class Memory(NamedTuple):
    """Memory of one worker."""

    weight: Tensor  # w, 0-d float64
    ring: collectives.Ring  # its messages in flight in the simulator; ranks have them in their mailboxes

    def restart(self, x: kit.Buckets) -> Memory:
        """Keep all mass, also that in flight in the simulator, and give it the new parameters."""
        boxes = tuple(b.to(box.dtype).expand_as(box).clone() for b, box in zip(x, self.ring.values, strict=True))
        return self._replace(ring=self.ring._replace(values=boxes))


class Mail:
    """Mail of an algorithm whose workers wait for nobody: parameters z with a share of their mass, on `schedule`.

    Raises:
        ValueError: the worker's topology averages in groups or has a self-weight of 0; the worker has `shared` parameters, is
            several processes, or agrees on a loss scale. `call` is the algorithm's name.
    """

    def __init__(self, call: str, worker: kit.Worker, schedule: kit.Topology) -> None:
        topology = worker.topology
        rule = "averages in groups, for which all of a group wait; use a schedule of messages, such as 'base'."
        require(not topology.has_groups, call, rule, topology=topology.name)
        smallest = least_self_weight(topology)
        rule = f"a self-weight of {smallest:g}: a worker would give all of its mass away, and divide by nothing; use positive ones."
        require(smallest > 0, call, rule, topology=topology.name)
        rule = "mail carries all parameters; leave it out, or use stochastic_gradient_push."
        require(worker.options["shared"] is None, call, rule, shared=worker.options["shared"])
        rule = "the processes of a worker would take different mail; each worker is one process."
        require(worker.partition.processes == 1, call, rule, processes_per_worker=worker.partition.processes)
        rule = "df.dynamic_loss_scale(agree=True) needs all workers in the same step; pass agree=False, a scale for each worker."
        require(worker.scaling is None or not worker.scaling.agree, call, rule)
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

    def take(self, z: kit.Buckets, memory: Memory, t: Tensor, *, late: bool = False) -> tuple[kit.Buckets, Memory]:
        """Return z and the memory with the mail that has arrived before own step `t`; late: since then.

        In a guarded step bad values are dropped first, together with their mass: the mail is then taken as it is.
        """
        w = memory.weight
        if not late:
            z, w = self._unless_bad(z, w)
        *new, w = collectives.take([*z, w], memory.ring, self._schedule, t, late)
        return kit.Buckets(new, z.plan), memory._replace(weight=w)

    def offer(self, moved: kit.Buckets, memory: Memory, t: Tensor, z: kit.Buckets) -> tuple[kit.Buckets, Memory]:
        """Offer the updated z at the end of own step `t`; return it, and the memory with the mass that stays.

        In a guarded step it is `z`, that before the update, if the updated one is bad: all mass is kept. So it is if the
        message is bad, as a narrow wire may make it.
        """
        z = kit.unless_bad(moved, lambda: z)
        sent, offered = self._unless_bad(kit.Buckets(self._sent(z), z.plan), memory.weight)
        given, ring = collectives.offer(list(sent), offered, memory.ring, self._schedule, t)
        w = memory.weight - given
        if self._worker.wire_dtype is not None:  # what rounding takes from the messages stays here
            share = given / w.clamp(min=collectives.LEAST)
            z = kit.each(lambda b, q: b + share.to(b.dtype) * (b - q.to(b.dtype)), z, sent)
        return z, Memory(w, ring)

    @staticmethod
    def _unless_bad(z: kit.Buckets, w: Tensor) -> tuple[kit.Buckets, Tensor]:
        """Return both, or zeros if a guarded step finds that one is bad: without mass, z counts for nothing."""
        *values, w = kit.unless_bad(loose([*z, w[None]]))
        return kit.Buckets(values, z.plan), w[0]

    def algorithm(
        self,
        step: Callable[[kit.State, kit.PyTree, Tensor], tuple[kit.State, kit.Metrics]],
        start: Callable[[kit.Buckets], Any],
        schedules: tuple[kit.Topology, ...] = (),
    ) -> kit.Algorithm:
        """Return the algorithm of this step and first memory, whose `init` opens the mailbox."""
        made = self._worker.algorithm(
            step, start, topology=self._schedule, push_sum=True, own_steps=True, whole_buckets=True, schedules=schedules
        )

        def init(params: kit.PyTree, buffers: kit.PyTree = None) -> kit.State:
            state = made.init(params, buffers)
            collectives.open_mailbox(self._schedule, self._sent(state.params), state.params)
            return state

        return made._replace(init=init)


def least_self_weight(topology: kit.Topology) -> float:
    """Return the smallest self-weight of a schedule's tables and of sample rounds."""
    own = [topology.weights[..., 0], *(topology.round(t).weights[:, 0] for t in topology.steps())]
    return min(float(weights.min()) for weights in own)
