"""PowerGossip: gossip by low-rank approximations of differences (Vogels, Karimireddy, Jaggi, NeurIPS 2020).

On an edge i-j, for a parameter as matrix X (first axis x all others):

    p ← orth(p);    the two exchange X_i p and X_j p;    q = (X_i - X_j) p    for i > j
    X_i -= W_ij q pᵀ;    X_j += W_ij q pᵀ
    this edge's next round transposes X and starts from q

and a step is x⁺ = PowerGossip(x) + u(x, g(x)).

x: a worker's parameters; W: the symmetric mixing matrix of step t; u: the optimizer's update at the gradient g of the
worker's own, unmixed x; p: the edge's direction, r columns, the same at both ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Unpack

from decentfn import collectives, draws, gossip
from decentfn.buckets import BucketPlan
from decentfn.compressors.shaped import matrix_shape, orthonormal
from decentfn.compressors.wire import leaves
from decentfn.kit import (
    Algorithm,
    Buckets,
    LossFn,
    Metrics,
    Options,
    State,
    Worker,
    add,
    algorithm,
    require_doubly_stochastic,
    wide,
)
from decentfn.topologies import Topology, from_matrices, mixing_matrix
from decentfn.trees import PyTree


class Memory(NamedTuple):
    """What a worker remembers."""

    directions: tuple[Tensor, ...]  # p of each edge, per bucket [P, K, V]: by phase and slot

    def restart(self, x: Buckets) -> Memory:
        """The directions stay: they say where to look for differences, and move no parameters."""
        return self


@algorithm
def power_gossip(
    loss_fn: LossFn,
    optimizer: Any,
    topology: Topology,
    *,
    rank: int = 1,
    iterations: int = 1,
    seed: int = 0,
    **options: Unpack[Options],
) -> Algorithm:
    """Send the parameters times a few columns while the gradient is computed; move along what the difference shows.

    No step size to tune. On square matrices with r = n it is adapt_while_communicate. Leaves of one dimension are mixed
    uncompressed, once a step. An edge whose ends agree takes its first direction again. With r > 1 runs that differ by
    rounding come apart slowly: where the difference has a lower rank, its last columns are rounding.
    The last round overlaps with the gradient; with more than one, each waits for the one before.
    Sent per step and neighbour: max(m, n) r values for each m x n matrix and iteration (an edge takes X and Xᵀ by turns,
    and one graph sends messages of one size), and the leaves of one dimension.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: undirected (W symmetric) in every step and not random: an edge remembers its direction.
        rank: r >= 1, columns of p (min(m, n) where a matrix has fewer).
        iterations: rounds in a step, >= 1; one is the paper's default.
        seed: of the first directions.
        options: `bucket_mb`; see `Options`.

    Raises:
        ValueError: a directed or random topology, rank or iterations not positive, `wire_dtype`.
    """
    for name, value in (("rank", rank), ("iterations", iterations)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"power_gossip({name}={value!r}): expected an integer >= 1.")
    if options.get("wire_dtype") is not None:
        raise ValueError("power_gossip(wire_dtype=...): what travels is low rank already; choose a smaller rank.")
    worker = Worker(loss_fn, optimizer, topology, **options)
    edges = _undirected(topology)

    def start(x: Buckets) -> Memory:
        plans = enumerate(x.plan.buckets)
        return Memory(tuple(_first(edges, plan, rank, seed, b).to(x[b].device) for b, plan in plans))

    def post(x: Buckets, directions: tuple[Tensor, ...], t: Tensor, i: int) -> list[_Posted]:
        """Start round i of step t: orthonormal p and the messages X p, for each bucket."""
        period, last = edges.sources.shape[0], i == iterations - 1
        phase, met = t % period, t // period
        even = (met * iterations + i) % 2 == 0  # by the edge's own rounds: it meets once a period
        return [
            _post(
                bucket, plan, rank, p.index_select(0, phase.to(p.device).view(1))[0], even.to(p.device), last, edges, t
            )
            for bucket, plan, p in zip(x, x.plan.buckets, directions, strict=True)
        ]

    def collect(posted: list[_Posted], x: Buckets, directions: tuple[Tensor, ...], t: Tensor) -> tuple[Buckets, Any]:
        """Finish a round: the parameters moved, and q in the place of p."""
        this = edges.round(t)
        me = collectives.worker_index(x[0]).view(1)
        # + at the end that is i > j, - at the other: q is (X_i - X_j) p at both.
        side = torch.where(this.sources.to(me.device).index_select(0, me)[0] < me, 1.0, -1.0)
        weights = gossip.row(this, x[0]).weights[1:]
        moved, turned = [], []
        for b, (bucket, plan, p) in enumerate(zip(x, x.plan.buckets, directions, strict=True)):
            fresh = _first(edges, plan, rank, seed, b).to(p.device)
            here = (torch.arange(p.shape[0]) == t % p.shape[0]).to(p.device)[:, None, None]
            x_next, q = _collect(posted[b], bucket, plan, rank, weights, side)
            q_or_fresh = torch.where(_spread(q != 0, plan, rank), q, fresh)
            moved.append(x_next)
            turned.append(torch.where(here, q_or_fresh, p))
        return Buckets(moved, x.plan), tuple(turned)

    def step(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        x, (directions,) = state.params, state.memory
        mixed = x
        for i in range(iterations - 1):
            mixed, directions = collect(post(mixed, directions, t, i), mixed, directions, t)
        posted = post(mixed, directions, t, iterations - 1)
        g, local = worker.gradient(x, state.local, batch, t)
        mixed, directions = collect(posted, mixed, directions, t)
        u, local = worker.update(g.grads, g, local, x)
        return State(add(mixed, u), local, Memory(directions)), g.metrics

    return worker.algorithm(step, start)


class _Posted(NamedTuple):
    """One bucket's round on its way."""

    p: list[Tensor]  # per leaf that is a matrix [K, L, r], orthonormal, zero below the side it stands for
    own: Tensor  # [K, B], this worker's messages
    inbox: Tensor  # [K, B], its neighbours'
    even: Tensor  # 0-d bool: the round of X, not of its transpose
    last: bool  # the round in which the leaves of one dimension travel, too


