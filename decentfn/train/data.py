"""Samples of every step and worker as a function of (seed, t, worker), so there is no sampler state to save.

All workers have batches of one size in every step, even if the shards are uneven.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from decentfn.core import at_least, brief, checks_numbers, require, trees
from decentfn.core.draws import drawing_by, hashed, worker_seed
from decentfn.train.epochs import GENERATORS, Epochs
from decentfn.train.own_steps import until

__all__ = [
    "BatchSampler",
    "Epochs",
    "Seeded",
    "Shards",
    "batch_sampler",
    "dirichlet_shards",
    "epochs",
    "fixed_shards",
    "seeded",
    "shards",
    "stacked_collate",
    "until",
    "worker_seed",
]


@dataclass(frozen=True)
class Shards:
    """Samples of every step and worker. Made by `shards` and `fixed_shards`."""

    num_workers: int
    batch_size: int
    steps_per_epoch: int = field(repr=False)
    """Steps in which all workers together read as many samples as there are."""
    _positions: Callable[[int, int], Tensor] = field(repr=False)

    def batch_at(self, t: int, worker: int) -> Tensor:
        """Return the sample indices of `worker` in step `t`, `[batch_size]` int64."""
        rule = f"t >= 0, and there are {self.num_workers} workers, from 0."
        require(0 <= worker < self.num_workers and t >= 0, "batch_at", rule, t=t, worker=worker)
        return self._positions(t, worker)

    def stacked_at(self, t: int) -> Tensor:
        """Return the sample indices of all workers in step `t`, `[N, batch_size]` int64."""
        return torch.stack([self.batch_at(t, worker) for worker in range(self.num_workers)])


class _Batch(list[int]):
    """Sample indices of one batch, with its step and workers."""

    def __init__(self, samples: Sequence[int], t: int, workers: Sequence[int]) -> None:
        super().__init__(samples)
        self.t, self.workers = t, workers


class BatchSampler(Sampler[list[int]]):
    """Sampler of batches of sample indices, from a step on. Made by `batch_sampler`."""

    def __init__(self, shards: Shards, workers: Sequence[int], first_step: int, steps: int | None) -> None:
        self._shards, self._workers, self._steps = shards, workers, steps
        self.first_step = self._t = first_step
        self._is_read = False

    def __iter__(self) -> Iterator[list[int]]:
        """Yield batches from `first_step` on; a second iteration raises ValueError."""
        if self._is_read:  # the progress is unknown, since a DataLoader reads ahead
            raise ValueError(
                f"batch_sampler(first_step={self.first_step}): it was already iterated over, and would repeat its "
                "batches. Read all steps of the run in one loop; or make a sampler for each epoch, "
                "batch_sampler(shards, worker, first_step=t, steps=(epoch + 1) * shards.steps_per_epoch)."
            )
        self._is_read = True
        for t in itertools.count(self.first_step) if self._steps is None else range(self.first_step, self._steps):
            samples = [self._shards.batch_at(t, worker).tolist() for worker in self._workers]
            self._t = t + 1
            yield _Batch(list(itertools.chain(*samples)), t, self._workers)

    def state_dict(self) -> dict[str, int]:
        """Return the step after the last batch given out, for torchdata's loader; another one may have read ahead."""
        return {"t": self._t}

    def load_state_dict(self, state_dict: Any) -> None:
        """Begin at the step of a state, whatever `first_step` was."""
        rule = "not the result of state_dict(); leave it out, and make a sampler with first_step=t."
        is_one = isinstance(state_dict, dict) and "t" in state_dict
        require(is_one, "batch_sampler(...).load_state_dict", rule, state_dict=state_dict)
        self.first_step, self._t, self._is_read = state_dict["t"], state_dict["t"], False

    @property
    def batch_size(self) -> int:
        """Raise ValueError: accelerate reads it before it gives each process every n-th batch of what is one worker's already."""
        raise ValueError(
            f"batch_sampler(first_step={self.first_step}): its batches are one worker's, and whoever asks for their size, as "
            "accelerate's prepare, divides them over the processes again; use the DataLoader as it is."
        )

    def __len__(self) -> int:
        """Return the number of batches, if `steps` is given."""
        if self._steps is None:
            raise TypeError("batch_sampler(...) without steps= has no length: it is endless.")
        return max(0, self._steps - self.first_step)


