"""What a topology promises, computed when asked for: stochastic, connected, exact after so many steps, its gap, its cost.

Small and shift-invariant schedules are measured exactly (singular values, Fourier); others by applying their rounds, and
random ones by drawing some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from decentfn.topologies import matrices
from decentfn.topologies.rounds import Topology, require_topology

_STEPS_SAMPLED = 64
_STEPS_AVERAGED = 256
_LARGEST_DENSE = 512
_ROUNDING = 1e-12
_POWERS = 50
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
    facts = schedule.facts
    return Certificate(
        name=topology.name,
        num_workers=topology.num_workers,
        period=topology.period,
        degree=topology.degree,
        is_doubly_stochastic=facts.keeps_mean and facts.keeps_consensus and facts.is_nonnegative,
        is_column_stochastic=facts.keeps_mean,
        is_symmetric=facts.is_symmetric,
        is_connected=facts.is_connected,
        steps_to_consensus=schedule.steps_to_consensus,
        spectral_gap=schedule.spectral_gap,
        expected_contraction=schedule.expected_contraction,
        messages_per_step=facts.messages,
        payloads_per_step=facts.payloads,
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

    Exact for up to 512 workers (singular values of the product) and for rounds that do not change when all workers,
    or all in each half, move up by one (Fourier); beyond, by ARPACK, which applies the rounds. A push-sum
    schedule keeps no consensus, so that its number is of J in place of its own limit.
    """
    require_topology("spectral_gap", topology)
    return _Schedule(topology).spectral_gap


