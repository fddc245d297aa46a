"""Loaders of other packages: the loop of this library sees what the same loader gives a plain loop, also after a restart."""

from __future__ import annotations

import importlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import decentfn as df
from tests.others.rows import Differs, check

ROWS, STEPS = 48, 6
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True).sin()
WAYS = ("alone", "simulated", "restarted")

Batch = Any
Source = Callable[[int, int], Any]  # of a worker and a number of workers: a loader


class Net(nn.Module):
    """With dropout: a step draws random numbers, and must leave those of the loader alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 1, dtype=torch.float64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(x))


def loader(packages: str, what: str, *, stateful: bool = False, special: str = "") -> Callable[[Source], Source]:
    """Register the function below: a loader of batches (x, y) of 4 rows for one worker of several.

    A stateful loader goes on after a restart by its own `state_dict`; another one by leaving out what was read.
    """

    def register(source: Source) -> Source:
        def attempt(way: str) -> None:
            workers = 2 if way == "simulated" else 1
            seen, expected = watched(source, workers, way, stateful), plainly(source, workers)
            for t, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
                for name, mine, other in zip("xy", ours, theirs, strict=True):
                    if not torch.equal(mine, other):
                        raise Differs(f"{name} of step {t} is not what the loader gives a plain loop")

        return check("loaders", packages, what, *WAYS, special=special)(attempt) and source

    return register


def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def plainly(source: Source, workers: int) -> list[tuple[Tensor, Tensor]]:
    """The batches without any training."""
    seeded()
    loaders = [iter(endless(source(worker, workers))) for worker in range(workers)]
    rows = [[pair(next(one)) for one in loaders] for _ in range(STEPS)]
    return [together(row) for row in rows]


def watched(source: Source, workers: int, way: str, stateful: bool) -> list[tuple[Tensor, Tensor]]:
    """Train, and return what the step was given; `restarted` saves in the middle, and goes on with everything new."""
    seeded()
    _, module = torch.manual_seed(0), Net()
    init, step, state = built(module, workers)
    seeded()
    loaders = [source(worker, workers) for worker in range(workers)]
    streams = [iter(endless(one)) for one in loaders]
    seen = []
    for t in range(STEPS):
        if way == "restarted" and t == 3:
            with tempfile.TemporaryDirectory() as folder:
                extra = loaders[0].state_dict() if stateful else {"read": t}
                df.checkpoint.save(folder, state, t, extra=extra)
                seeded()
                torch.rand(3), random.random(), np.random.rand()
                init, step, state = built(module, workers)
                if not stateful:  # what the restarted program reads again comes from the same random numbers
                    seeded()
                loaders = [source(worker, workers) for worker in range(workers)]
                state, start, extra, _ = df.checkpoint.restore(folder, state)
                if stateful:
                    loaders[0].load_state_dict(extra)
                streams = [iter(endless(one)) for one in loaders]
                if not stateful:
                    seeded()
                    for _ in range(start):
                        next(streams[0])
        batch = together([pair(next(stream)) for stream in streams])
        seen.append(batch)
        state, metrics = step(state, batch, t)
        assert metrics.loss.isfinite().all()
    return seen


def built(module: nn.Module, workers: int) -> Any:
    params, buffers, loss_fn = df.functional(module, F.mse_loss)
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.05), df.topology("complete", workers))
    state = init(params, buffers)
    return (init, step, state) if workers == 1 else (init, df.simulate(step, workers), df.stack(state, workers))


def together(row: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return row[0] if len(row) == 1 else tuple(torch.stack(column) for column in zip(*row, strict=True))  # type: ignore[return-value]  # fmt: skip


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch[0], batch[1])
    return torch.as_tensor(x).double(), torch.as_tensor(y).double()


def endless(loader: Any) -> Iterator[Batch]:
    while True:
        yield from loader


def samples(worker: int = 0, workers: int = 1) -> list[dict[str, Any]]:
    return [{"x": X[i].numpy(), "y": Y[i].numpy()} for i in range(worker, ROWS, workers)]


# -- the loaders ------------------------------------------------------------------------------------------------------


@loader("torch", "`DataLoader(shuffle=True)`, two processes, its own generator")
def own_generator(worker: int, workers: int) -> Any:
    own = torch.Generator().manual_seed(df.data.worker_seed(0, worker))
    return DataLoader(samples(worker, workers), 4, shuffle=True, num_workers=2, generator=own)  # type: ignore[arg-type]


@loader("torch", "`DataLoader(shuffle=True)` with the global generator", special="after a restart read again what was read, with the same seed")  # fmt: skip
def global_generator(worker: int, workers: int) -> Any:
    return DataLoader(samples(worker, workers), 4, shuffle=True)  # type: ignore[arg-type]


@loader("torch", "`DistributedSampler`")
def distributed_sampler(worker: int, workers: int) -> Any:
    from torch.utils.data import DistributedSampler

    data = TensorDataset(X, Y)
    return DataLoader(data, 4, sampler=DistributedSampler(data, workers, worker, shuffle=True, seed=3))


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Augments by NumPy's and Python's global numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + np.random.randn() + random.random(), Y[i]


@loader("numpy, torch", "augmentation by the global numbers of NumPy and Python, `df.data.seeded`")
def augmented(worker: int, workers: int) -> Any:
    shards = df.data.shards(ROWS, workers, batch_size=4, seed=0)
    return DataLoader(df.data.seeded(Noisy()), batch_sampler=df.data.batch_sampler(shards, worker, steps=STEPS))


@loader("torchdata", "`StatefulDataLoader`, its state in `extra`", stateful=True)
def stateful_loader(worker: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = torch.Generator().manual_seed(worker)
    return StatefulDataLoader(samples(worker, workers), 4, shuffle=True, generator=own)


@loader("torchdata", "`torchdata.nodes.Loader`, its state in `extra`", stateful=True)
def nodes(worker: int, workers: int) -> Any:
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    rows = samples(worker, workers)
    sampler = torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(worker))  # type: ignore[arg-type]
    return Loader(
        Mapper(Batcher(Mapper(SamplerWrapper(sampler), rows.__getitem__), 4), torch.utils.data.default_collate)
    )


@loader("datasets", "a map-style data set, shards by worker")
def hugging_face(worker: int, workers: int) -> Any:
    kind = importlib.import_module("datasets").Dataset
    data = kind.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch", dtype=torch.float64)
    return DataLoader(data.shuffle(seed=0).shard(workers, worker), 4)


@loader("datasets", "an `IterableDataset`, its state in `extra`", stateful=True)
def hugging_face_stream(worker: int, workers: int) -> Any:
    kind = importlib.import_module("datasets").Dataset
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    data = kind.from_dict({"x": X.tolist(), "y": Y.tolist()}).to_iterable_dataset(num_shards=4)
    return split(data, rank=worker, world_size=workers).with_format("numpy").batch(4)


@loader("webdataset", "tar files, split by worker")
def tar_files(worker: int, workers: int) -> Any:
    web, folder = importlib.import_module("webdataset"), Path(tempfile.mkdtemp())
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for i in range(shard, ROWS, 2):
                text = json.dumps({"x": X[i].tolist(), "y": Y[i].tolist()}).encode()
                entry = tarfile.TarInfo(f"{i:04}.json")
                entry.size = len(text)
                file.addfile(entry, io.BytesIO(text))
    urls = [str(folder / f"{shard}.tar") for shard in range(2)][worker::workers]
    stream = web.WebDataset(urls, shardshuffle=False).decode()
    return DataLoader(stream.map(lambda s: {k: torch.tensor(v, dtype=torch.float64) for k, v in s["json"].items()}), 4)


@loader("litdata", "`StreamingDataLoader`, its state in `extra`", stateful=True)
def streaming(worker: int, workers: int) -> Any:
    lit, folder = importlib.import_module("litdata"), f"chunks-{worker}-of-{workers}"
    if Path(folder).exists():
        return lit.StreamingDataLoader(lit.StreamingDataset(folder, shuffle=False), batch_size=4, num_workers=0)
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(folder, chunk_size=16)
    for i, row in enumerate(samples(worker, workers)):
        writer[i] = row
    writer.done()
    writer.merge(1)
    return lit.StreamingDataLoader(lit.StreamingDataset(folder, shuffle=False), batch_size=4, num_workers=0)


@loader(
    "monai",
    "`CacheDataset` with random transforms",
    special="`data.transform.set_random_state` for each worker; before, `Compose` undoes it",
)
def cached(worker: int, workers: int) -> Any:
    data, transforms = importlib.import_module("monai.data"), importlib.import_module("monai.transforms")
    noise = transforms.RandGaussianNoised("x", prob=1.0, std=0.1, dtype=np.float64)
    made = data.CacheDataset(samples(worker, workers), noise, progress=False)
    made.transform.set_random_state(worker)
    return DataLoader(made, 4)


@loader("torch_geometric", "its `DataLoader` of graphs, as tensors")
def geometric(worker: int, workers: int) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as Graphs

    rows = [Data(x=X[i : i + 1], y=Y[i : i + 1]) for i in range(worker, ROWS, workers)]
    return Mapped(Graphs(rows, 4), lambda b: (b.x, b.y))


class Mapped:
    """A loader whose batches go through a function."""

    def __init__(self, loader: Iterable[Any], function: Callable[[Any], Any]) -> None:
        self.loader, self.function = loader, function

    def __iter__(self) -> Iterator[Any]:
        return map(self.function, self.loader)


@loader("torchrl, tensordict", "a `TensorDictReplayBuffer`")
def replay(worker: int, workers: int) -> Any:
    rl, tensordict = importlib.import_module("torchrl.data"), importlib.import_module("tensordict")
    own = torch.Generator().manual_seed(worker)
    buffer = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(ROWS), batch_size=4, generator=own)
    buffer.extend(tensordict.TensorDict({"x": X[worker::workers], "y": Y[worker::workers]}, [ROWS // workers]))
    return buffer


@loader(
    "accelerate",
    "a prepared loader, `skip_first_batches`",
    special="`prepare_data_loader` alone, without `Accelerator`",
)
def prepared(worker: int, workers: int) -> Any:
    prepare = importlib.import_module("accelerate.data_loader").prepare_data_loader
    data = DataLoader(TensorDataset(X, Y), 4)
    return prepare(data, num_processes=workers, process_index=worker, put_on_device=False)


@loader("torchvision, torch", "random transforms v2, `df.data.seeded`")
def transformed(worker: int, workers: int) -> Any:
    from torchvision.transforms import v2

    change = v2.Compose([v2.GaussianNoise(sigma=0.1, clip=False), v2.RandomErasing(p=0.0)])
    rows = [(change, X[i], Y[i]) for i in range(ROWS)]
    shards = df.data.shards(ROWS, workers, batch_size=4, seed=0)
    data = df.data.seeded(Changed(rows))
    return DataLoader(data, batch_sampler=df.data.batch_sampler(shards, worker, steps=STEPS))


class Changed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows, each through its random transform."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        change, x, y = self.rows[i]
        return change(x.view(1, 1, 3)).view(3), y
