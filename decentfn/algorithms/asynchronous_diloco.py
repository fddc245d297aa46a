"""DiLoCo of workers that wait for nobody: local steps and an own outer step, whose parameters travel by push-sum.

    φ ← (w φ + Σ m_j φ_j) / (w + Σ m_j);    w ← w + Σ m_j       in every own step, with the mail that has arrived
    d ← d + u(θ, g(θ)),    θ = φ + d

    after every H own steps, first the mail that has arrived since, as above, and then
    b ← β b - d
    φ ← φ + η (d - β b);    d ← 0
    send (φ, a_ji w) to the out-neighbors j of this round;    w ← w - Σ_j a_ji w

φ: a worker's outer parameters; w: the mass with which they count, w⁰ = 1; d: its progress since its last outer step; θ:
the parameters at which it trains; g: its gradient; u: the inner optimizer's update; b: its outer momentum, β: its decay;
η: the outer learning rate; m_j, φ_j: a message; a_ji: the mixing weight of the round of its *own* step.

It is the peer-to-peer form of asynchronous local SGD (Liu et al., 2024; arXiv:2401.09135), whose workers send their
progress to a server: asynchronous gradient push of φ (Assran, Rabbat, 2021; arXiv:1803.08950) with DiLoCo's outer step
(Douillard et al., 2023; arXiv:2311.08105) in place of a gradient step. Momentum sees the worker's own progress and no
mail, so Σ w φ and Σ w, messages in flight included, change only by outer steps. A stale message delays nothing and is not
a stale gradient: it is a mean of parameters, which needs no delayed momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms import mail as mails
from decentfn.algorithms.outer import after_steps, nesterov
from decentfn.comm import collectives


class Memory(NamedTuple):
    """Memory of one worker."""

    mail: mails.Memory  # w, and in the simulator what is in flight
    d: kit.Buckets  # progress since the last outer step, wide
    b: kit.Buckets  # outer momentum, wide
    averaged = ("d", "b")  # over the workers, by df.resize

    def restart(self, x: kit.Buckets) -> Memory:
        """Keep all mass, give it the new parameters, and begin a round there without momentum."""
        return Memory(self.mail.restart(x), kit.zeros_like(x), kit.zeros_like(x))


@kit.algorithm
def asynchronous_diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 50,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H own steps, take an outer step along the own progress, and offer the result to the neighbors.

    Own steps, arrivals, `df.data.until` and `df.settle` are as in `asynchronous_gradient_push`. `df.params(state)` are the
    outer parameters φ, which mail and outer steps move; the loss is that of φ + d.

    There is no `compressor=`: mail is parameters with a share a/w of the mass, not progress. Error feedback on d would
    change the outer step and send as much; C(φ) in a message leaves a / (w - a) times φ - C(φ) with the sender, so only a
    precise C would do, and `wire_dtype=torch.bfloat16` is one.

    Sent: the parameters, and 16 bytes, to each out-neighbor whose last message has arrived, in every H-th own step.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: the schedule of rounds, by the number of the own round: any of messages with positive self-weights.
        inner_steps: H >= 1; the outer step follows own steps H-1, 2H-1, …
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: H < 1, η not positive, β outside [0, 1], and what `asynchronous_gradient_push` refuses.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("asynchronous_diloco", inner_steps=inner_steps)
    outer = nesterov("asynchronous_diloco", outer_learning_rate, outer_momentum)
    schedule, due = (after_steps(inner_steps, one) for one in (topology, worker.everyone))  # due: also in an idle round
    mail = mails.Mail("asynchronous_diloco", worker, schedule)

    def start(x: kit.Buckets) -> Memory:
        return Memory(mail.start(x), kit.zeros_like(x), kit.zeros_like(x))

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        (phi, letters), (_, d, b) = mail.take(state.params, state.memory.mail, t), state.memory
        theta = kit.add(phi, d)
        g, local = worker.gradient(theta, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, theta)
        d = kit.unless_bad(kit.add(d, u))
        before = phi
        if not kit.rests(due):
            phi, letters = mail.take(phi, letters, t, late=True)
            is_due = (collectives.own_step(phi[0], t, 0) + 1) % inner_steps == 0
            u, b_new = outer.update(kit.each(torch.neg, d), b, phi)
            before, phi, b = phi, kit.where(is_due, kit.add(phi, u), phi), kit.where(is_due, b_new, b)
            d = kit.where(is_due, kit.each(torch.zeros_like, d), d)
        phi, letters = mail.offer(phi, letters, t, before)
        return kit.State(phi, local, Memory(letters, d, b)), g.metrics

    return mail.algorithm(step, start, schedules=(due,))
