"""A run that was killed in the middle of an epoch reads the batches, and draws the numbers, of one that was not."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

import decentfn as df
from tests.run import killed

ROWS, EPOCHS = 10, 2


class Noisy(torch.utils.data.Dataset):
    """Rows with noise of every global generator."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return torch.tensor([i, float(torch.rand(())), np.random.rand(), random.random()], dtype=torch.float64)


class Stream(IterableDataset):
    """The same, each of the loader's processes a part."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        yield from (Noisy()[int(i)] for i in order[first::stride])


class Counting:
    """A loader with a state of its own."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        while self.read < 5:
            self.read += 1
            yield torch.tensor([self.read, random.random()])
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Late(Counting):
    """Draws the seeds of its processes, each of which reads alone, with the first batch, as litdata's."""

    num_workers = 2

    def __len__(self):
        return 5

    def __iter__(self):
        torch.rand(2)
        while self.read < 5:
            self.read += 1
            yield torch.tensor([self.read])
        self.read = 0


class GoingOn(Counting):
    """Whose state at the end of an epoch is one before the next, and whose order is another in each epoch, as litdata's."""

    def __init__(self):
        super().__init__()
        self.epoch, self.is_resumed = 0, False

    def __len__(self):
        return 5

    def set_epoch(self, epoch):
        self.seed = epoch

    def __iter__(self):
        if not self.is_resumed:
            self.read, self.epoch = 0, self.epoch + 1
        self.is_resumed, self.seed = False, self.epoch  # its own count
        while self.read < 5:
            self.read += 1
            yield torch.tensor([self.seed, self.read, random.random()])

    def state_dict(self):
        return {"read": self.read, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.read, self.epoch, self.is_resumed = state["read"], state["epoch"], 0 < state["read"] < 5


class Ending(GoingOn):
    """Whose state at the end of an epoch yields nothing before the next, as torchdata's."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_resumed = True


class Restarting(Counting):
    """The same without a length, as `torchdata.nodes.Loader`."""

    restart_on_stop_iteration = True

    def __iter__(self):
        if self.restart_on_stop_iteration and self.read == 5:
            self.read = 0
        yield from super().__iter__()


class Drawing:
    """Draws from generators that no loader shows."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)]
        self.generators.append(np.random.Generator(np.random.MT19937(1)))

    def __iter__(self):
        for _ in range(5):
            one, two, three, four = self.generators
            yield torch.tensor([float(torch.rand((), generator=one)), two.random(), three.gauss(0, 1), four.random()])


class Fabrics(DataLoader):
    """Sets the epoch of its sampler by its own count, as Lightning Fabric's."""

    _num_iter_calls = 0

    def __iter__(self):
        self.sampler.set_epoch(self._num_iter_calls)
        self._num_iter_calls += 1
        yield from super().__iter__()


class Every(NamedTuple):
    """Batches of a sampler, as a shard of them is."""

    batch_sampler: BatchSampler

    def __iter__(self):
        return iter(self.batch_sampler)


class Accelerates(DataLoader):
    """Has the method and no state, and a sampler's generator behind another sampler, as a loader that accelerate prepared."""

    use_stateful_dataloader = False

    def __init__(self):
        self.synchronized_generator = own()
        inner = BatchSampler(RandomSampler(Noisy(), generator=self.synchronized_generator), 2, drop_last=False)
        super().__init__(Noisy(), batch_sampler=Every(inner))

    def state_dict(self):
        raise AttributeError("dl_state_dict")


def own():
    return torch.Generator().manual_seed(5)


def replacing():
    sampler = RandomSampler(Noisy(), replacement=True, num_samples=40, generator=own())  # 32 are drawn at once
    return DataLoader(Noisy(), 4, sampler=sampler)


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "shuffled by its own generator": lambda: DataLoader(Noisy(), 3, shuffle=True, generator=own()),
    "with replacement": replacing,
    "distributed": lambda: DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 1, seed=3)),
    "distributed, as Fabric's": lambda: Fabrics(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 1, seed=3)),
    "shuffled, as accelerate's": Accelerates,
    "a stream": lambda: DataLoader(Stream(), 3),
    "its own state": Counting,
    "its own state, seeds with the first batch": Late,
    "its own state, which goes on": GoingOn,
    "its own state, which ends": Ending,
    "its own state, which goes on, without a length": Restarting,
    "generators": Drawing,
    "two processes": lambda: DataLoader(Noisy(), 3, shuffle=True, num_workers=2),
    "a stream of two processes": lambda: DataLoader(Stream(), 2, num_workers=2),
}


