"""Digits with DistributedDataParallel. `decent.py` is the same script, line for line, without a coordinator.

torchrun --standalone --nproc-per-node 2 examples/from_ddp/ddp.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


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
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/from_ddp/ddp.pt"))
    config = parser.parse_args()
    if config.steps < 1:
        parser.error(f"--steps {config.steps}: it is at least 1.")

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(0)

    train, test = datasets()
    sampler = DistributedSampler(train, size, rank, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=1, drop_last=True)
    test_loader = DataLoader(test, batch_size=100)

    model = DistributedDataParallel(Net().to(device))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.steps)

    t = 0
    if config.checkpoint.exists():
        saved = torch.load(config.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        t = saved["step"]

    model.train()
    while t < config.steps:
        sampler.set_epoch(t // len(loader))  # a resumed run begins its epoch again
        for images, labels in loader:
            if t == config.steps:
                break
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            t += 1
            if t % 100 == 0 or t == config.steps:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {t}: loss {mean.item() / size:.3f}", flush=True)

    if rank == 0:
        config.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(states | {"step": t}, config.checkpoint)

    model.eval()
    hits = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for k, (images, labels) in enumerate(test_loader):
            if k % size == rank:
                right = model.module(images.to(device)).argmax(1) == labels.to(device)
                hits += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy on the test set: {hits[0] / hits[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
