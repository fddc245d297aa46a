"""Two gloo ranks with loaders of two processes each, killed in the middle of epochs: what they read, and where they end."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import decentfn as df
from tests.ranks import free_port

ROWS, BATCH, EPOCHS = 48, 4, 3
STEPS_PER_EPOCH = ROWS // 2 // BATCH
PROCESSES = 2
"""Of each loader."""


def noise() -> float:
    """Of all global generators; a loader with a state of its own does not keep those of its processes."""
    return float(torch.rand(())) + np.random.rand() + random.random()


class Rows(Dataset):  # type: ignore[type-arg]
    """Numbered rows; with noise, augmented."""

    def __init__(self, is_noisy: bool) -> None:
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, i % 7, noise() if self.is_noisy else 0.0])


class Stream(IterableDataset):  # type: ignore[type-arg]
    """This rank's rows in an order of its own for each epoch; each of the loader's processes reads a part."""

    def __init__(self, rank: int, is_noisy: bool) -> None:
        self.rank, self.rows, self.epoch, self.read = rank, Rows(is_noisy), 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        info = get_worker_info()
        order = np.random.default_rng(self.epoch).permutation(ROWS)[self.rank :: 2][info.id :: info.num_workers]
        first, self.read = self.read, 0
        for self.read, i in enumerate(order[first:], first + 1):
            yield self.rows[int(i)]
        self.read = 0

    def state_dict(self) -> dict[str, int]:  # for torchdata
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def loader_of(kind: str, rank: int, folder: Path) -> Any:
    """One rank's loader: of torch, with augmentation; or of another package, with the state that it keeps."""
    own = torch.Generator().manual_seed(rank)
    sampler = DistributedSampler(Rows(False), 2, rank, seed=3)
    if kind == "torch, map":
        return DataLoader(Rows(True), BATCH, sampler=sampler, num_workers=PROCESSES, generator=own)
    if kind == "torch, iterable":
        return DataLoader(Stream(rank, True), BATCH, num_workers=PROCESSES)
    if kind == "litdata":
        return _litdata(folder)
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    if kind == "torchdata, map":
        rows = [Rows(False)[i] for i in range(rank, ROWS, 2)]
        return loader(rows, BATCH, shuffle=True, num_workers=PROCESSES, generator=own)
    if kind == "torchdata, sampler":
        return loader(Rows(False), BATCH, sampler=sampler, num_workers=PROCESSES)
    if kind == "torchdata, iterable":
        return loader(Stream(rank, False), BATCH, num_workers=PROCESSES)
    made = importlib.import_module("datasets").Dataset.from_dict({"x": [Rows(False)[i].tolist() for i in range(ROWS)]})
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    # A stream's own `shuffle` does not take its state back in a loader's processes (datasets 5.2: IndexError).
    stream = split(made.shuffle(seed=1).to_iterable_dataset(num_shards=4), rank=rank, world_size=2)
    return loader(stream.with_format("torch"), BATCH, num_workers=PROCESSES)


def _litdata(folder: Path) -> Any:
    """litdata divides the chunks over the ranks of the process group and their processes."""
    lit = importlib.import_module("litdata")
    data = lit.StreamingDataset(str(folder / "chunks"), shuffle=True, seed=2)
    return lit.StreamingDataLoader(data, batch_size=BATCH, num_workers=PROCESSES)


def _write_chunks(folder: Path) -> None:
    """Outside the process group, where litdata's writer waits for the parts of all ranks."""
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(folder / "chunks"), chunk_size=6)
    for i in range(ROWS):
        writer[i] = {"x": Rows(False)[i]}
    writer.done()
    writer.merge(1)


def train(rank: int, port: int, folder: Path, kind: str, deaths: list[tuple[int, int]]) -> None:
    """Train from the newest checkpoint; die if the next of `deaths`, (rank, t), is this rank's."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loaders' processes end with their rank, not with a server
    df.init(timeout=timedelta(hours=1))
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    params, buffers, loss_fn = df.functional(module, forward=lambda module, x: module(x / ROWS).square().mean())
    init, step = df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("ring", 2))
    state, first, batches = init(params, buffers), 0, df.data.epochs(loader_of(kind, rank, folder), EPOCHS)
    if df.checkpoint.latest(folder / "run"):
        state, first, extra, _ = df.checkpoint.restore(folder / "run", state)
        batches.load_state_dict(extra)
    done = len([*folder.glob("death *")])
    with df.checkpoint.Saver(folder / "run") as saver, (folder / f"{rank}.jsonl").open("a") as log:
        log.write(json.dumps({"first": first}) + "\n")
        for t, batch in batches:
            if tuple(deaths[done : done + 1]) == ((rank, t),):
                (folder / f"death {done}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            x = batch["x"] if hasattr(batch, "keys") else batch
            state, _ = step(state, x, t)
            drawn = [float(torch.rand(())), np.random.rand(), random.random()]
            log.write(json.dumps({"t": t, "batch": x.tolist(), "drawn": drawn}) + "\n")
            log.flush()
            saver.save(state, t + 1, extra=batches.state_dict())
    (folder / f"{rank}.end").write_text(json.dumps({name: x.tolist() for name, x in df.params(state).items()}))


def run(folder: Path, kind: str, deaths: list[tuple[int, int]]) -> list[list[Any]]:
    """Start both ranks until they end; return each one's lines, and its parameters as the last."""
    folder.mkdir()
    if kind == "litdata":
        _write_chunks(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["decentfn", "torchdata.stateful_dataloader", "datasets", "litdata"])  # if installed
    for attempt in range(len(deaths) + 1):
        port = free_port()
        ranks = [context.Process(target=train, args=(rank, port, folder, kind, deaths)) for rank in range(2)]
        for process in ranks:
            process.start()
        while all(process.exitcode in (None, 0) for process in ranks) and any(process.is_alive() for process in ranks):
            wait([process.sentinel for process in ranks if process.is_alive()])
            for process in ranks:
                process.join(0)
        ended = {process.exitcode for process in ranks} - {None, 0}
        for process in ranks:
            process.kill()
            process.join()
        is_killed = attempt < len(deaths)
        assert (-signal.SIGKILL in ended) if is_killed else not ended, f"attempt {attempt}: exit codes {ended}"
    lines = [[json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()] for rank in range(2)]
    return [[*its, json.loads((folder / f"{rank}.end").read_text())] for rank, its in enumerate(lines)]
