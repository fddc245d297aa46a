"""What a topology promises, computed when asked for: stochastic, connected, exact after so many steps, its gap, its cost.

Small schedules are measured by singular values, large ones by applying their rounds, random ones by drawing some.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from decentfn.topologies import matrices
from decentfn.topologies.rounds import Topology, require_topology

_STEPS_SAMPLED = 64
_STEPS_AVERAGED = 256
_LARGEST_DENSE = 512
_ROUNDING = 1e-12
_KRYLOV = 64


@dataclass(frozen=True)
class Certificate:
    """The facts of a topology; of a random one those of its first 64 rounds, its contraction of 512."""

    name: str
    num_workers: int
    period: int | None
    """Steps after which the schedule repeats; None for a random one."""
    degree: int
    """Messages that a worker sends in a step, at most."""
    is_doubly_stochastic: bool
    """Rows and columns of every round sum to 1 and no entry is negative (1e-12)."""
    is_column_stochastic: bool
    """Columns of every round do: the mean is kept."""
    is_symmetric: bool
    """Every round's matrix is symmetric."""
    is_connected: bool
    """Over a period, what one worker knows reaches every other."""
    steps_to_consensus: int | None
    """Steps from t = 0 after which all hold the exact mean (to rounding), within a period; None if there are none."""
    spectral_gap: float | None
    """1 - the second largest singular value of the product over a period; None for a random schedule."""
    expected_contraction: float | None
    """Of a random schedule what it has in the gap's place: ρ, the largest eigenvalue of E[(W - J)ᵀ(W - J)] (Boyd et al.,
    2006). The expected squared disagreement shrinks at least by ρ a step, where rounds are drawn independently:
    E‖x_t - x̄‖² <= ρᵗ ‖x_0 - x̄‖². None for a schedule that repeats. Estimated from its own draws, with a standard error
    of at most 0.03: the direction that shrinks least in steps 0 to 255, and by how much it does in steps 256 to 511."""
    messages_per_step: float
    """Messages that a worker sends in a step, on average over workers and steps."""
    payloads_per_step: float
    """Payloads that a worker sends in a step, on average: messages, and 2(r-1)/r for an all-reduce of r workers."""

    def bytes_per_step(self, payload_bytes: float) -> float:
        """Bytes that a worker sends in a step, on average, where what it mixes has `payload_bytes`."""
        return self.payloads_per_step * payload_bytes


def certificate(topology: Topology) -> Certificate:
    """Measure what `topology` promises: for 4,096 workers seconds, half a minute if its period has thousands of steps.

    >>> from decentfn.topologies import one_peer_exp
    >>> facts = certificate(one_peer_exp(8))
    >>> facts.steps_to_consensus, facts.spectral_gap, facts.bytes_per_step(100)
    (3, 1.0, 100.0)
    """
    require_topology("certificate", topology)
    schedule = _Schedule(topology)
    n, ones, starts = topology.num_workers, np.ones(topology.num_workers), schedule.random(4)
    keeps_mean = keeps_consensus = is_nonnegative = is_symmetric = True
    messages, means, links = [], [], []
    for this in map(schedule.round, range(schedule.steps)):
        keeps_mean &= bool(np.abs(this.apply_transposed(ones) - 1).max() <= _ROUNDING)
        keeps_consensus &= bool(np.abs(this.apply(ones) - 1).max() <= _ROUNDING)
        is_nonnegative &= this.smallest >= -_ROUNDING
        is_symmetric &= bool(np.abs(this.apply(starts) - this.apply_transposed(starts)).max() <= _ROUNDING)
        messages.append(this.messages)
        means.append(this.mean_payloads)
        links.append(np.stack(this.links()))
    sources, receivers = np.concatenate(links, axis=1)
    return Certificate(
        name=topology.name,
        num_workers=n,
        period=topology.period,
        degree=topology.degree,
        is_doubly_stochastic=keeps_mean and keeps_consensus and is_nonnegative,
        is_column_stochastic=keeps_mean,
        is_symmetric=is_symmetric,
        is_connected=matrices.is_connected(sources, receivers, n),
        steps_to_consensus=schedule.steps_to_consensus,
        spectral_gap=schedule.spectral_gap,
        expected_contraction=schedule.expected_contraction,
        messages_per_step=float(np.mean(messages)),
        payloads_per_step=float(np.mean(messages) + np.mean(means)),
    )


