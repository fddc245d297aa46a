"""Data and model of the experiments and small examples: scikit-learn's digits (1,797 images of 8 x 8), two layers.

The workers' labels are skewed: with α = 0.1 each has only a few digits, and together they have all.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import decentfn as df

Params = dict[str, Tensor]


class Data(NamedTuple):
    images: Tensor  # [M, 64], in [0, 1]
    labels: Tensor  # [M]

    def take(self, rows: Tensor) -> "Data":
        return Data(self.images[rows], self.labels[rows])


def load() -> tuple[Data, Data]:
    """Training and held-out data."""
    loaded = load_digits()
    images, labels = torch.tensor(loaded.data / 16.0, dtype=torch.float32), torch.tensor(loaded.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    data = Data(images, labels)
    return data.take(torch.tensor(train)), data.take(torch.tensor(test))


def start(seed: int = 0) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {
        "w1": torch.randn(64, 32, generator=draw) / 8,
        "b1": torch.zeros(32),
        "w2": torch.randn(32, 10, generator=draw) / 32**0.5,
        "b2": torch.zeros(10),
    }


def predict(params: Params, images: Tensor) -> Tensor:
    hidden = torch.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_fn(params: Params, batch: Data) -> Tensor:
    return F.cross_entropy(predict(params, batch.images), batch.labels)


def accuracy(params: Params, data: Data) -> float:
    return (predict(params, data.images).argmax(-1) == data.labels).float().mean().item()


def train(algorithm: df.Algorithm, num_workers: int, steps: int, alpha: float = 0.1) -> df.State:
    """The stacked state of all workers, simulated in this process, after so many steps of 16 images each."""
    data, _ = load()
    shards = df.data.fixed_shards(df.data.dirichlet_shards(data.labels, num_workers, alpha), batch_size=16)
    state, step = df.stack(algorithm.init(start()), num_workers), df.simulate(algorithm.step, num_workers)
    for t in range(steps):
        state, _ = step(state, data.take(shards.stacked_at(t)), t)
    return state
