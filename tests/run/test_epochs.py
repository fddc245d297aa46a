"""`df.data.epochs` counts t over all epochs of a loader."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import decentfn as df


def _loader(**how):
    data = torch.arange(12)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
    return DataLoader(data, batch_size=2, sampler=sampler, **how)


def test_epochs_number_all_batches_and_shuffle_each_epoch_anew():
    seen = [(t, batch.tolist()) for t, batch in df.data.epochs(_loader(), 3)]
    expected, loader = [], _loader()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in loader]
    assert seen == list(enumerate(expected))


@pytest.mark.parametrize("start", [0, 2, 3, 4, 8, 9])
def test_a_resumed_loop_reads_what_is_left(start):
    whole = [(t, batch.tolist()) for t, batch in df.data.epochs(_loader(), 3)]
    assert [(t, batch.tolist()) for t, batch in df.data.epochs(_loader(), 3, start=start)] == whole[start:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((iter([1]), 2), "ends with its first epoch"),
        ((lambda: [1], 2), "can be iterated once per epoch"),
        (([1], 0), "num_epochs=0"),
    ],
)
def test_what_cannot_be_repeated_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        df.data.epochs(*arguments)


def test_a_loader_without_a_length_is_read_from_its_beginning():
    class Stream(IterableDataset):
        heard = ()

        def set_epoch(self, epoch):
            self.heard += (epoch,)

        def __iter__(self):
            return iter(range(6))

    stream = Stream()
    rest = df.data.epochs(DataLoader(stream, batch_size=2), 2, start=4)
    assert [(t, batch.tolist()) for t, batch in rest] == [(4, [2, 3]), (5, [4, 5])]
    assert stream.heard == (0, 1)
    assert list(df.data.epochs([], 2, start=1)) == []


class Parts(IterableDataset):
    """Rows, each of the loader's processes a part, with a length."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 14, info.num_workers))

    def __len__(self):
        return 14


@pytest.mark.thorough
def test_a_stream_of_several_processes_may_have_more_batches_than_its_length():
    whole, *resumed = (
        [(t, x.tolist()) for t, x in df.data.epochs(DataLoader(Parts(), 3, num_workers=2), 2, start=start)]
        for start in (0, 5, 7, 11)
    )
    assert len(whole) == 12 and len(DataLoader(Parts(), 3)) == 5
    assert resumed == [whole[5:], whole[7:], whole[11:]]


def test_a_sampler_within_a_batch_sampler_hears_of_the_epoch():
    inner = DistributedSampler(range(12), num_replicas=2, rank=1, shuffle=True, seed=3)
    loader = DataLoader(torch.arange(12), batch_sampler=torch.utils.data.BatchSampler(inner, 2, drop_last=False))
    assert [batch.tolist() for _, batch in df.data.epochs(loader, 3)] == [
        batch.tolist() for _, batch in df.data.epochs(_loader(), 3)
    ]


def test_the_batches_are_those_of_the_plain_loop():
    """Nothing else reads the loader, which would draw a number, or start its processes."""
    loader, read = DataLoader(torch.arange(12), batch_size=2, shuffle=True), []
    for batches in (lambda: [x for _ in range(2) for x in loader], lambda: [x for _, x in df.data.epochs(loader, 2)]):
        torch.manual_seed(0)
        read.append([batch.tolist() for batch in batches()])
    assert read[0] == read[1]


@pytest.mark.parametrize("start", [0, 2])
def test_the_sampler_of_a_whole_run_is_refused_and_its_own_loop_is_right(start):
    sampler = df.data.batch_sampler(df.data.shards(12, 2, 2), 0, first_step=start, steps=6)
    loader = DataLoader(torch.arange(12), batch_sampler=sampler)
    with pytest.raises(ValueError, match=r"`for t, batch in enumerate\(loader, first_step\)`"):
        df.data.epochs(loader, 2, start=start)
    assert [t for t, _ in enumerate(loader, start)] == list(range(start, 6))


def test_a_second_epoch_of_diloco_communicates():
    """With 6 batches per epoch and an outer step after every 8, a restarted t would never average."""
    init, step = df.diloco(lambda x, b: ((x - b) ** 2).mean(), df.sgd(0.1), df.topology("complete", 2), inner_steps=8)
    step, state = df.simulate(step, 2), df.stack(init(torch.zeros(3)), 2)
    batches = [torch.tensor([[0.0], [4.0]]).expand(2, 3) for _ in range(6)]
    distances = []
    for t, batch in df.data.epochs(batches, 2):
        state, _ = step(state, batch, t)
        distances.append(float(df.consensus_distance(state)))
    assert [t for t, distance in enumerate(distances) if distance < 1e-6] == [7]