def consensus_steps(topology: Topology) -> int | None:
    """Steps from t = 0 after which all workers hold the exact mean, to rounding.

    Looked for within one period, with random vectors as parameters: 0 for one worker, None if disagreement remains (as
    for every random schedule).
    """
    require_topology("consensus_steps", topology)
    return _Schedule(topology).steps_to_consensus


def spectral_gap(topology: Topology) -> float | None:
    """`1 - ‖W_(P-1) ... W_0 - J‖₂` of one period; None for a random schedule (see `Certificate.expected_contraction`).

    Exact for up to 512 workers; beyond, by ARPACK, which applies the rounds. A push-sum schedule keeps no consensus, so
    that its number is of J in place of its own limit.
    """
    require_topology("spectral_gap", topology)
    return _Schedule(topology).spectral_gap


class _Round:
    """One round: `W = S + diag(m) A`, S sparse, A the mean within the groups, m its weights."""

    def __init__(self, topology: Topology, t: int) -> None:
        from scipy.sparse import coo_array

        this, n = topology.round(t), topology.num_workers
        me = np.arange(n)
        heard = np.concatenate([me[:, None], this.heard.numpy()], axis=1)
        i, weights = np.repeat(me, heard.shape[1]), this.weights.numpy()
        self.sparse = coo_array((weights.ravel(), (i, heard.ravel())), shape=(n, n)).tocsr()
        self.messages = float((this.destinations >= 0).sum()) / n
        self.groups, self.sizes, self.mean_weights, self.mean_payloads = me, np.ones(n), None, 0.0
        if this.groups is not None and this.mean_weights is not None:
            self.groups, self.mean_weights = this.groups.numpy(), this.mean_weights.numpy()
            self.sizes = np.bincount(self.groups)
            self.mean_payloads = float((2 * np.maximum(self.sizes - 1, 0)).sum()) / n

    def apply(self, x: np.ndarray) -> np.ndarray:
        """`W x`, of `[N]` or `[N, D]`."""
        y = self.sparse @ x
        return y if self.mean_weights is None else y + (self.mean_weights * self._means(x).T).T

    def apply_transposed(self, x: np.ndarray) -> np.ndarray:
        """`Wᵀ x`, of `[N]` or `[N, D]`."""
        y = self.sparse.T @ x
        return y if self.mean_weights is None else y + self._means((self.mean_weights * x.T).T)

    def _means(self, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(self.sizes), *x.shape[1:]))
        np.add.at(sums, self.groups, x)
        return (sums.T / np.maximum(self.sizes, 1)).T[self.groups]

    @property
    def smallest(self) -> float:
        """The least weight that a worker gives to itself, another one or the mean of its group."""
        if self.mean_weights is None:
            return float(self.sparse.data.min())
        entries = self.sparse.copy()
        entries.setdiag(self.sparse.diagonal() + self.mean_weights / self.sizes[self.groups])
        return float(min(entries.data.min(), self.mean_weights.min()))

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """From whom to whom something travels; a group is a circle of its members."""
        receivers, sources = self.sparse.nonzero()
        if self.mean_weights is None:
            return sources, receivers
        members = np.nonzero(self.mean_weights)[0]
        members = members[np.argsort(self.groups[members], kind="stable")]
        groups, after = self.groups[members], np.roll(members, -1)
        after[np.flatnonzero(np.diff(groups, append=-1))] = members[np.flatnonzero(np.diff(groups, prepend=-1))]
        return np.concatenate([sources, members]), np.concatenate([receivers, after])


