"""PowerGossip: gossip by low-rank approximations of differences (Vogels, Karimireddy, Jaggi, NeurIPS 2020).

On an edge i-j, for a parameter as matrix X (first axis x all others):

    p ← orth(p);    exchange X_i p and X_j p;    q = (X_i - X_j) p    for i > j
    X_i -= W_ij q pᵀ;    X_j += W_ij q pᵀ
    this edge's next round transposes X and starts from q

and a step is x⁺ = PowerGossip(x) + u(x, g(x)).

x: a worker's parameters; W: the symmetric mixing matrix of step t; u: the optimizer's update at the gradient g of its
own, unmixed x; p: the edge's direction, r columns, the same at both ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm.gossip.low_rank import Directions, LowRankGossip
from decentfn.core import trees
from decentfn.topologies import from_matrices, mixing_matrix
from decentfn.topologies.rounds import demanding


class Memory(NamedTuple):
    """Memory of one worker."""

    directions: Directions

    def restart(self, x: kit.Buckets) -> Memory:
        """Forget the directions: an edge may have other ends."""
        return Memory(trees.map(torch.zeros_like, self.directions))


@kit.algorithm
def power_gossip(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    rank: int = 1,
    iterations: int = 1,
    seed: int = 0,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Send low-rank products of the parameters while the gradient is computed; mix along the difference.

    There is no step size to tune. On square matrices with r = n it is adapt_while_communicate. One-dimensional leaves
    are mixed uncompressed, once per step. An edge whose ends agree, up to rounding, draws a new direction. Runs that differ by
    rounding diverge (r = 1, 8 x 5 matrices, different data: from 1e-10 to over 1e-3 in 96 steps); if r exceeds the difference's rank,
    its last columns are rounding errors.
    The last round overlaps with the gradient; with more than one, each waits for the one before.
    Sent per step and neighbor: max(m, n) r values for each m x n matrix and iteration (an edge alternates X and Xᵀ, and
    one graph sends messages of one size), and the one-dimensional leaves.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: undirected (W symmetric) in every step, and repeating from step 0 on: an edge stores its direction.
        rank: r >= 1, columns of p (at most min(m, n)).
        iterations: rounds per step, >= 1; the paper's default is 1.
        seed: seed of the first directions.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that is directed, random or has a start (`until`, `later`), rank or iterations not positive, `wire_dtype`.
    """
    kit.require_whole("power_gossip", rank=rank, iterations=iterations)
    if options.get("wire_dtype") is not None:
        raise ValueError("power_gossip(wire_dtype=...): messages are low-rank already; choose a smaller rank.")
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    gossip = LowRankGossip(_undirected(topology), rank, iterations, seed)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (directions,) = state.params, state.memory
        mixed = x
        for i in range(iterations - 1):
            mixed, directions = gossip.collect(gossip.post(mixed, directions, t, i), mixed, directions, t)
        posted = gossip.post(mixed, directions, t, iterations - 1)
        g, local = worker.gradient(x, state.local, batch, t, after=[sent.posted for sent in posted])
        mixed, directions = gossip.collect(posted, mixed, directions, t, list(g.grads))
        u, local = worker.update(g.grads, g, local, x)
        return kit.State(kit.add(mixed, u), local, Memory(directions)), g.metrics

    return worker.algorithm(step, lambda x: Memory(gossip.first(x)), whole_buckets=True)


def _undirected(topology: kit.Topology) -> kit.Topology:
    kit.require_doubly_stochastic("power_gossip", topology)
    if topology.cycle is None or topology.start:
        schedule = "has steps that do not repeat" if topology.start else "is random"
        raise ValueError(
            f"power_gossip: {topology.name!r} {schedule}, but an edge stores its direction; use a schedule that "
            "repeats, such as 'static-ring' or 'one-peer-exp', or deep_squeeze."
        )
    matrices = torch.stack([mixing_matrix(topology, phase) for phase in topology.cycle])
    asymmetry = float((matrices - matrices.mT).abs().max())
    if asymmetry > 1e-12:
        raise ValueError(
            f"power_gossip: a mixing matrix of {topology.name!r} differs from its transpose by {asymmetry:.3g}, but "
            "both ends of an edge move toward each other, which needs W = Wᵀ; use an undirected topology such as "
            "'static-ring', or deep_squeeze."
        )
    edges = from_matrices(topology.name, matrices)

    def keeps_edges(other: kit.Topology) -> None:
        """Raise ValueError unless phase and slot of `edges`, by which directions are stored, name one edge of `other`."""
        _undirected(other)
        rounds = map(other.round, other.cycle or ())
        if edges.sources.shape[0] % (other.period or 1) or not all(
            torch.equal(r.sources, r.destinations) for r in rounds
        ):
            raise ValueError(f"power_gossip: {other!r} has other edges at the same phase and slot of {edges!r}.")

    return demanding(edges, keeps_edges)
