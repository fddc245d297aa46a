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

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import collectives, gossip
from decentfn.compressors.shaped import matrix_shape, orthonormal
from decentfn.compressors.wire import leaves
from decentfn.core import draws, trees
from decentfn.core.buckets import BucketPlan, loose
from decentfn.topologies import from_matrices, mixing_matrix
from decentfn.topologies.rounds import demanding

Directions = tuple[Tensor, ...]
"""Direction p of each edge, per bucket `[P, K, V]`: by phase and slot. 0: the edge draws one, the same at both ends."""


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
    low_rank = LowRankGossip(_undirected(topology), rank, iterations, seed)

    def step(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (directions,) = state.params, state.memory
        mixed = x
        for i in range(iterations - 1):
            mixed, directions = low_rank.collect(low_rank.post(mixed, directions, t, i), mixed, directions, t)
        posted = low_rank.post(mixed, directions, t, iterations - 1)
        g, local = worker.gradient(x, state.local, batch, t, after=[sent.posted for sent in posted])
        mixed, directions = low_rank.collect(posted, mixed, directions, t, list(g.grads))
        u, local = worker.update(g.grads, g, local, x)
        return kit.State(kit.add(mixed, u), local, Memory(directions)), g.metrics

    return worker.algorithm(step, lambda x: Memory(low_rank.first(x)), whole_buckets=True)


def _undirected(topology: kit.Topology) -> kit.Topology:
    kit.require_doubly_stochastic("power_gossip", topology)
    if topology.cycle is None or topology.start:
        schedule = "has steps that do not repeat" if topology.start else "is random"
        raise ValueError(
            f"power_gossip: {topology.name!r} {schedule}, but an edge stores its direction; use a schedule that "
            "repeats, such as 'static-ring' or 'base', or deep_squeeze."
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


# -- rounds -----------------------------------------------------------------------------------------------------------

_ULPS = 8
"""Difference of products of equal matrices, in units of rounding in float32 or wider: kernels add in another order."""


class LowRankGossip:
    """Rounds of low-rank gossip over `edges`, a schedule with the same slots in both directions.

    Leaves of one dimension are sent uncompressed, in a step's last round.
    """

    def __init__(self, edges: kit.Topology, rank: int, iterations: int, seed: int) -> None:
        self.edges, self.rank, self.iterations, self.seed = edges, rank, iterations, seed

    def first(self, x: kit.Buckets) -> Directions:
        """Return no directions: an edge draws its first one when its ends meet."""
        period, slots = self.edges.sources.shape[0], self.edges.slots
        sizes = [sum(_sizes(plan, self.rank)) for plan in x.plan.buckets]
        return tuple(
            b.new_zeros(period, slots, size, dtype=kit.wide(b.dtype)) for b, size in zip(x, sizes, strict=True)
        )

    def post(self, x: kit.Buckets, directions: Directions, t: Tensor, i: int) -> list[LowRankRound]:
        """Start round i of step t: orthonormal p and the messages X p, for each bucket."""
        period, last = self.edges.sources.shape[0], i == self.iterations - 1
        row, step = collectives.look_up(x[0], self.edges, t), collectives.on_device(x[0], t)
        phase, met = step % period, step // period
        even = (met * self.iterations + i) % 2 == 0  # by the edge's own rounds: it meets once a period
        rounds = []
        for b, (bucket, plan, of_phases) in enumerate(zip(x, x.plan.buckets, directions, strict=True)):
            p = of_phases.index_select(0, phase.view(1))[0]
            drawn = 2 * draws.uniform(self.seed, t, b, p.shape, device=p.device) - 1  # the same at both ends of an edge
            p = torch.where(_spread(p != 0, plan, self.rank), p, drawn.to(p.dtype))
            rounds.append(_post(bucket, plan, self.rank, p, even, last, row))
        return rounds

    def collect(
        self,
        posted: list[LowRankRound],
        x: kit.Buckets,
        directions: Directions,
        t: Tensor,
        after: Sequence[Tensor] = (),
    ) -> tuple[kit.Buckets, Directions]:
        """Finish a round: return the moved parameters, and q in place of p (0 if both ends agree)."""
        row, period = posted[0].posted.row, self.edges.sources.shape[0]
        phase = collectives.on_device(x[0], t) % period
        # + at the end that is i > j, - at the other: q is (X_i - X_j) p at both.
        side = torch.where(row.sources < row.worker, 1.0, -1.0)
        changed, turned = [], []
        for b, (bucket, plan, p) in enumerate(zip(x, x.plan.buckets, directions, strict=True)):
            here = (torch.arange(period, device=p.device) == phase)[:, None, None]
            x_next, q = _collect(posted[b], bucket, plan, self.rank, row.weights[1:], side, after)
            changed.append(x_next)
            turned.append(torch.where(here, q, p))
        return kit.Buckets(changed, x.plan), tuple(turned)


class LowRankRound(NamedTuple):
    """In-flight round of one bucket."""

    p: list[Tensor]  # per leaf that is a matrix [K, L, r], orthonormal, zero below the side it stands for
    posted: kit.Posted  # [K, B]
    even: Tensor  # 0-d bool: the round of X, not of its transpose
    last: bool  # the round that also sends the leaves of one dimension


def _matrices(plan: BucketPlan, rank: int) -> list[tuple[int, int, int] | None]:
    """Return (m, n, r) of each leaf, r <= m and n; None if uncompressed. A leaf takes max(m, n) r values of a p."""
    shapes = [matrix_shape(segment) for segment in plan.segments]
    return [(*shape, min(rank, *shape)) if shape else None for shape in shapes]


def _sizes(plan: BucketPlan, rank: int) -> list[int]:
    return [max(m, n) * r for m, n, r in filter(None, _matrices(plan, rank))]


def _post(
    x: Tensor, plan: BucketPlan, rank: int, p: Tensor, even: Tensor, last: bool, row: collectives.Row
) -> LowRankRound:
    columns, message, orthonormals = iter(p.split(_sizes(plan, rank), 1)), [], []
    for leaf, matrix in zip(leaves(x, plan), _matrices(plan, rank), strict=True):
        if matrix:
            m, n, r = matrix
            long = max(m, n)
            inside = torch.arange(long, device=x.device)[:, None] < torch.where(even, n, m)
            q = orthonormal(next(columns).reshape(p.shape[0], long, r) * inside)
            values = leaf.reshape(m, n).to(q.dtype)
            right, left = values @ q[:, :n], values.T @ q[:, :m]
            own_side = torch.where(
                even,
                torch.nn.functional.pad(right, (0, 0, 0, long - m)),
                torch.nn.functional.pad(left, (0, 0, 0, long - n)),
            )
            orthonormals.append(q)
            message.append(own_side.reshape(p.shape[0], long * r).to(x.dtype))
        elif last:
            message.append(leaf.expand(p.shape[0], -1))
    own = torch.cat(message, 1) if message else x.new_empty(p.shape[0], 0)
    return LowRankRound(orthonormals, gossip.post(loose([own], [plan]), row), even, last)


def _collect(
    posted: LowRankRound, x: Tensor, plan: BucketPlan, rank: int, weights: Tensor, side: Tensor, after: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the bucket after the round, and q `[K, V]`."""
    dtype = kit.wide(x.dtype)
    own, flags = posted.posted.own[0], posted.posted.flags
    theirs = gossip.arrived(posted.posted, [own], after=after)[0].to(dtype)
    difference = own.to(dtype) - theirs
    if flags is not None:
        difference = torch.where(flags.own, difference, torch.zeros_like(difference))
    weights = weights.to(dtype)
    changed, turned, start = [], [], 0
    p = iter(posted.p)
    for leaf, matrix in zip(leaves(x, plan), _matrices(plan, rank), strict=True):
        if not matrix and not posted.last:
            changed.append(leaf)
            continue
        size = max(matrix[:2]) * matrix[2] if matrix else leaf.shape[0]
        d = difference[:, start : start + size]
        start += size
        if matrix:
            m, n, r = matrix
            # Noise has no direction. Both ends see the same maxima, and so agree.
            scale = torch.maximum(*(x[:, start - size : start].abs().amax(1, True) for x in (own.to(dtype), theirs)))
            is_noise = d.abs().amax(1, True) <= max(torch.finfo(x.dtype).eps, _ULPS * torch.finfo(dtype).eps) * scale
            turned.append(torch.where(is_noise, 0.0, side.to(dtype)[:, None] * d))
            d, q = d.reshape(d.shape[0], max(m, n), r), next(p)
            left = torch.where(posted.even, d, q)[:, :m] * weights[:, None, None]
            right = torch.where(posted.even, q, d)[:, :n]
            move = torch.einsum("kmr,knr->mn", left, right).reshape(-1)
        else:
            move = (weights[:, None] * d).sum(0)
        changed.append((leaf.to(dtype) - move).to(x.dtype))
    return torch.cat(changed), torch.cat(turned, 1) if turned else difference[:, :0]


def _spread(different: Tensor, plan: BucketPlan, rank: int) -> Tensor:
    """Set all entries of an edge's matrix in `different` (`[K, V]` bool) to True if any of them is."""
    pieces = different.split(_sizes(plan, rank), 1)
    return torch.cat([piece.any(1, keepdim=True).expand_as(piece) for piece in pieces], 1) if pieces else different
