"""DeMuon: Muon on a tracked mean of the workers' momenta (He et al., 2025; arXiv:2510.01377).

    m⁺ = (1 - λ) m + λ g
    v⁺ = W (v + m⁺ - m)
    x⁺ = W (x - η msgn(v⁺))

x: a worker's parameters; g: its gradient at x; m: a moving average of its gradients, λ the weight of a new one; v: its
estimate of the mean of all m, mean(v) = mean(m) at every step, v = m in the first; W: the mixing matrix; msgn: the
orthogonal polar factor of a matrix, leaf by leaf; -η msgn(v): the optimizer's update for msgn(v).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.core import require, trees
from decentfn.optim.transforms import Transform, by_leaf
from decentfn.optim.transforms.shaped import orthogonalize
from decentfn.topologies import later


class Memory(NamedTuple):
    """Memory of one worker."""

    v: kit.Buckets  # tracker of the mean momentum
    m: kit.Buckets  # this worker's own momentum
    started: Tensor  # 0-d bool: a step was taken
    restart = kit.restarting()


@kit.algorithm
def demuon(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    momentum: float = 0.1,
    gossip_rounds: int = 1,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Step along the orthogonal factor of a gossiped estimate of the mean momentum, matrix by matrix.

    A leaf of two or more axes is the matrix of its first axis by all others. Other leaves have no orthogonal factor:
    there the optimizer sees v itself, as in `gradient_tracking`. Give them another one with `df.transforms.partition`.
    Step t first completes the last step's `W v`, with the last step's mixing matrix.
    Overlaps: nothing; v waits for the gradient and x for v.
    Sent per step: the parameters and the tracker, each once per neighbor (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees msgn(v). The paper uses sgd(η).
        topology: any doubly stochastic schedule.
        momentum: λ in (0, 1], the weight of the new gradient; without matrices, 1 is `gradient_tracking`.
        gossip_rounds: R >= 1; more than one are fast gossip averaging, on one symmetric mixing matrix (`kit.Worker.mix`).
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: λ outside (0, 1], a push-sum topology; from `init`, leaves sharded over the processes of a worker.
    """
    require(0 < momentum <= 1, "demuon", "λ, the weight of a new gradient, is in (0, 1].", momentum=momentum)
    worker = kit.Worker(loss_fn, optimizer, topology, gossip_rounds=gossip_rounds, **options)
    msgn = by_leaf(Transform(lambda params: (), lambda v, state, params: (trees.map(_msgn, v), state)))
    weight = kit.as_input("demuon", "momentum", momentum)
    late = later(1, topology)  # v is completed with the last step's matrix

    def start(x: kit.Buckets) -> Memory:
        msgn.init(x)
        return Memory(kit.zeros_like(x), kit.zeros_like(x), torch.zeros((), dtype=torch.bool, device=x[0].device))

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (v, m, started) = state.params, state.memory
        share = kit.at(weight, t, x)
        g, local = worker.gradient(x, state.local, batch, t)
        m_new = g.keep(kit.each(lambda m, g: (1 - share) * m + share * g.to(m.dtype), m, g.grads), m)
        v = kit.where(started, worker.mix(kit.add(v, kit.each(torch.sub, m_new, m)), t, late), m_new)
        direction, _ = msgn.update(v, (), x)
        u, local = worker.update(kit.cast_like(direction, x), g, local, x)
        x = worker.mix(kit.add(x, u), t)
        return kit.State(x, local, Memory(v, m_new, torch.ones_like(started))), g.metrics

    return worker.algorithm(step, start)


def _msgn(leaf: Tensor) -> Tensor:
    if leaf.dim() < 2 or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    return orthogonalize(leaf.flatten(1)).reshape(leaf.shape)