@checks_numbers
def batch_sampler(
    shards: Shards, worker: int | Sequence[int], first_step: int = 0, *, steps: int | None = None
) -> BatchSampler:
    """Make the `batch_sampler=` of torch's DataLoader: the batches of steps `first_step`, `first_step + 1`, ...

    To resume at step t, make a new one with `first_step=t`; batches that the loader read ahead do not matter. A state
    that torchdata's `StatefulDataLoader` loads takes the place of `first_step`. Read all steps in one loop, or make a
    sampler per epoch, also with `steps=(epoch + 1) * shards.steps_per_epoch`.

    Args:
        shards: the result of `shards` or `fixed_shards`.
        worker: the worker's number, `world.rank` under torchrun; or the numbers of the workers that this process
            simulates, `world.workers(local)`, whose samples are concatenated (see `stacked_collate`).
        first_step: t of the first batch, >= 0.
        steps: the last batch is that of step `steps - 1`; None never ends.

    >>> dealt = shards(10, num_workers=2, batch_size=2)
    >>> whole, rest = batch_sampler(dealt, 1, steps=5), batch_sampler(dealt, 1, first_step=3, steps=5)
    >>> list(whole)[3:] == list(rest), len(rest)
    (True, 2)
    """
    if not isinstance(shards, Shards):
        raise ValueError(f"batch_sampler(shards={brief(shards)}): expected df.data.shards(...) or fixed_shards(...).")
    workers = [worker] if isinstance(worker, Integral) else list(worker) if isinstance(worker, Sequence) else []
    known = range(shards.num_workers)
    if not workers or any(i not in known for i in workers) or len({int(i) for i in workers}) < len(workers):
        raise ValueError(
            f"batch_sampler(worker={brief(worker)}): there are {len(known)} workers, from 0; world.rank, or "
            "world.workers(local) where a process simulates several, each once."
        )
    at_least("batch_sampler", "first_step", first_step, 0)
    at_least("batch_sampler", "steps", 0 if steps is None else steps, 0)
    return BatchSampler(shards, [int(i) for i in workers], first_step, steps)


@checks_numbers
def stacked_collate(
    num_workers: int, collate: Callable[[list[Any]], Any] = default_collate
) -> Callable[[list[Any]], Any]:
    """Make a DataLoader's `collate_fn` for simulated workers, with leaves `[num_workers, B, ...]` as `simulate` needs.

    Args:
        num_workers: L, the workers of this process; their samples are concatenated, as by `batch_sampler`.
        collate: makes a batch of one worker's samples.
    """
    at_least("stacked_collate", "num_workers", num_workers, 1)
    return partial(_stacked, num_workers, collate)


def _stacked(num_workers: int, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    size, left = divmod(len(samples), num_workers)
    if left or not size:
        raise ValueError(
            f"stacked_collate(num_workers={num_workers}): a batch of {len(samples)} samples does not have the same "
            "number for each worker; make the loader's batch_size a multiple of the workers, and pass drop_last=True "
            "if the last batch is shorter."
        )
    batches = [collate(samples[i * size : (i + 1) * size]) for i in range(num_workers)]
    return trees.map(lambda *rows: torch.stack(rows), *batches)


class Seeded(Dataset[Any]):
    """Dataset whose random numbers are a function of (seed, t, worker). Made by `seeded`."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: Any) -> Any:
        """Raise ValueError, since a single sample has no step."""
        return self.__getitems__([sample])

    def __getitems__(self, samples: list[int]) -> list[Any]:
        """Return the samples of one batch."""
        if not isinstance(samples, _Batch):
            raise ValueError(
                "seeded(dataset): read it with a DataLoader and batch_sampler=df.data.batch_sampler(...), which "
                "knows the step and the worker; apply it last, after Subset and the like, and evaluate on the dataset "
                "itself."
            )
        size, read = len(samples) // len(samples.workers), getattr(self.dataset, "__getitems__", None)
        found: list[Any] = []
        for i, worker in enumerate(samples.workers):
            own = samples[i * size : (i + 1) * size]
            with drawing_by(hashed(hashed(self._seed, samples.t, worker), 0, 0)):  # unlike the permutations
                found += [self.dataset[sample] for sample in own] if read is None else read(own)
        return found


@checks_numbers
def seeded(dataset: Any, seed: int = 0) -> Seeded:
    """Seed a dataset's augmentation by (seed, t, worker): new numbers in every step and worker, the same in every run.

    For a DataLoader with `batch_sampler=df.data.batch_sampler(...)`. While the samples of one worker and step are read,
    the CPU generators of torch, NumPy and Python are seeded. The result does not depend on the number of loader
    processes, on resumption, or on simulation.

    Args:
        dataset: a dataset with `dataset[i]`, not an IterableDataset.
        seed: any integer, the same on every worker.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"seeded(dataset={brief(dataset)}): expected a dataset with samples by index; give a DataLoader of another "
            "one a generator for each rank, generator=torch.Generator().manual_seed(df.data.worker_seed(seed, worker, "
            "t))."
        )
    return Seeded(dataset, seed)