def batches_of(loader):
    return df.data.epochs(loader, EPOCHS, generators=getattr(loader, "generators", ()))


def took(batches, most=10**9):
    """Read and train, which draws numbers too."""
    taken = []
    for t, batch in batches:
        taken.append((t, batch.tolist(), float(torch.rand(())), random.gauss(0, 1), np.random.randn()))
        if len(taken) == most:
            break
    return taken


def seeded(seed=0):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def kept(state, folder):
    """Return it as a checkpoint does."""
    init, _ = df.adapt_then_combine(lambda x, b: x.sum(), df.sgd(0.1), df.topology("complete", 1))
    return df.checkpoint.restore(
        df.checkpoint.save(folder, init(torch.zeros(2)), 1, extra=state), init(torch.zeros(2))
    ).extra


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) if "two proc" in n else n for n in LOADERS]
)
def test_the_batches_and_numbers_after_a_stop_are_those_of_the_whole_run(name, tmp_path):
    seeded()
    whole = took(batches_of(LOADERS[name]()))
    for stop in range(len(whole) + 1) if "two proc" not in name else (1, len(whole) // 2, len(whole) - 1):
        seeded()
        batches = batches_of(LOADERS[name]())
        first = took(batches, stop) if stop else []
        state = kept(batches.state_dict(), tmp_path / str(stop))
        seeded(7)
        again = batches_of(LOADERS[name]())
        again.load_state_dict(state)
        if stop == 2:  # a second stop, before anything is read
            state, again = again.state_dict(), batches_of(LOADERS[name]())
            again.load_state_dict(state)
        if stop == 0:
            seeded()  # the checkpoint's are restored by `restore`
        assert first + took(again) == whole, stop


def require_undisturbed(kind, deaths, folder):
    """Compare all that both ranks read and drew, again after each death, and where they end."""
    whole, stopped = (killed.run(folder / name, kind, its) for name, its in {"whole": [], "killed": deaths}.items())
    for (*expected, end), (*lines, other) in zip(whole, stopped, strict=True):
        starts = [line["first"] for line in lines if "first" in line]
        assert len(starts) == len(deaths) + 1  # each from the checkpoint before the death
        assert all(t - 1 <= first <= t for first, (_, t) in zip(starts[1:], deaths, strict=True))
        by_step = {line["t"]: line for line in expected if "t" in line}
        assert sorted(by_step) == list(range(killed.EPOCHS * killed.STEPS_PER_EPOCH))
        read = [line for line in lines if "t" in line]
        assert {line["t"] for line in read} == by_step.keys()
        for line in read:
            assert line == by_step[line["t"]]
        assert other == end


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["torch, map", "torch, iterable"])
def test_a_killed_run_of_two_ranks_with_two_loader_processes_each_ends_as_one_that_was_not(kind, tmp_path):
    require_undisturbed(kind, [(1, 8)], tmp_path)


