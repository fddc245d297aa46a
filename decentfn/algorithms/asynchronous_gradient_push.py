"""Asynchronous gradient push (Assran, Rabbat, IEEE TAC 66(1), 2021; arXiv:1803.08950): workers wait for nobody.

In its own step k, worker i takes the messages (z_j, m_j) that have arrived, trains, takes those that have arrived during
the gradient, and offers shares of its mass w:

    z ← (w z + Σ m_j z_j) / (w + Σ m_j);    w ← w + Σ m_j;    w⁰ = 1
    g ← g(z)
    z ← (w z + Σ m_j z_j) / (w + Σ m_j);    w ← w + Σ m_j       with the mail since then
    z ← z - η g
    send (z, a_ji w) to the out-neighbors j of round k;    w ← w - Σ_j a_ji w

z: a worker's parameters; w: its push-sum weight, the mass with which they count; a_ji: the mixing weight of the round of
its *own* step; -η g: the optimizer's update. If the last message to j still travels, or w would fall below 2^-20, that
mass stays. So memory is bounded, and a slow, stopped or lost worker slows nobody. Σ w z and Σ w, messages in flight
included, change only by updates. A gradient takes most of a step: mail that came during it would wait for the next one,
and the mass that it brings would not be moved by this update, which moves Σ w z by w η g.

Fast workers take more steps. In the paper worker i moves w z by η_i g, so that workers at rates r_i minimize Σ r_i f_i
unless η_i ∝ 1/r_i. Here it moves z by η g, and w z by η w g, as in GoSGD (Blot, Picard, Cord, Thome, 2016;
arXiv:1611.09726): on doubly stochastic schedules mass flows to the slow workers until all r_i w_i are equal, which is that
step size without the need to know the rates. It also bounds the step where nothing arrives for long: η, and not η / w.
Mass that stays because a message still travels keeps a part of the bias.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from decentfn import kit
from decentfn.algorithms.mail import Mail
from decentfn.topologies import every as every_steps

_CALL = "asynchronous_gradient_push"


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
        z, memory = mail.take(z, memory, t, late=True)
        z, memory = mail.offer(kit.add(z, u), memory, t, z)
        return kit.State(z, local, memory), g.metrics

    return mail.algorithm(step, mail.start)
