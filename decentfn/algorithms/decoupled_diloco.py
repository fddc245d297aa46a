"""Decoupled DiLoCo: fragments are averaged over the workers that trained, weighted by their tokens.

    θ ← θ + u(θ, g(θ))                          in every step      (Douillard et al., 2026; arXiv:2604.21428)
    w = tokens² / steps                         since fragment p's last merge
    Δ_p = Σ_i w_i (φ_p - θ_{i,p}) / Σ_i w_i     after s steps, s ≡ ⌊(p+1) H / P⌋ (mod H), if enough have trained, and then
    b_p⁺ = β b_p + Δ_p
    φ_p⁺ = φ_p - η (Δ_p + β b_p⁺)
    θ_p ← φ_p⁺

θ: a worker's (inner) parameters; g: its gradient; u: the inner optimizer's update; φ: the outer parameters, the same
on all workers; p = 0 … P-1: a fragment; w_i: a worker's weight, from its tokens and the steps in which it had any; Δ: the
outer gradient; b: the outer momentum, β: its decay; η: the outer learning rate; H: steps between two merges of a
fragment.

The paper's learners run at their own speed and send to a server, which waits for a quorum and a grace period. Here there
is no server, all workers take every step, and one that is behind takes steps without tokens, or is late for a merge and
brings its progress to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Feedback, Fragments, Nesterov, no_weight, progress
from decentfn.comm import collectives, gossip
from decentfn.core import arguments, buckets
from decentfn.gradient.loss import takes


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    b: kit.Buckets  # outer momentum, likewise
    tokens: Tensor  # [P], this worker's since each fragment's last merge
    steps: Tensor  # [P], its steps with tokens since then
    error: kit.Buckets | None = None  # error of compressed progress; None without a compressor
    averaged = ("phi", "b", "tokens", "steps", "error")  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def decoupled_diloco(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 100,
    num_fragments: int = 4,
    quorum: int = 1,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    weight: Callable[[kit.PyTree], Tensor] | None = None,
    arrives: Callable[[Tensor, Tensor], Tensor] | None = None,
    compressor: kit.Compressor | None = None,
    error_decay: float = 1.0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Average one fragment at a time over the workers that had tokens; wait for a quorum of them.

    Fragment p is the p-th of P equal slices of every bucket. If fewer than `quorum` workers trained since its last merge,
    it waits for its next turn, and training continues.
    With `num_fragments=1` and equal weights it is `diloco`, with more of them `streaming_diloco(delay=0, alpha=0)`.
    A worker that is late for a merge (`arrives`) keeps its own parameters and counts, and brings its progress since the
    outer parameters of then to the fragment's next merge. The outer parameters stay the same on all.
    Sent: 2(N-1)/N times 1/P of the parameters, in P of H steps, after the update, so it does not overlap with the
    gradient, and before them two numbers, for which all wait; nothing in all other steps.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer; its state stays the worker's own.
        topology: only its `num_workers` counts: merges average over all workers.
        inner_steps: H >= 1.
        num_fragments: P, from 1 to H, so that a step sends at most one fragment.
        quorum: workers that must have trained for a merge, from 1 to N.
        outer_learning_rate: η > 0.
        outer_momentum: β in [0, 1], Nesterov's.
        weight: function from the loss's aux to this worker's number of tokens in a step, 0-d and >= 0; 0: it did not
            train, and its progress does not count. None: 1 in every step.
        arrives: function from the step (0-d int64) and the worker's number (0-d int64) to a 0-d bool: does the worker
            deliver before the grace window of this step's merge ends? The same on all ranks, such as
            `lambda t, worker: df.draws.uniform(seed, t, 0, (), worker=worker) < 0.9`. None: always. Workers take their
            steps together, so this models lateness; it does not make a rank wait less.
        compressor: C of what is averaged, with error feedback; as for `diloco`.
        error_decay: its decay, in [0, 1].
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a hyperparameter outside its range; from `init`, unequal parameters.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    weigh = kit.as_weight("decoupled_diloco", weight)
    kit.require_whole("decoupled_diloco", inner_steps=inner_steps, num_fragments=num_fragments, quorum=quorum)
    n = topology.num_workers
    if num_fragments > inner_steps or quorum > n:
        raise ValueError(
            f"decoupled_diloco(inner_steps={inner_steps}, num_fragments={num_fragments}, quorum={quorum}): a fragment has "
            f"a step of its own, so num_fragments <= inner_steps, and there are {n} workers; take more inner steps, or a "
            "smaller quorum."
        )
    nesterov = Nesterov("decoupled_diloco", outer_learning_rate, outer_momentum)
    is_function = callable(arrives) and takes(arrives, 2)
    arguments.require(
        arrives is None or is_function, "decoupled_diloco", "a function of t and the worker.", arrives=arrives
    )
    feedback = Feedback("decoupled_diloco", compressor, error_decay, worker, options, sends_progress=True)
    fragments = Fragments(num_fragments, inner_steps, feedback.everyone)
    schedules = fragments.schedules(-1)

    def start(x: kit.Buckets) -> Memory:
        tokens, steps = (no_weight(x, num_fragments) for _ in range(2))
        return Memory(kit.copy_wide(x), kit.zeros_like(x), tokens, steps, feedback.start(x))

    def shares(delta: kit.Buckets, tokens: Tensor, steps: Tensor, t: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return n w_i / Σ_j w_j of each fragment, and whether it is due, [P] bool."""
        found, dues = [], []
        for p, (pieces, schedule) in enumerate(zip(fragments.split(list(delta)), schedules, strict=True)):
            own = torch.stack([tokens[p] ** 2 / steps[p].clamp(min=1), (steps[p] > 0).to(steps.dtype)])
            own = gossip.beside(pieces, own)
            weight, trained = gossip.mean(buckets.loose([own]), schedule, t)[0].unbind()
            found.append(kit.once(torch.where(weight != 0, own[0] / weight, torch.zeros_like(weight))))
            dues.append(kit.is_active(schedule, t, delta) & (trained > (quorum - 0.5) / n))
        return found, torch.stack(dues)

    def merged(
        phi: kit.Buckets, delta: kit.Buckets, error: kit.Buckets | None, own: list[Tensor], t: Tensor
    ) -> tuple[kit.Buckets, kit.Buckets | None]:
        """Return Δ of all fragments, and the error that it leaves; a worker without weight sends zeros."""
        share = fragments.mask(delta, torch.stack(own))
        counted = kit.each(lambda d, s: torch.where(s != 0, d, 0.0), delta, share)
        delta = buckets.with_own(kit.each(lambda d, s: d * s.to(d.dtype), counted, share), counted)
        fed = None if error is None else kit.each(lambda e, s: torch.where(s != 0, e, 0.0), error, share)
        posted, left = feedback.post_fragments(fragments, delta, fed, schedules, t)
        return feedback.mean_of_fragments(fragments, posted, phi), left

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        theta, (phi, b, tokens, steps, error) = state.params, state.memory
        g, local = worker.gradient(theta, state.local, batch, t, weight=weigh)
        u, local = worker.update(g.grads, g, local, theta)
        theta = kit.unless_bad(kit.add(theta, u), lambda: phi)
        now = torch.ones_like(tokens[0]) if g.weight is None else g.weight.to(tokens.dtype)
        tokens, steps = tokens + now, steps + (now > 0)
        if kit.rests(*schedules):
            return kit.State(theta, local, Memory(phi, b, tokens, steps, error)), g.metrics
        is_here = torch.ones_like(now, dtype=torch.bool)
        if arrives is not None:
            is_here = arrives(collectives.on_device(now, t), collectives.look_up(now, worker.everyone, t).worker)
        delta = progress(phi, theta)
        own, due = shares(delta, tokens * is_here, steps * is_here, t)
        delta, left = merged(phi, delta, error, own, t)
        phi_new, b_new = nesterov.step(phi, b, delta, t)
        mask = fragments.mask(phi, due)
        tokens, steps = (torch.where(due & is_here, torch.zeros_like(count), count) for count in (tokens, steps))
        mine = fragments.mask(phi, due & is_here)
        error = None if error is None or left is None else kit.where(mine, left, error)
        memory = Memory(kit.where(mask, phi_new, phi), kit.where(mask, b_new, b), tokens, steps, error)
        return kit.State(kit.where(mine, phi_new, theta), local, memory), g.metrics

    return worker.algorithm(
        step, start, topology=worker.everyone, schedules=schedules, must_equal=("params",), whole_buckets=True
    )