@checks_numbers
def epochs(loader: Iterable[Any], num_epochs: int, *, start: int = 0, generators: Sequence[Any] = ()) -> Epochs:
    """Yield `(t, batch)` of several epochs of a loader; t counts on from one epoch to the next.

    The iterator has `state_dict` and `load_state_dict`, with which a run continues in the middle of an epoch.

    `set_epoch(epoch)` of the loader, its samplers and dataset is called before each epoch, if they have it.

    Args:
        loader: anything that can be iterated once per epoch, such as a `DataLoader`; not one with `batch_sampler`, whose
            batches have their own t.
        num_epochs: epochs in all, >= 1.
        start: the first t, as `df.checkpoint.restore` returns it; the batches before it in its epoch are read and
            discarded, and of a loader without a length, or of a stream with processes, those of all epochs before. Not
            needed with `load_state_dict`, which a loader that counts its epochs by itself needs (MosaicML's streaming).
        generators: what else draws numbers for the batches and belongs in the state, of `torch.Generator`,
            `np.random.Generator` or `random.Random`; the global ones and `loader.generator` are in it.

    Raises:
        ValueError: `num_epochs` < 1, `start` < 0, another kind of generator, an iterator (a second epoch would be empty), or a `batch_sampler`.

    >>> list(epochs(["a", "b", "c"], 2, start=2))
    [(2, 'c'), (3, 'a'), (4, 'b'), (5, 'c')]
    """
    require(num_epochs >= 1, "epochs", "a number of epochs, >= 1.", num_epochs=num_epochs)
    require(start >= 0, "epochs", "a step, >= 0.", start=start)
    call = f"epochs(loader={brief(loader)}, {num_epochs})"
    rule = "expected what can be iterated once per epoch, such as a DataLoader or a list."
    require(isinstance(loader, Iterable) or hasattr(loader, "__getitem__"), call, rule)
    rule = "an iterator ends with its first epoch; pass the DataLoader or a list."
    require(not isinstance(loader, Iterator) or num_epochs == 1, call, rule)
    if isinstance(getattr(loader, "batch_sampler", None), BatchSampler):
        raise ValueError(
            f"{call}: df.data.batch_sampler goes through all epochs by itself, from its first_step on: `for t, batch in "
            "enumerate(loader, first_step)`."
        )
    for one in generators:
        rule = "torch.Generator, np.random.Generator or random.Random."
        require(isinstance(one, GENERATORS), "epochs", rule, generators=one)
    return Epochs(loader, num_epochs, start, generators)


@checks_numbers
def shards(num_samples: int, num_workers: int, batch_size: int, seed: int = 0) -> Shards:
    """Redistribute all samples in every epoch; a remainder that does not fill a batch for every worker is skipped.

    Args:
        num_samples: at least `num_workers * batch_size`.
        num_workers: N.
        batch_size: samples per worker and step; all workers together read N times as many.
        seed: seed of the permutations, the same on every worker.

    >>> dealt = shards(10, num_workers=2, batch_size=2)
    >>> dealt.steps_per_epoch, torch.cat([dealt.stacked_at(t) for t in range(2)]).unique().numel()
    (2, 8)
    """
    for name, count in {"num_samples": num_samples, "num_workers": num_workers, "batch_size": batch_size}.items():
        at_least("shards", name, count, 1)
    step = num_workers * batch_size
    rule = f"a step of {num_workers} workers x {batch_size} needs {step} samples; make batch_size smaller."
    require(num_samples >= step, "shards", rule, num_samples=num_samples)
    steps_per_epoch = num_samples // step

    @lru_cache(maxsize=2)
    def order(epoch: int) -> Tensor:
        return _permutation(num_samples, seed, epoch, 0)

    def positions(t: int, worker: int) -> Tensor:
        epoch, k = divmod(t, steps_per_epoch)
        first = k * step + worker * batch_size
        return order(epoch)[first : first + batch_size].clone()

    return Shards(num_workers, batch_size, steps_per_epoch, positions)