def _matrices(plan: BucketPlan, rank: int) -> list[tuple[int, int, int] | None]:
    """(m, n, r) of each leaf, r <= m and n; None for one that goes uncompressed. It takes max(m, n) r values of a p."""
    shapes = [matrix_shape(segment) for segment in plan.segments]
    return [(*shape, min(rank, *shape)) if shape else None for shape in shapes]


def _sizes(plan: BucketPlan, rank: int) -> list[int]:
    return [max(m, n) * r for m, n, r in filter(None, _matrices(plan, rank))]


def _first(edges: Topology, plan: BucketPlan, rank: int, seed: int, bucket: int) -> Tensor:
    """Random directions, the same at both ends of an edge, `[P, K, V]`."""
    shape = (edges.sources.shape[0], edges.sources.shape[2], sum(_sizes(plan, rank)))
    return (2 * draws.uniform(seed, 0, bucket, shape) - 1).to(wide(plan.dtype))


def _post(
    x: Tensor, plan: BucketPlan, rank: int, p: Tensor, even: Tensor, last: bool, edges: Topology, t: Tensor
) -> _Posted:
    columns, message = iter(p.split(_sizes(plan, rank), 1)), []
    orthonormals = []
    for leaf, matrix in zip(leaves(x, plan), _matrices(plan, rank), strict=True):
        if matrix:
            m, n, r = matrix
            long = max(m, n)
            inside = torch.arange(long, device=x.device)[:, None] < torch.where(even, n, m)
            q = orthonormal(next(columns).reshape(p.shape[0], long, r) * inside)
            values = leaf.reshape(m, n).to(q.dtype)
            right, left = values @ q[:, :n], values.T @ q[:, :m]
            own_side = torch.where(even, pad(right, (0, 0, 0, long - m)), pad(left, (0, 0, 0, long - n)))
            orthonormals.append(q)
            message.append(own_side.reshape(p.shape[0], long * r).to(x.dtype))
        elif last:
            message.append(leaf.expand(p.shape[0], -1))
    own = torch.cat(message, 1) if message else x.new_empty(p.shape[0], 0)
    return _Posted(orthonormals, own, collectives.exchange(own, edges.peers, t, per_slot=True), even, last)


def _collect(
    posted: _Posted, x: Tensor, plan: BucketPlan, rank: int, weights: Tensor, side: Tensor
) -> tuple[Tensor, Tensor]:
    """The bucket after the round, and q `[K, V]`."""
    dtype = wide(x.dtype)
    difference = posted.own.to(dtype) - collectives.wait(posted.inbox).to(dtype)
    weights = weights.to(dtype)
    moved, turned, start = [], [], 0
    p = iter(posted.p)
    for leaf, matrix in zip(leaves(x, plan), _matrices(plan, rank), strict=True):
        if not matrix and not posted.last:
            moved.append(leaf)
            continue
        size = max(matrix[:2]) * matrix[2] if matrix else leaf.shape[0]
        d = difference[:, start : start + size]
        start += size
        if matrix:
            m, n, r = matrix
            turned.append(side.to(dtype)[:, None] * d)
            d, q = d.reshape(d.shape[0], max(m, n), r), next(p)
            left = torch.where(posted.even, d, q)[:, :m] * weights[:, None, None]
            right = torch.where(posted.even, q, d)[:, :n]
            move = torch.einsum("kmr,knr->mn", left, right).reshape(-1)
        else:
            move = (weights[:, None] * d).sum(0)
        moved.append((leaf.to(dtype) - move).to(x.dtype))
    return torch.cat(moved), torch.cat(turned, 1) if turned else difference[:, :0]


def _spread(different: Tensor, plan: BucketPlan, rank: int) -> Tensor:
    """`[K, V]` bool -> the same, true for all of an edge's matrix where it is true for any of its values."""
    pieces = different.split(_sizes(plan, rank), 1)
    return torch.cat([piece.any(1, keepdim=True).expand_as(piece) for piece in pieces], 1) if pieces else different


def _undirected(topology: Topology) -> Topology:
    """The same matrices with slots whose partner is the same both ways."""
    require_doubly_stochastic("power_gossip", topology)
    if topology.period is None:
        raise ValueError(
            f"power_gossip: {topology.name!r} is random, but an edge remembers its direction; use a schedule that "
            "repeats, such as 'static-ring' or 'one-peer-exp', or deep_squeeze."
        )
    matrices = torch.stack([mixing_matrix(topology, phase) for phase in range(topology.period)])
    asymmetry = float((matrices - matrices.mT).abs().max())
    if asymmetry > 1e-12:
        raise ValueError(
            f"power_gossip: a mixing matrix of {topology.name!r} differs from its transpose by {asymmetry:.3g}, but both "
            "ends of an edge move towards each other, which needs W = Wᵀ; use an undirected topology such as "
            "'static-ring', or deep_squeeze."
        )
    return from_matrices(topology.name, matrices)