class _Schedule:
    """The rounds of one period, or of the first steps of a random schedule; a short one's are kept."""

    def __init__(self, topology: Topology) -> None:
        self.num_workers, self.is_random = topology.num_workers, topology.period is None
        self.steps = _STEPS_SAMPLED if topology.period is None else topology.period
        self.round = lru_cache(2**24 // topology.weights[0].numel())(lambda t: _Round(topology, t))

    def random(self, columns: int) -> np.ndarray:
        """`[N, columns]`, the same for every schedule, off the consensus."""
        x = np.random.RandomState(0).standard_normal((self.num_workers, columns))
        return x - x.mean(0)

    @cached_property
    def _disagreements(self) -> list[float]:
        """Disagreement of random vectors after each step of a period, relative to the start, until it reaches zero."""
        x = self.random(4)
        start, left = np.abs(x).max(), [1.0]
        for t in range(self.steps):
            x = self.round(t).apply(x)
            left.append(float(np.abs(x - x.mean(0)).max() / start))
            if left[-1] <= _ROUNDING:
                break
        return left

    @property
    def steps_to_consensus(self) -> int | None:
        if self.num_workers == 1:
            return 0
        if self.is_random:
            return None
        # A sudden end; what merely decays as far does not drop a thousandfold in one step.
        *_, before, last = self._disagreements
        return len(self._disagreements) - 1 if last <= min(_ROUNDING, before / 1e3) else None

    @property
    def spectral_gap(self) -> float | None:
        n, rounds = self.num_workers, range(self.steps)
        if self.is_random or n == 1:
            return None if self.is_random else 1.0
        if n <= _LARGEST_DENSE:
            product = np.eye(n)
            for t in rounds:
                product = self.round(t).apply(product)
            return 1.0 - float(np.linalg.norm(product - 1.0 / n, 2))
        if self._disagreements[-1] <= _ROUNDING:
            return 1.0

        def squared(x: np.ndarray) -> np.ndarray:
            """`MᵀM x`, M the product off the consensus."""
            x = x - x.mean()
            for t in rounds:
                x = self.round(t).apply(x)
            x = x - x.mean()
            for t in reversed(rounds):
                x = self.round(t).apply_transposed(x)
            return x - x.mean()

        return 1.0 - float(np.sqrt(max(self._largest(squared)[0], 0.0)))

    @property
    def expected_contraction(self) -> float | None:
        """By fresh draws, along the direction that shrinks least in others.

        Where many directions shrink alike the largest eigenvalue of one mean of draws is too large by 1/√steps.
        """
        if not self.is_random:
            return None

        def squared(x: np.ndarray) -> np.ndarray:
            """The mean of `(W - J)ᵀ(W - J) x`."""
            total = np.zeros_like(x)
            for this in map(self.round, range(_STEPS_AVERAGED)):
                total += this.apply_transposed(this.apply(x - x.mean(0)))
            return (total - total.mean(0)) / _STEPS_AVERAGED

        if self.num_workers <= _LARGEST_DENSE:
            slowest = np.linalg.eigh(squared(np.eye(self.num_workers)))[1][:, -1]
        else:
            slowest = self._largest(squared)[1]
        slowest = slowest - slowest.mean()
        fresh = map(self.round, range(_STEPS_AVERAGED, 2 * _STEPS_AVERAGED))
        return float(np.mean([np.sum(this.apply(slowest) ** 2) for this in fresh]) / np.sum(slowest**2))

    def _largest(self, apply: Any) -> tuple[float, np.ndarray]:
        """The largest eigenvalue and its vector (ARPACK)."""
        from scipy.sparse.linalg import LinearOperator, eigsh

        kernel: Any = LinearOperator
        operator = kernel((self.num_workers,) * 2, matvec=lambda x: apply(x.ravel()), dtype=np.float64)
        values, vectors = eigsh(operator, 1, which="LA", v0=self.random(1)[:, 0], ncv=_KRYLOV)
        return float(values[0]), vectors[:, 0]
