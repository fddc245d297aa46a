"""Streaming DiLoCo: DiLoCo, a fragment of the parameters at a time, its communication behind the next steps.

    θ ← θ + u(θ, g(θ))                       in every step         (Douillard et al., 2025; arXiv:2501.18512)
    Δ_p = φ_p - mean_i θ_{i,p}               launched after s steps, s ≡ ⌊(p+1) H / P⌋ (mod H), and applied τ later:
    b_p⁺ = β b_p + Δ_p
    φ_p⁺ = φ_p - η (Δ_p + β b_p⁺)
    θ_p ← (1 - α) φ_p⁺ + α θ_p

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; p = 0 … P-1: a fragment; Δ: the outer gradient; b: the outer momentum, β: how much of it is kept;
η: the outer learning rate; α: how much of its own θ a worker keeps; H: steps between two rounds of a fragment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import gossip, trees
from decentfn.algorithms.agreement import algorithm
from decentfn.algorithms.hyperparameters import require_fractions, require_positive, require_whole
from decentfn.algorithms.outer import is_due, outer_gradient, to_send
from decentfn.algorithms.worker import Algorithm, LossFn, Metrics, Options, Worker, as_step
from decentfn.buckets import Buckets, add, copy_wide, each, where, zeros_like
from decentfn.topologies import Topology
from decentfn.trees import PyTree


class StreamingDiLoCoState(NamedTuple):
    """The state of one worker."""

    params: Buckets  # θ
    opt_state: PyTree
    phi: Buckets  # outer parameters, the same on all workers
    b: Buckets  # outer momentum, likewise
    delta: Buckets | None  # outer gradients that were heard and wait to be applied; None where delay <= 1
    buffers: PyTree = None

    def with_params(self, x: Buckets) -> StreamingDiLoCoState:
        """The outer parameters are the new ones; the outer momentum and gradients start anew."""
        delta = None if self.delta is None else zeros_like(x)
        return self._replace(params=x, phi=copy_wide(x), b=zeros_like(x), delta=delta)


@algorithm
def streaming_diloco(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    inner_steps: int = 100,
    num_fragments: int = 4,
    delay: int = 1,
    alpha: float = 0.5,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[Options],
) -> Algorithm:
    """Average one fragment at a time, each every H steps, while training goes on.

    Fragment p is the p-th of P equal slices of every bucket: as large as any other, and spread over the whole depth
    of the model. (The outer step is elementwise, so borders of leaves do not matter to it.)
    Everything overlaps if `delay >= 1`: a fragment's message is posted before the forward pass of the step after its
    launch and waited for after that step's backward pass; if `delay > 1` what was heard then waits in the state.
    A slower link wants more fragments, not a longer delay.
    With a narrow `wire_dtype` the differences φ - θ travel (the workers must then start equal).
    Sent: 2(N-1)/N times a P-th of the parameters, in P of H steps; in all other steps nothing.
    With `num_fragments=1, delay=0, alpha=0` it is `diloco`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: only its `num_workers` counts: outer steps average over everyone.
        inner_steps: H >= 1.
        num_fragments: P, from 1 to H, so that no two fragments travel in one step.
        delay: τ, from 0 to H - 1.
        alpha: α in [0, 1]; 0 takes the outer parameters alone.
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: a hyperparameter outside its range.
    """
    worker = Worker(loss_fn, optimizer, topology, **options)
    require_whole("streaming_diloco", inner_steps=inner_steps, num_fragments=num_fragments)
    require_whole("streaming_diloco", 0, delay=delay)
    require_positive("streaming_diloco", outer_learning_rate=outer_learning_rate)
    require_fractions("streaming_diloco", alpha=alpha, outer_momentum=outer_momentum)
    if num_fragments > inner_steps or delay >= inner_steps:
        raise ValueError(
            f"streaming_diloco(inner_steps={inner_steps}, num_fragments={num_fragments}, delay={delay}): a fragment "
            "has a step of its own and is applied before its next round, so num_fragments <= inner_steps and "
            "delay < inner_steps; take more inner steps."
        )
    eta, beta, wire = outer_learning_rate, outer_momentum, worker.wire_dtype
    offsets = [(p + 1) * inner_steps // num_fragments for p in range(num_fragments)]

    def init(params: PyTree, buffers: PyTree = None) -> StreamingDiLoCoState:
        x = worker.start(params)
        opt_state, phi, buffers = optimizer.init(x), copy_wide(x), trees.map(torch.clone, buffers)
        return StreamingDiLoCoState(x, opt_state, phi, zeros_like(x), zeros_like(x) if delay > 1 else None, buffers)

    def launch(theta: Buckets, phi: Buckets, t: Tensor, done: Tensor) -> list[gossip.Posted]:
        """Send the fragment whose turn it is after `done` steps, if there is one."""
        sent = gossip.narrow(to_send(phi, theta, wire), wire)
        fragments = zip(*[bucket.tensor_split(num_fragments) for bucket in sent], strict=True)
        return [
            gossip.post(Buckets(fragment, phi.plan), worker.everyone, t, when=is_due(done, inner_steps, offset))
            for fragment, offset in zip(fragments, offsets, strict=True)
        ]

    def collect(travelling: list[gossip.Posted], phi: Buckets) -> Buckets:
        """The outer gradient of the fragments that have arrived."""
        slices = zip(*[gossip.collect(posted) for posted in travelling], strict=True)
        return outer_gradient(phi, Buckets([torch.cat(s) for s in slices], phi.plan), wire)

    def turn(like: Buckets, done: Tensor) -> Buckets:
        """Per element, whether it belongs to the fragment whose turn it is after `done` steps."""
        dues = [is_due(done, inner_steps, offset) for offset in offsets]
        slices = [bucket.tensor_split(num_fragments) for bucket in like]
        return Buckets(
            [torch.cat([d.to(s.device).expand(s.shape) for d, s in zip(dues, ss, strict=True)]) for ss in slices],
            like.plan,
        )

    def step(state: StreamingDiLoCoState, batch: PyTree, t: int | Tensor) -> tuple[StreamingDiLoCoState, Metrics]:
        t = as_step(t)
        theta, opt_state, phi, b, waiting, buffers = state
        if delay:
            travelling = launch(theta, phi, t, t)
        g = worker.gradient(theta, buffers, batch)
        u, opt_state = optimizer.update(g.grads, opt_state, theta)
        theta = add(theta, u)
        if not delay:
            travelling = launch(theta, phi, t, t + 1)
        delta = collect(travelling, phi)
        if waiting is not None:
            delta = waiting = where(turn(phi, t), delta, waiting)
        b_new = each(lambda b, delta: beta * b + delta, b, delta)
        phi_new = each(lambda phi, delta, b: phi - eta * (delta + beta * b), phi, delta, b_new)
        theta_new = each(lambda phi, theta: (1 - alpha) * phi + alpha * theta, phi_new, theta)
        due = turn(phi, t + 1 - delay)
        new = StreamingDiLoCoState(
            where(due, theta_new, theta),
            opt_state,
            where(due, phi_new, phi),
            where(due, b_new, b),
            waiting,
            g.buffers,
        )
        return new, g.metrics

    return worker.algorithm(init, step)
