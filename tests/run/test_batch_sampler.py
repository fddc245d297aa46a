"""A DataLoader reads each worker's batches by (seed, t, worker), so a run that goes on reads what it would have read."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import decentfn as df

SHARDS = df.data.shards(40, num_workers=4, batch_size=3, seed=1)
DATA = TensorDataset(torch.arange(40) * 10, torch.arange(40) % 7)


def loader(worker, first_step=0, steps=None, data=DATA, **options):
    return DataLoader(data, batch_sampler=df.data.batch_sampler(SHARDS, worker, first_step, steps=steps), **options)


def test_a_loader_reads_the_batches_of_its_worker_for_ever():
    for t, (x, y) in zip(range(10), loader(2), strict=False):
        rows = SHARDS.batch_at(t, 2)
        assert torch.equal(x, rows * 10) and torch.equal(y, rows % 7)


def test_a_run_that_goes_on_reads_what_it_would_have_read_though_workers_had_read_ahead():
    whole = list(loader(1, steps=9, num_workers=2, prefetch_factor=4))
    begun = list(islice(loader(1, num_workers=2, prefetch_factor=4), 5))
    rest = list(loader(1, first_step=5, steps=9))
    assert len(whole) == 9
    for (x, y), (a, b) in zip(whole, begun + rest, strict=True):
        assert torch.equal(x, a) and torch.equal(y, b)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("first_step", [0, 3])
def test_a_stateful_loader_goes_on_where_its_state_says_wherever_its_sampler_begins(first_step):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def made(first_step):
        return stateful(DATA, batch_sampler=df.data.batch_sampler(SHARDS, 1, first_step, steps=6))

    begun = made(0)
    assert len(list(islice(begun, 3))) == 3
    resumed = made(first_step)
    resumed.load_state_dict(begun.state_dict())
    assert [x.tolist() for x, _ in resumed] == [(SHARDS.batch_at(t, 1) * 10).tolist() for t in range(3, 6)]


def test_a_sampler_with_a_state_begins_at_its_step():  # as a stateful loader does, without torchdata
    read = df.data.batch_sampler(SHARDS, 1, steps=6)
    for t, _ in zip(range(3), read, strict=False):
        state = read.state_dict()
        assert state == {"t": t + 1}
    resumed = df.data.batch_sampler(SHARDS, 1, first_step=2, steps=6)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and len(resumed) == 3
    assert list(resumed) == [SHARDS.batch_at(t, 1).tolist() for t in range(3, 6)]
    with pytest.raises(ValueError, match=r"load_state_dict\(state_dict=None\): not the result of state_dict\(\)"):
        resumed.load_state_dict(None)


def test_several_simulated_workers_get_a_stacked_batch_each_its_own():
    batches = loader(range(1, 3), steps=4, collate_fn=df.data.stacked_collate(2), num_workers=1)
    for t, (x, _) in enumerate(batches):
        assert torch.equal(x, SHARDS.stacked_at(t)[1:3] * 10)


@pytest.mark.parametrize("steps", [SHARDS.steps_per_epoch, None])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_epoch_does_not_read_the_batches_of_the_one_before_again(steps, workers):
    batches = loader(0, steps=steps, **workers)
    first = [x for x, _ in islice(batches, SHARDS.steps_per_epoch)]
    assert len(first) == SHARDS.steps_per_epoch
    with pytest.raises(ValueError, match=r"batch_sampler\(first_step=0\): .*repeat its batches.*first_step=t"):
        list(islice(batches, SHARDS.steps_per_epoch))


@pytest.mark.parametrize("start", [0, 2, 3, 7, 9])
def test_a_loader_for_each_epoch_goes_on_at_any_step(start):
    t, epochs = start, 3
    for epoch in range(epochs):
        for x, _ in loader(1, t, (epoch + 1) * SHARDS.steps_per_epoch):
            assert torch.equal(x, SHARDS.batch_at(t, 1) * 10)
            t += 1
    assert t == 9 == epochs * SHARDS.steps_per_epoch


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_batch_that_the_workers_cannot_share_is_refused(count):
    collate = df.data.stacked_collate(3)
    with pytest.raises(ValueError, match=rf"stacked_collate\(num_workers=3\): .*{count} samples.*drop_last=True"):
        collate([torch.zeros(2)] * count)
    assert [len(x) for x in DataLoader(torch.zeros(7), batch_size=6, drop_last=True, collate_fn=collate)] == [3]
    assert collate(list(torch.arange(6))).tolist() == [[0, 1], [2, 3], [4, 5]]


class Augmented(Dataset):
    """Its samples and what they draw, from every generator that a transform may use."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()), np.random.rand(), random.random(), torch.randint(2**31, ())]).double()