THEIRS = ["torchdata, map", "torchdata, sampler", "torchdata, iterable", "datasets"]
LITDATA = pytest.param(
    "litdata",
    marks=pytest.mark.xfail(strict=False, reason="litdata 0.2.76's state after a resume names another epoch"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch, map", "torch, iterable", *THEIRS, LITDATA])
def test_five_kills_change_nothing(kind, tmp_path):
    if not kind.startswith("torch,"):
        pytest.importorskip(kind.split(",")[0])
    if kind == "datasets":
        pytest.importorskip("torchdata")
    require_undisturbed(kind, [(0, 3), (1, 7), (0, 8), (1, 14), (0, 16)], tmp_path)


def test_other_processes_begin_the_epoch_again_and_count_on(tmp_path, caplog):
    loader = DataLoader(torch.arange(6), 2)
    batches = df.data.epochs(loader, 2)
    for t, _ in batches:
        if t == 4:
            break
    state = batches.state_dict() | {"process": [1, 3]}
    again = df.data.epochs(loader, 2)
    again.load_state_dict(state)
    assert [(t, batch.tolist()) for t, batch in again] == [(5, [0, 1]), (6, [2, 3]), (7, [4, 5])]
    assert (
        "process 1 of 3 read these batches, and this is process 0 of 1 (batch_size=2, 3 batches): epoch 1 starts again, "
        "with t=5" in caplog.text
    )


class Tens(IterableDataset):
    def __iter__(self):
        yield from range(10)


OTHERS = {
    "batch_size": (lambda: DataLoader(Noisy(), 2), lambda: DataLoader(Noisy(), 5)),
    "batch_size of a stream": (lambda: DataLoader(Tens(), 2), lambda: DataLoader(Tens(), 5)),
    "num_workers of a stream": (lambda: DataLoader(Tens(), 2), lambda: DataLoader(Tens(), 2, num_workers=1)),
}


@pytest.mark.parametrize(
    "what", [pytest.param("batch_size"), *(pytest.param(k, marks=pytest.mark.thorough) for k in [*OTHERS][1:])]
)
def test_batches_of_another_size_begin_the_epoch_again_and_leave_no_row_out(what, caplog):
    before, after = OTHERS[what]
    batches = df.data.epochs(before(), 1)
    for _ in zip(range(2), batches, strict=False):
        state = batches.state_dict()
    again = df.data.epochs(after(), 1)
    again.load_state_dict(state)
    ts, rows = zip(*((t, [int(row) for row in batch.view(len(batch), -1)[:, 0]]) for t, batch in again), strict=True)
    assert sum(rows, []) == list(range(10)) and ts[0] == 2
    assert "(batch_size=2" in caplog.text and "epoch 0 starts again, with t=2" in caplog.text


def test_map_style_rows_go_on_with_another_number_of_loader_processes():
    batches = df.data.epochs(DataLoader(Noisy(), 2, num_workers=1), 1)
    next(batches)
    again = df.data.epochs(DataLoader(Noisy(), 2), 1)
    again.load_state_dict(batches.state_dict())
    assert [int(batch[0, 0]) for _, batch in again] == [2, 4, 6, 8]


def test_a_run_that_has_ended_reads_no_more_and_can_be_made_longer():
    seeded()
    whole = took(df.data.epochs(LOADERS["shuffled"](), 3))
    seeded()
    batches = df.data.epochs(LOADERS["shuffled"](), 2)
    first = took(batches)
    for epochs, rest in ((2, []), (3, whole[len(first) :])):
        again = df.data.epochs(LOADERS["shuffled"](), epochs)
        again.load_state_dict(batches.state_dict())
        assert took(again) == rest


def test_what_cannot_be_continued_is_refused():
    kept = df.data.epochs(DataLoader(Noisy(), 2, num_workers=1, persistent_workers=True), 2)
    with pytest.raises(ValueError, match=r"epochs\(loader, ...\).state_dict\(\): .*persistent_workers=False"):
        kept.state_dict()
    with pytest.raises(ValueError, match=r"epochs\(generators='mt19937'\): .*torch.Generator, np.random.Generator"):
        df.data.epochs([1], 1, generators=["mt19937"])
    batches = df.data.epochs([1, 2], 1)
    for state in (None, {}, {"t": 3}):
        with pytest.raises(ValueError, match=r"load_state_dict\(state\): .* is not the result of state_dict\(\)"):
            batches.load_state_dict(state)
    with pytest.raises(ValueError, match="it is of a loader with state_dict and of 0 generators.*and here are 0"):
        batches.load_state_dict(batches.state_dict() | {"loader": {"read": 1}})
    prepared = Accelerates()
    prepared.use_stateful_dataloader = True  # pyright: ignore
    with pytest.raises(
        ValueError, match=r"epochs\(loader, ...\).state_dict\(\): .*and not the order of the rows; leave it out"
    ):
        df.data.epochs(prepared, 2).state_dict()
    some = df.data.epochs(DataLoader(Noisy(), 2, num_workers=2, in_order=False), 2)
    with pytest.raises(ValueError, match=r"epochs\(loader, ...\).state_dict\(\): .*in_order=True"):
        some.state_dict()
    with pytest.raises(ValueError, match="without state_dict and of 4 generators.*and here are 0"):
        batches.load_state_dict(batches_of(Drawing()).state_dict())
    next(batches)
    with pytest.raises(ValueError, match="batches have been read; call it before the loop"):
        batches.load_state_dict(batches.state_dict())
