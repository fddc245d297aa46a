"""Digits without a coordinator. `ddp.py` is the same script, line for line, with DistributedDataParallel.

torchrun --standalone --nproc-per-node 2 examples/from_ddp/decent.py
torchrun --standalone --nproc-per-node 2 examples/from_ddp/decent.py --algorithm all_reduce     DDP's arithmetic
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import decentfn as df


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
        )

    def forward(self, images):
        return self.layers(images)


def datasets():
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    return random_split(TensorDataset(images, labels), [0.8, 0.2], torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/from_ddp/decent"))
    parser.add_argument(
        "--algorithm", choices=["adapt_while_communicate", "all_reduce"], default="adapt_while_communicate"
    )
    config = parser.parse_args()
    if config.steps < 1:
        parser.error(f"--steps {config.steps}: it is at least 1.")
    try:
        df.checkpoint.latest(config.checkpoint)
    except OSError as error:
        parser.error(f"--checkpoint {error}")

    world = df.init(backend="gloo")
    rank, size = world.rank, world.size
    device = world.device
    torch.manual_seed(0)

    train, test = datasets()
    shards = df.data.shards(len(train), size, batch_size=32, seed=0)

    model = Net().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(model, batch):
        images, labels = batch
        with torch.autocast(device.type, torch.bfloat16):
            return criterion(model(images.to(device)), labels.to(device))

    def accuracy(model, batch):
        images, labels = batch
        return (model(images.to(device)).argmax(1) == labels.to(device)).float().mean()

    params, buffers, loss_fn = df.functional(model, forward=forward)
    *_, accuracy = df.functional(model, forward=accuracy)
    schedule = df.schedules.cosine(1e-2, config.steps)
    optimizer = df.chain(df.clip_by_global_norm(1.0), df.adamw(schedule, weight_decay=0.01))
    topology = df.topology("base", size)
    init, decent_step = getattr(df, config.algorithm)(df.autograd(loss_fn), optimizer, topology)
    state = init(*df.broadcast((params, buffers)))

    t = 0
    if df.checkpoint.latest(config.checkpoint):
        state, t, *_ = df.checkpoint.restore(config.checkpoint, state)

    sampler = df.data.batch_sampler(shards, rank, first_step=t, steps=config.steps)  # a resumed run reads on
    loader = DataLoader(df.data.seeded(train), batch_sampler=sampler, num_workers=1)
    for batch in loader:
        state, metrics = decent_step(state, batch, t)
        t += 1
        if t % 100 == 0 or t == config.steps:
            mean = df.mean(state, metrics.loss)
            if rank == 0:
                print(f"step {t}: loss {mean:.3f}", flush=True)

    df.checkpoint.save(config.checkpoint, state, t)

    test_loader = list(DataLoader(test, batch_size=100))[rank::size]
    hits = df.evaluate(accuracy, state, test_loader)
    if rank == 0:
        print(f"accuracy on the test set: {hits:.3f}")


if __name__ == "__main__":
    main()