@checks_numbers
def fixed_shards(parts: Sequence[Tensor | Sequence[int]], batch_size: int, seed: int = 0) -> Shards:
    """Let every worker read its own part repeatedly, in a new order each time; shorter parts repeat earlier.

    Args:
        parts: the sample indices of each worker, not empty, of any lengths.
        batch_size: samples per worker and step; may exceed a part, which is then repeated within the batch.
        seed: seed of the permutations.
    """
    lists = [torch.as_tensor(part) for part in parts]
    at_least("fixed_shards", "batch_size", batch_size, 1)
    at_least("fixed_shards", "parts", len(lists), 1)
    for worker, part in enumerate(lists):
        if part.dim() != 1 or not part.numel() or not _are_integers(part) or part.min() < 0:
            raise ValueError(
                f"fixed_shards(parts): part {worker} is {brief(part)}, of shape {list(part.shape)}; a part is a vector "
                "of sample indices, integers >= 0, at least one. Of a mask take mask.nonzero()[:, 0]."
            )
    lists = [part.long() for part in lists]

    @lru_cache(maxsize=4 * len(lists))
    def order(worker: int, epoch: int) -> Tensor:
        return lists[worker][_permutation(lists[worker].numel(), seed, epoch, worker)]

    def positions(t: int, worker: int) -> Tensor:
        size, first = lists[worker].numel(), t * batch_size
        epochs = range(first // size, (first + batch_size - 1) // size + 1)
        return torch.cat([order(worker, e)[max(first - e * size, 0) : first + batch_size - e * size] for e in epochs])

    return Shards(len(lists), batch_size, max(1, sum(map(len, lists)) // (len(lists) * batch_size)), positions)


@checks_numbers
def dirichlet_shards(labels: Tensor | Sequence[Any], num_workers: int, alpha: float, seed: int = 0) -> list[Tensor]:
    """Split samples with label skew: worker i's share of each class is drawn from Dirichlet(α, …, α). For experiments.

    Every sample is in exactly one part. A worker without samples takes one from the largest part.

    Args:
        labels: `[num_samples]` integers or strings, at least `num_workers` of them.
        num_workers: N.
        alpha: α > 0; small is skewed (0.1: few classes per worker), large is even.
        seed: seed of the draw, the same on every worker.

    Returns:
        Sample indices of each worker, `N` int64 vectors, ascending: for `fixed_shards`, or torch's `Subset`.
    Source: Hsu, Qi, Brown, 2019.
    """
    is_text = not isinstance(labels, Tensor) and np.asarray(labels).dtype.kind in "OU"
    y = torch.as_tensor(np.unique(labels, return_inverse=True)[1] if is_text else labels)
    at_least("dirichlet_shards", "num_workers", num_workers, 1)
    if y.dim() != 1 or y.numel() < num_workers or not _are_integers(y):
        raise ValueError(
            f"dirichlet_shards(labels): {y.dtype} of shape {list(y.shape)}; labels are integers or strings, the "
            f"class of each sample, at least num_workers={num_workers}."
        )
    if not 0 < alpha < float("inf"):
        raise ValueError(f"dirichlet_shards(alpha={alpha!r}): α is positive and finite; 0.1 is skewed, 100 is even.")
    order = torch.Generator().manual_seed(worker_seed(seed, 0))
    draw = np.random.default_rng(worker_seed(seed, 1))
    parts: list[list[Tensor]] = [[] for _ in range(num_workers)]
    for label in y.unique():
        members = (y == label).nonzero()[:, 0]
        members = members[torch.randperm(members.numel(), generator=order)]
        shares = torch.from_numpy(draw.dirichlet([float(alpha)] * num_workers))
        cuts = (shares.cumsum(0)[:-1] * members.numel()).round().to(torch.int64)
        for part, piece in zip(parts, members.tensor_split(cuts.tolist()), strict=True):
            part.append(piece)
    lists = [torch.cat(part) for part in parts]
    for worker in range(num_workers):
        if not lists[worker].numel():
            richest = max(range(num_workers), key=lambda i: lists[i].numel())
            lists[worker], lists[richest] = lists[richest][:1], lists[richest][1:]
    return [part.sort().values for part in lists]


def _permutation(size: int, seed: int, epoch: int, worker: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(worker_seed(seed, worker, epoch)))


def _are_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
