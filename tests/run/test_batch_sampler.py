"""A DataLoader reads each worker's batches by (seed, t, worker), so a run that goes on reads what it would have read."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import decentfn as df

SHARDS = df.data.shards(40, num_workers=4, batch_size=3, seed=1)
DATA = TensorDataset(torch.arange(40) * 10, torch.arange(40) % 7)


def loader(worker, first_step=0, steps=None, **options):
    return DataLoader(DATA, batch_sampler=df.data.batch_sampler(SHARDS, worker, first_step, steps=steps), **options)


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


def test_several_simulated_workers_get_a_stacked_batch_each_its_own():
    batches = loader(range(1, 3), steps=4, collate_fn=df.data.stacked_collate(2), num_workers=1)
    for t, (x, _) in enumerate(batches):
        assert torch.equal(x, SHARDS.stacked_at(t)[1:3] * 10)


def test_its_length_is_known_where_it_ends():
    assert len(loader(0, first_step=3, steps=9)) == 6 and len(loader(0, first_step=9, steps=3)) == 0
    with pytest.raises(TypeError, match="goes on for ever"):
        len(df.data.batch_sampler(SHARDS, 0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SHARDS, 4), r"batch_sampler\(worker=4\): there are 4 workers, from 0"),
        ((SHARDS, range(0)), r"worker=range\(0, 0\)\)"),
        ((SHARDS, 0, -1), r"first_step=-1\): a step is a whole number >= 0"),
        ((DATA, 0), r"batch_sampler\(shards=<torch.*expected df.data.shards"),
    ],
)
def test_what_cannot_be_read_is_refused_at_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        df.data.batch_sampler(*arguments)
