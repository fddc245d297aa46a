"""A²CiD²: gossip in pairs, accelerated by a second copy of the parameters (Nabli, Belilovsky, Oyallon, NeurIPS 2023).

    (x, x̃) ← ½ [[1 + e, 1 - e], [1 - e, 1 + e]] (x, x̃),  e = exp(-2 η̂)
    d = x - x_j
    x⁺ = x - ½ d + u(x, g(x))                                                  (arXiv:2306.08289)
    x̃⁺ = x̃ - α̃ d + u(x, g(x))

x: a worker's parameters; x̃: their second copy, at the start x; j: the worker it meets in this step (d = 0 without one);
u: the optimizer's update at the gradient g; η̂: the rate at which the copies exchange; α̃: the strength of a meeting in
the second copy. With the Laplacian Λ of the expected meetings per step and its pseudo-inverse Λ⁺,

    η̂ = 1 / (2 √(χ₁ χ₂));   α̃ = ½ √(χ₁ / χ₂)
    χ₁ = 1 / λ₂(Λ);   χ₂ = ½ max (e_i - e_j)ᵀ Λ⁺ (e_i - e_j), over the pairs that meet.

The paper's time is continuous, and gradients and meetings occur at random; here a step is one unit of time with one
gradient and one meeting at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.core import require
from decentfn.topologies import mixing_matrix

_SAMPLED = 256
"""Rounds from which the expected meetings of a random or long schedule are estimated."""


class Memory(NamedTuple):
    """Memory of one worker."""

    copy: kit.Buckets  # x̃
    averaged = ("copy",)  # over the workers, by df.resize
    restart = kit.restarting("copy")

    def without_lost(self, x: kit.Buckets, mean: Callable[[kit.Buckets], kit.Buckets]) -> Memory:
        """Start the copy anew: the mean of those that are left would differ from that of x, and pull it along."""
        return Memory(kit.copy_wide(x))


@kit.algorithm
def a2cid2(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    eta: float | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Mix in pairs; a second copy of the parameters adds a momentum to the mixing.

    On a badly connected graph agreement takes about √(χ₁ χ₂) meetings per worker instead of χ₁: on a ring of N workers
    a multiple of N instead of N². On random pairs of all workers there is nothing to gain.
    Overlaps: everything; the parameters are sent before the gradient. Workers send only x; x̃ stays their own.
    Sent per step: the parameters, once, to the worker of this step's pair.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: a schedule of pairs with weight 1/2: `ring`, `one-peer-exp`, `random-matching`, or your own. Random
            pairs are the paper's.
        eta: η̂ >= 0; None computes it from the topology (from 256 rounds, if it is random). 0 is gossip in pairs.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: η̂ negative, a topology with a round that is not made of pairs with weight 1/2, or whose pairs do not
            connect all workers.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    optimal, alpha = rates(topology)
    rate = optimal if eta is None else eta
    require(rate >= 0, "a2cid2", "η̂ is the rate at which two copies exchange, >= 0.", eta=eta)
    exchanged = kit.as_input("a2cid2", "eta", (1 - math.exp(-2 * rate)) / 2)
    strength = kit.as_input("a2cid2", "topology", 2 * alpha)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (copy,) = state.params, state.memory
        share, factor = kit.at(exchanged, t, x), kit.at(strength, t, x)
        flow = kit.each(lambda x, copy: share * (copy - x), x, copy)
        x = kit.each(lambda x, flow: (x + flow).to(x.dtype), x, flow)
        copy = kit.each(torch.sub, copy, flow)
        posted = worker.post(x, t)
        g, local = worker.gradient(x, state.local, batch, t, after=posted)
        u, local = worker.update(g.grads, g, local, x)
        pull = kit.difference(posted, after=g.grads)  # -½ d
        copy = kit.each(lambda copy, pull, u: copy + factor * pull + u, copy, pull, u)
        x = kit.repaired(posted, kit.each(lambda x, pull, u: (x + pull + u).to(x.dtype), x, pull, u))
        return kit.State(x, local, Memory(copy)), g.metrics

    return worker.algorithm(step, lambda x: Memory(kit.copy_wide(x)))


def rates(topology: kit.Topology) -> tuple[float, float]:
    """Return η̂ and α̃ of a schedule; raise ValueError unless pairs with weight 1/2 connect all workers."""
    n, rounds = topology.num_workers, min(topology.period or _SAMPLED, _SAMPLED)
    matrices = torch.stack([mixing_matrix(topology, t) for t in topology.steps(_SAMPLED)])
    others = matrices - torch.diag_embed(matrices.diagonal(dim1=1, dim2=2))
    if not torch.equal(others, others.mT) or not ((others == 0) | (others == 0.5)).all() or (others.sum(2) > 0.5).any():
        raise ValueError(
            f"a2cid2(topology={topology.name!r}): workers meet in pairs and average with weight 1/2; use 'ring', "
            "'one-peer-exp', 'random-matching' or another schedule of pairs."
        )
    if n == 1:
        return 0.0, 0.5
    matrices, others = matrices[-rounds:], others[-rounds:]  # without the start
    laplacian = 2 * (torch.eye(n, dtype=torch.float64) - matrices.mean(0))
    gap = float(torch.linalg.eigvalsh(laplacian)[1])
    require(gap >= 1e-9, "a2cid2", "its pairs do not connect all workers; use 'ring'.", topology=topology.name)
    inverse = torch.linalg.pinv(laplacian, hermitian=True)
    resistance = inverse.diagonal()[:, None] + inverse.diagonal() - 2 * inverse
    chi1, chi2 = 1 / gap, 0.5 * float(resistance[others.sum(0) > 0].max())
    return 1 / (2 * math.sqrt(chi1 * chi2)), 0.5 * math.sqrt(chi1 / chi2)