class _Round:
    """One round in numpy, with what is worth measuring of it."""

    def __init__(self, topology: Topology, t: int) -> None:
        this = topology.round(t)
        self.num_workers = n = topology.num_workers
        me = np.arange(n)[:, None]
        sources, destinations = this.sources.numpy(), this.destinations.numpy()
        self.is_silent = sources < 0
        self.sources = np.where(self.is_silent, me, sources)
        self.destinations = np.where(destinations < 0, me, destinations)
        self.weights = this.weights.numpy()
        self.messages = float((destinations >= 0).sum()) / n
        self.groups, self.mean_weights, self.mean_payloads = np.arange(n), None, 0.0
        if this.groups is not None and this.mean_weights is not None:
            self.groups, self.mean_weights = this.groups.numpy(), this.mean_weights.numpy()
            self.sizes = np.bincount(self.groups)
            self.mean_payloads = float((2 * np.maximum(self.sizes - 1, 0)).sum()) / n

    def apply(self, x: np.ndarray) -> np.ndarray:
        """`W x`, `[N, D]`."""
        y = self.weights[:, :1] * x
        for k in range(self.sources.shape[1]):
            y += self.weights[:, 1 + k, None] * x[self.sources[:, k]]
        return y if self.mean_weights is None else y + self.mean_weights[:, None] * self._group_means(x)

    def apply_transposed(self, x: np.ndarray) -> np.ndarray:
        """`Wᵀ x`, `[N, D]`."""
        y = self.weights[:, :1] * x
        for k in range(self.sources.shape[1]):
            y += (self.weights[:, 1 + k, None] * x)[self.destinations[:, k]]
        return y if self.mean_weights is None else y + self._group_means(self.mean_weights[:, None] * x)

    def _group_means(self, x: np.ndarray) -> np.ndarray:
        sums = np.stack([np.bincount(self.groups, column, len(self.sizes)) for column in x.T], axis=1)
        return (sums / np.maximum(self.sizes, 1)[:, None])[self.groups]

    @property
    def has_means(self) -> bool:
        return self.mean_weights is not None and bool(self.mean_weights.any())

    @property
    def is_nonnegative(self) -> bool:
        means = 0.0 if self.mean_weights is None else self.mean_weights.min()
        return bool(min(self.weights.min(), means) >= -_ROUNDING)

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """Who receives from whom with a weight, `i` and `j`; of a group its first member stands for all."""
        i, k = np.nonzero(~self.is_silent & (self.weights[:, 1:] != 0))
        j = self.sources[i, k]
        if self.mean_weights is None:
            return i, j
        first = np.full(len(self.sizes), -1)
        first[self.groups[::-1]] = np.arange(self.num_workers)[::-1]
        members = np.nonzero(self.mean_weights)[0]
        heads = first[self.groups[members]]
        return np.concatenate([i, members, heads]), np.concatenate([j, heads, members])

    @property
    def is_symmetric(self) -> bool:
        entries = {}
        for order in (1, -1):
            i, k = np.nonzero(~self.is_silent)
            pair = (i, self.sources[i, k])[::order]
            codes, where = np.unique(pair[0] * self.num_workers + pair[1], return_inverse=True)
            entries[order] = codes, np.bincount(where, self.weights[i, 1 + k])
        alike = all(
            np.array_equal(a, b) or np.allclose(a, b, rtol=0, atol=_ROUNDING)
            for a, b in zip(entries[1], entries[-1], strict=True)
        )
        if not alike or self.mean_weights is None:
            return alike
        heaviest = np.zeros(len(self.sizes))
        np.maximum.at(heaviest, self.groups, self.mean_weights)
        return bool(np.allclose(heaviest[self.groups], self.mean_weights, rtol=0, atol=_ROUNDING))

    def symbol(self, blocks: int) -> np.ndarray | None:
        """The round in Fourier space, `[N / blocks, blocks, blocks]`, if shifting all blocks at once changes nothing.

        One block: a circulant round. Workers are numbered block by block.
        """
        n, size = self.num_workers, self.num_workers // blocks
        block, place = np.divmod(np.arange(n)[:, None], size)
        shifts = self.sources // size * size + (place - self.sources) % size
        found = np.unique(shifts)
        if len(found) > blocks * (self.sources.shape[1] + 1) or (self.has_means and self.sizes.max() < n):
            return None
        table = np.zeros((n, len(found)))
        column = np.searchsorted(found, shifts)
        for k in range(self.sources.shape[1]):
            table[np.arange(n), column[:, k]] += self.weights[:, 1 + k]
        table, own = table.reshape(blocks, size, -1), self.weights[:, 0].reshape(blocks, size)
        if max(np.ptp(table, axis=1).max(initial=0.0), np.ptp(own, axis=1).max()) > _ROUNDING:
            return None
        rows = np.zeros((blocks, blocks, size))
        rows[:, found // size, found % size] = table[:, 0]
        rows[np.arange(blocks), np.arange(blocks), 0] += own[:, 0]
        symbol = np.fft.fft(rows).transpose(2, 0, 1)
        if self.mean_weights is not None:
            symbol[0] += self.mean_weights[0] / blocks  # a mean over all workers
        return symbol


class _Facts(NamedTuple):
    """What is seen of the rounds one by one."""

    keeps_mean: bool
    keeps_consensus: bool
    is_nonnegative: bool
    is_symmetric: bool
    is_connected: bool
    messages: float
    payloads: float


class _Schedule:
    """The rounds of one period, or of the first steps of a random schedule."""

    def __init__(self, topology: Topology) -> None:
        self.num_workers = topology.num_workers
        self.is_random = topology.period is None
        steps = _STEPS_SAMPLED if topology.period is None else topology.period
        self.rounds = _Rounds(topology, steps)
        self.topology = topology

    @property
    def facts(self) -> _Facts:
        n, ones = self.num_workers, np.ones((self.num_workers, 1))
        keeps_mean = keeps_consensus = is_nonnegative = is_symmetric = True
        messages, means, links = [], [], []
        for this in self.rounds:
            keeps_mean &= bool(np.abs(this.apply_transposed(ones) - 1).max() <= _ROUNDING)
            keeps_consensus &= bool(np.abs(this.apply(ones) - 1).max() <= _ROUNDING)
            is_nonnegative &= this.is_nonnegative
            is_symmetric &= this.is_symmetric
            messages.append(this.messages)
            means.append(this.mean_payloads)
            i, j = this.links()
            links.append(i * n + j)
        codes = np.sort(np.concatenate(links))
        codes = codes[np.diff(codes, prepend=-1) > 0]
        i, j = codes // n, codes % n
        is_connected = matrices.reaches_everyone(j, i, n) and matrices.reaches_everyone(i, j, n)
        total = float(np.mean(messages)), float(np.mean(messages) + np.mean(means))
        return _Facts(keeps_mean, keeps_consensus, is_nonnegative, is_symmetric, is_connected, *total)

    @cached_property
    def _disagreements(self) -> list[float]:
        """Of random vectors after each step of a period, relative to their start, until they vanish."""
        x = np.random.RandomState(0).standard_normal((self.num_workers, 4))
        x -= x.mean(0)
        start, left = np.abs(x).max(), [1.0]
        for this in self.rounds:
            x = this.apply(x)
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
        n = self.num_workers
        if self.is_random:
            return None
        if n == 1:
            return 1.0
        if n <= _LARGEST_DENSE:
            product = np.eye(n)
            for this in self.rounds:
                product = this.apply(product)
            return 1.0 - float(np.linalg.norm(product - 1.0 / n, 2))
        for blocks in (1, 2):
            contraction = self.fourier_contraction(blocks)
            if contraction is not None:
                return 1.0 - contraction
        return 1.0 if self._disagreements[-1] <= _ROUNDING else 1.0 - _largest_singular_value(self)

    @property
    def expected_contraction(self) -> float | None:
        """By fresh draws, along the direction that shrinks least in others.

        Where many directions shrink alike the largest eigenvalue of one mean of draws is too large by 1/√steps.
        """
        if not self.is_random:
            return None
        n, drawn = self.num_workers, _Rounds(self.topology, 2 * _STEPS_AVERAGED)
        seen, fresh = ([drawn[start + t] for t in range(_STEPS_AVERAGED)] for start in (0, _STEPS_AVERAGED))

        def squared(x: np.ndarray) -> np.ndarray:
            total = np.zeros_like(x)
            for this in seen:
                total += this.apply_transposed(this.apply(x - x.mean(0)))
            return (total - total.mean(0)) / len(seen)

        if n <= _LARGEST_DENSE:
            slowest = np.linalg.eigh(squared(np.eye(n)))[1][:, -1:]
        else:
            slowest = np.random.RandomState(0).standard_normal((n, 1))
            for _ in range(_POWERS):
                slowest = squared(slowest)
                slowest /= np.linalg.norm(slowest)
        slowest -= slowest.mean()
        return float(np.mean([np.sum(this.apply(slowest) ** 2) for this in fresh]) / np.sum(slowest**2))

    def fourier_contraction(self, blocks: int) -> float | None:
        """The largest singular value of the product off the consensus; None unless all rounds have a symbol."""
        n, product = self.num_workers, None
        for this in self.rounds:
            symbol = this.symbol(blocks) if n % blocks == 0 else None
            if symbol is None:
                return None
            product = symbol if product is None else symbol @ product
        assert product is not None
        product[0] -= 1.0 / blocks
        return float(np.linalg.norm(product, 2, axis=(1, 2)).max())


class _Rounds(Sequence[_Round]):
    """Rounds made when they are looked at, so that a long schedule is never in memory at once; a short one is kept."""

    def __init__(self, topology: Topology, steps: int) -> None:
        self._topology, self._steps = topology, steps
        self._kept: dict[int, _Round] = {}
        self._keeps = steps * topology.weights.shape[1] * topology.weights.shape[2] <= 2**22

    def __iter__(self) -> Iterator[_Round]:
        return (self[t] for t in range(self._steps))

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, t: int) -> _Round:
        if t in self._kept:
            return self._kept[t]
        made = _Round(self._topology, t)
        if self._keeps:
            self._kept[t] = made
        return made


def _largest_singular_value(schedule: _Schedule) -> float:
    """Of the product over a period off the consensus: the root of the largest eigenvalue of MᵀM (ARPACK)."""
    from scipy.sparse import linalg

    n, rounds = schedule.num_workers, schedule.rounds

    class Squared(linalg.LinearOperator):
        def _matvec(self, x: np.ndarray) -> np.ndarray:
            x = x.reshape(n, 1) - x.mean()
            for this in rounds:
                x = this.apply(x)
            x = x - x.mean()
            for t in range(len(rounds) - 1, -1, -1):
                x = rounds[t].apply_transposed(x)
            return x[:, 0] - x.mean()

    start = np.random.RandomState(0).standard_normal(n)
    squared: Any = Squared(np.dtype(np.float64), (n, n))
    found: Any = linalg.eigsh(squared, 1, which="LA", v0=start - start.mean(), ncv=_KRYLOV, return_eigenvectors=False)
    return math.sqrt(max(float(found[0]), 0.0))
