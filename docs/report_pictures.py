"""Make the pictures of report.md: python docs/report_pictures.py; it needs chromium, and takes some seconds."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decentfn as df
from decentfn.plots.report import page
from decentfn.testing import on_ranks

FOLDER = Path(__file__).parent / "pictures"
N, STEPS, SLOW = 4, 160, 2


def train(folder: Path, first: int, last: int) -> None:
    """Train on four ranks, two to a node, of which one is slow."""
    torch.manual_seed(0)  # once: ranks are threads
    inputs = torch.randn(400, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3))
    params, buffers, loss_fn = df.functional(model, nn.functional.mse_loss)
    data = TensorDataset(inputs, (inputs @ torch.randn(16, 3)).tanh() + 0.3 * torch.randn(400, 3))
    shards = df.data.shards(len(data), N, batch_size=10, seed=0)

    def on_rank(rank: int) -> None:
        init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", N))
        state = init(params, buffers)
        if first:
            state, *_ = df.checkpoint.restore(folder, state)
        batches = DataLoader(data, batch_sampler=df.data.batch_sampler(shards, rank, first, steps=last))
        with df.logs.JSONLines(folder / "log.jsonl", first) as log:
            log.write({"config": {"optimizer": "sgd(0.1)", "topology": "one-peer-exp"}})
            for t, batch in enumerate(batches, start=first):
                time.sleep(0.01 * (1 + (rank == SLOW)))
                state, metrics = step(state, batch, t)
                if t % 2 == 0:
                    log.record(state, metrics, t)
                if (t + 1) % 40 == 0:
                    df.checkpoint.save(folder, state, t + 1)
                    log.write({"checkpoint": t + 1}, t)

    on_ranks(N, on_rank)


def shot(file: Path, name: str, height: int) -> None:
    """Save what a browser shows of a page."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=0.75",
        f"--window-size=1000,{height}",
    ]
    subprocess.run(["chromium", *options, f"--screenshot={FOLDER / name}.png", file.as_uri()], check=True)


def main() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with tempfile.TemporaryDirectory() as folder:
        run, times = Path(folder) / "a", Path(folder) / "b"
        for first, last in (0, STEPS // 2), (STEPS // 2, STEPS):
            train(run, first, last)
        links = df.planning.Cluster(N, df.planning.Link(1))
        exchange = df.timing.Exchange(df.topology("one-peer-exp", N), 4e6, is_awaited=False)
        times.mkdir()
        df.clock([0.1, 0.12, 0.1, 0.3], links).timeline(exchange, 15).save(times / "trace.json")
        os.chdir(folder)
        for name, source, height in ("report", run, 1480), ("report_trace", times, 420):
            file = Path(folder) / f"{name}.html"
            file.write_text(page([source.relative_to(folder)]))
            shot(file, name, height)


if __name__ == "__main__":
    main()
