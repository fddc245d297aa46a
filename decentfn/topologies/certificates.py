"""Certificates of topologies: stochasticity, connection, steps to consensus, spectral gap and cost.

Small schedules are measured by singular values, large ones by applying their rounds, random ones by sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from decentfn.core.arguments import checks_arguments
from decentfn.topologies import matrices
from decentfn.topologies.rounds import RULES, Topology

_STEPS_SAMPLED = 64
_STEPS_AVERAGED = 256
_LARGEST_DENSE = 512
_LARGEST_SPREAD = 256
_ROUNDING = 1e-12
_KRYLOV = 64


@dataclass(frozen=True)
class Certificate:
    """Measured properties of a topology.

    A random schedule, or one of `lossy` and `cut`, is sampled: steps 0 to 63, and 0 to 511 for its contraction. One with a
    start (`until`, `later`) is measured over the first period after it.
    """

    name: str
    num_workers: int
    period: int | None
    """Steps after which the schedule repeats; None for a random one."""
    degree: int
    """Most messages that a worker sends in a step."""
    is_doubly_stochastic: bool
    """Rows and columns of every round sum to 1 and no entry is negative (1e-12)."""
    is_column_stochastic: bool
    """Columns of every round sum to 1, so mixing keeps the mean."""
    is_symmetric: bool
    """Every round's matrix is symmetric."""
    is_connected: bool
    """Over a period, information of each worker reaches all others."""
    steps_to_consensus: int | None
    """Steps of a period until all workers hold the exact mean (to rounding); None if not within it."""
    spectral_gap: float | None
    """1 - the second largest singular value of the product over a period; None for a random schedule."""
    expected_contraction: float | None
    """ρ of a random schedule, the largest eigenvalue of E[(W - J)ᵀ(W - J)] (Boyd et al., 2006); None for a periodic
    one. If rounds are drawn independently, E‖x_t - x̄‖² <= ρᵗ ‖x_0 - x̄‖². Estimated with a standard error of at most
    0.03: the direction that shrinks least is taken from steps 0 to 255, its contraction from steps 256 to 511."""
    noise_spread: float | None
    """Mean square distance of a worker from the mean if, before every mix, each adds independent noise of variance 1:
    `Σ_{k >= 2} λ_k² / (1 - λ_k²) / N` on a static symmetric graph, as for SGD of variance σ² at a small rate η, times η² σ².
    With similar data all eigenvalues count, not the gap alone (Takezawa et al., 2026; arXiv:2606.09154). 0: the exact mean in
    every step. Sampled for a random schedule; None for more than 256 workers, if disagreement stays,
    or for push-sum."""
    messages_per_step: float
    """Mean number of messages per worker and step."""
    payloads_per_step: float
    """Mean number of payloads per worker and step: messages, plus 2(r-1)/r for an all-reduce of r workers."""

    @property
    def gap_per_step(self) -> float | None:
        """Spectral gap per step of a period; None for a random schedule."""
        if self.spectral_gap is None or self.period is None:
            return None
        return 1 - (1 - self.spectral_gap) ** (1 / self.period)

    def bytes_per_step(self, payload_bytes: float) -> float:
        """Return the mean bytes per worker and step if a payload has `payload_bytes`."""
        return self.payloads_per_step * payload_bytes


@checks_arguments(RULES)
def certificate(topology: Topology) -> Certificate:
    """Measure the properties of `topology`. `df.plan` counts what leaves a node.

    Takes seconds for 4,096 workers, half a minute if the period has thousands of steps.

    >>> from decentfn.topologies import one_peer_exp
    >>> facts = certificate(one_peer_exp(8))
    >>> facts.steps_to_consensus, facts.spectral_gap, facts.bytes_per_step(100)
    (3, 1.0, 100.0)
    """
    schedule = _Schedule(topology)
    n, ones, starts = topology.num_workers, np.ones(topology.num_workers), schedule.random(4)
    keeps_mean = keeps_consensus = is_nonnegative = is_symmetric = True
    messages, means, links = [], [], []
    for this in map(schedule.round, schedule.steps):
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
        noise_spread=schedule.noise_spread if keeps_mean and keeps_consensus else None,
        messages_per_step=float(np.mean(messages)),
        payloads_per_step=float(np.mean(messages) + np.mean(means)),
    )


@checks_arguments(RULES)
def consensus_steps(topology: Topology) -> int | None:
    """Return the number of steps of a period until all workers hold the exact mean, to rounding.

    Measured over one period with random vectors: 0 for one worker, None if disagreement remains.
    """
    return _Schedule(topology).steps_to_consensus


