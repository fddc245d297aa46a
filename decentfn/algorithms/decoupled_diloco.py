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
from decentfn.algorithms.outer import Fragments, nesterov, no_weight, progress, rounds, step_and_worker
from decentfn.core.arguments import require
from decentfn.gradient.loss import takes


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # outer parameters, the same on all workers
    b: kit.PyTree  # outer momentum, likewise, None if β = 0; or the outer optimizer's state
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
    outer_optimizer: Any = None,
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
        outer_optimizer: a pair `(init, update)` in place of η and β, as for `streaming_diloco`; it counts a fragment's merges.
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
    n, worker = topology.num_workers, kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("decoupled_diloco", quorum=quorum)
    require(quorum <= n, "decoupled_diloco", f"there are {n} workers; take a smaller quorum.", quorum=quorum)
    require(arrives is None or takes(arrives, 2), "decoupled_diloco", "a function (t, worker).", arrives=arrives)
    outer_optimizer = nesterov("decoupled_diloco", outer_learning_rate, outer_momentum, outer_optimizer)
    feedback = compressor, error_decay, worker, True
    loop = Fragments("decoupled_diloco", inner_steps, num_fragments, outer_optimizer, *feedback)

    def start(x: kit.Buckets) -> Memory:
        return Memory(kit.copy_wide(x), loop.init(x), no_weight(x, loop.count), no_weight(x, loop.count), loop.start(x))

    def count(memory: Memory, weight: Tensor | None) -> Memory:
        now = torch.ones_like(memory.tokens[0]) if weight is None else weight.to(memory.tokens.dtype)
        return memory._replace(tokens=memory.tokens + now, steps=memory.steps + (now > 0))

    def outer(theta: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        phi, b, *counts, error = memory
        is_here = True if arrives is None else arrives(*step_and_worker(memory.steps, worker.everyone, t))
        tokens, steps = (x * is_here for x in counts)
        sent, takes_part, trained = loop.weighted(progress(phi, theta), tokens**2 / steps.clamp(min=1), steps > 0, t)
        merges = loop.turn(phi, loop.launches, t) & (trained > (quorum - 0.5) / n)
        mine = merges & is_here
        delta, error = loop.post(phi, sent, error, t, merges & takes_part)[1]()
        phi, b, _ = loop.step(merges, phi, b, delta)
        tokens, steps = (torch.where(mine, 0.0, x) for x in counts)
        return kit.where(loop.mask(phi, mine), phi, theta), Memory(phi, b, tokens, steps, error)

    step = rounds(worker, loop.launches, outer, weight=kit.as_weight("decoupled_diloco", weight), count=count)
    return loop.algorithm(step, start, loop.launches, outer_optimizers=(outer_optimizer,))