def drawn(worker, first_step=0, steps=6, seed=0, data=None, **options):
    """Each step's batch of one worker, read as the docs recommend it, on a rank that has seeded as all have."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    data = df.data.seeded(Augmented() if data is None else data, seed)
    batches = loader(worker, first_step, steps, data=data, **options)
    return {t: batch for t, batch in enumerate(batches, first_step)}


def test_augmentation_is_a_function_of_the_seed_the_step_and_the_worker_whoever_reads():
    by_worker = {worker: drawn(worker) for worker in range(4)}
    values = torch.cat([batch[:, 1:] for its in by_worker.values() for batch in its.values()])
    assert len(values.unique(dim=0)) == len(values) == 4 * 6 * 3
    assert all(len(column.unique()) == len(column) for column in values.T)
    assert drawn(0, seed=1)[0][0, 1] != by_worker[0][0][0, 1]
    again = [
        (drawn(1, num_workers=2, persistent_workers=True, prefetch_factor=3), 0),
        (drawn(1, first_step=4), 4),
        (drawn(1, first_step=3, num_workers=1), 3),
    ]
    for got, first in again:
        assert list(got) == list(range(first, 6))
        assert all(torch.equal(batch, by_worker[1][t]) for t, batch in got.items())
    stacked = drawn(range(1, 3), collate_fn=df.data.stacked_collate(2), num_workers=1)
    for t, batch in stacked.items():
        assert torch.equal(batch, torch.stack([by_worker[1][t], by_worker[2][t]]))


def test_the_generators_of_the_loop_stay_as_they_were_and_part_of_a_dataset_draws_alike():
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.initial_seed(), np.random.get_state()[1].tolist(), random.getstate()
    reads = df.data.seeded(Subset(Augmented(), range(40)))
    sampler = df.data.batch_sampler(SHARDS, 2, 1)
    batch = torch.stack(reads.__getitems__(next(iter(sampler))))
    after = torch.get_rng_state(), torch.initial_seed(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert len(reads) == 40 and torch.equal(batch, drawn(2)[1])
    seed = df.data.worker_seed(df.data.worker_seed(0, 2, 1), 0)  # of three generators, in every version
    own = torch.Generator().manual_seed(seed), np.random.RandomState(seed % 2**32), random.Random(seed)
    first = torch.rand((), generator=own[0]), own[1].rand(), own[2].random()
    assert torch.equal(batch[0, 1:4], torch.tensor(first).double())


def test_draws_without_a_step_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    for data in (7, Stream()):
        with pytest.raises(ValueError, match=r"seeded\(dataset=.*DataLoader.*generator="):
            df.data.seeded(data)
    with pytest.raises(ValueError, match=r"seeded\(seed=0.5\)"):
        df.data.seeded(Augmented(), 0.5)
    reads = df.data.seeded(Augmented())
    for read in (lambda: reads[0], lambda: list(DataLoader(reads, batch_size=2)), lambda: Subset(reads, [1])[0]):
        with pytest.raises(ValueError, match=r"seeded\(dataset\): .*df.data.batch_sampler"):
            read()


def test_its_length_is_known_where_it_ends():
    assert len(loader(0, first_step=3, steps=9)) == 6 and len(loader(0, first_step=9, steps=3)) == 0
    with pytest.raises(TypeError, match="it is endless"):
        len(df.data.batch_sampler(SHARDS, 0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SHARDS, 4), r"batch_sampler\(worker=4\): there are 4 workers, from 0"),
        ((SHARDS, range(0)), r"worker=range\(0, 0\)\)"),
        ((SHARDS, [1, 2, 1]), r"worker=\[1, 2, 1\]\): .*each once"),
        ((SHARDS, 0, -1), r"first_step=-1\): first_step is an integer >= 0"),
        ((DATA, 0), r"batch_sampler\(shards=<torch.*expected df.data.shards"),
    ],
)
def test_what_cannot_be_read_is_refused_at_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        df.data.batch_sampler(*arguments)


def test_who_would_divide_a_workers_batches_again_is_refused():
    """accelerate's `prepare` of several processes asks for the size, and then gives each every second batch."""
    with pytest.raises(ValueError, match=r"batch_sampler\(first_step=2\): .*use the DataLoader as it is"):
        getattr(loader(1, first_step=2).batch_sampler, "batch_size", None)