@checks_arguments(RULES)
def spectral_gap(topology: Topology) -> float | None:
    """Return `1 - ‖W_(P-1) ... W_0 - J‖₂` of one period; None if random (see `Certificate.expected_contraction`).

    Exact for up to 512 workers, by ARPACK beyond. For a push-sum schedule, J replaces the schedule's own limit.
    """
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
        self.transposed = self.sparse.T  # kept, as making it takes longer than its product with a vector
        self.messages = float((this.destinations >= 0).sum()) / n
        self.groups, self.sizes, self.mean_weights, self.mean_payloads = me, np.ones(n), None, 0.0
        if this.groups is not None and this.mean_weights is not None:
            self.groups, self.mean_weights = this.groups.numpy(), this.mean_weights.numpy()
            self.sizes = np.bincount(self.groups)
            self.mean_payloads = float((2 * np.maximum(self.sizes - 1, 0)).sum()) / n

    def apply(self, x: np.ndarray) -> np.ndarray:
        y = self.sparse @ x
        return y if self.mean_weights is None else y + (self.mean_weights * self._means(x).T).T

    def apply_transposed(self, x: np.ndarray) -> np.ndarray:
        y = self.transposed @ x
        return y if self.mean_weights is None else y + self._means((self.mean_weights * x.T).T)

    def _means(self, x: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(self.sizes), *x.shape[1:]))
        np.add.at(sums, self.groups, x)
        return (sums.T / np.maximum(self.sizes, 1)).T[self.groups]

    @property
    def smallest(self) -> float:
        if self.mean_weights is None:
            return float(self.sparse.data.min())
        entries = self.sparse.copy()
        entries.setdiag(self.sparse.diagonal() + self.mean_weights / self.sizes[self.groups])
        return float(min(entries.data.min(), self.mean_weights.min()))

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and receivers of all links; in a group, those of its first member with the others."""
        receivers, sources = self.sparse.nonzero()
        members = np.nonzero(self.mean_weights)[0] if self.mean_weights is not None else sources[:0]
        _, first, group = np.unique(self.groups[members], return_index=True, return_inverse=True)
        firsts = members[first][group]
        return np.concatenate([sources, members, firsts]), np.concatenate([receivers, firsts, members])


class _Schedule:
    """Rounds of one period, or the first rounds of a random schedule, cached if short."""

    def __init__(self, topology: Topology) -> None:
        self.num_workers, self.is_random = topology.num_workers, topology.period is None
        self.steps = topology.cycle or range(_STEPS_SAMPLED)
        self.round = lru_cache(2**24 // topology.weights[0].numel())(lambda t: _Round(topology, t))

    def random(self, columns: int) -> np.ndarray:
        """Return fixed random columns `[N, columns]` with mean 0."""
        x = np.random.RandomState(0).standard_normal((self.num_workers, columns))
        return x - x.mean(0)

    @cached_property
    def _disagreements(self) -> list[float]:
        """Disagreement of random vectors after each step of a period, relative to the start, until it reaches zero."""
        x = self.random(4)
        start, left = np.abs(x).max(), [1.0]
        for t in self.steps:
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
        # Exact consensus drops a thousandfold in one step; geometric decay does not.
        *_, before, last = self._disagreements
        return len(self._disagreements) - 1 if last <= min(_ROUNDING, before / 1e3) else None

    @property
    def spectral_gap(self) -> float | None:
        n, rounds = self.num_workers, self.steps
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
            """Return `MᵀM x`, M the product without the consensus."""
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
        """Contraction of fresh draws along the direction that shrinks least in earlier draws.

        (The largest eigenvalue of a single sample mean would be too large by 1/√steps.)
        """
        if not self.is_random:
            return None

        def squared(x: np.ndarray) -> np.ndarray:
            """Return the mean of `(W - J)ᵀ(W - J) x`."""
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

    @property
    def noise_spread(self) -> float | None:
        """Mean of `tr P / N` over a period, or over sampled steps, where `P ← W (P + I - J) Wᵀ` in every step."""
        n = self.num_workers
        if n > _LARGEST_SPREAD:
            return None
        noise = np.eye(n) - 1 / n
        P, product, steps = np.zeros((n, n)), noise, range(_STEPS_AVERAGED) if self.is_random else self.steps

        def advance(P: np.ndarray, t: int) -> np.ndarray:
            this = self.round(t)
            return this.apply(this.apply(P + noise).T)

        for t in steps:
            P, product = advance(P, t), self.round(t).apply(product)
        if np.linalg.norm(product, 2) >= 1 - _ROUNDING:
            return None
        if self.is_random:
            steps = range(_STEPS_AVERAGED, 2 * _STEPS_AVERAGED)
        else:
            while np.abs(product).max() > _ROUNDING:
                P, product = P + product @ P @ product.T, product @ product
        traces = []
        for t in steps:
            P = advance(P, t)
            traces.append(np.trace(P) / n)
        return float(np.mean(traces))

    def _largest(self, apply: Any) -> tuple[float, np.ndarray]:
        from scipy.sparse.linalg import LinearOperator, eigsh

        kernel: Any = LinearOperator
        operator = kernel((self.num_workers,) * 2, matvec=lambda x: apply(x.ravel()), dtype=np.float64)
        values, vectors = eigsh(operator, 1, which="LA", v0=self.random(1)[:, 0], ncv=_KRYLOV)
        return float(values[0]), vectors[:, 0]
