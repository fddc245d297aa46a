"""The smallest training loop: every worker has only some of the digits, and their mean recognizes all.

torchrun --standalone --nproc-per-node 4 examples/digits.py
python examples/digits.py --simulate 4        the same workers in one process
python examples/digits.py                     one worker alone
"""

from typing import Literal

import torch
import torch.nn.functional as F
from command_line import at_least, run, start
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import decentfn as df


def predict(params: dict[str, Tensor], images: Tensor) -> Tensor:
    hidden = torch.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(predict(params, images), labels)


def main(
    steps: int = 300,
    topology: str = "base",
    seed: int = 0,
    simulate: int = 0,
    device: Literal["cpu", "cuda"] | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
) -> float:
    """Returns the held-out accuracy of the mean of all workers' parameters.

    Args:
        simulate: workers in this process; 0 is one, without the simulator.
        device: None takes GPUs where every process has one.
    """
    at_least(0, steps=steps)
    world = start(device, backend)
    num_workers = (simulate or 1) * world.size
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32, device=world.device)
    labels = torch.tensor(digits.target, device=world.device)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    try:
        who_meets_whom = df.topology(topology, num_workers)
    except TypeError as error:  # one that needs more than its name
        raise ValueError(error) from None
    sorted_rows = torch.tensor(train)[labels.cpu()[train].argsort(stable=True)]  # worker 0 sees zeros, ones, a few twos
    shards = df.data.fixed_shards(sorted_rows.tensor_split(num_workers), batch_size=32, seed=seed)

    draw = torch.Generator().manual_seed(seed)  # the same start on every worker
    params = {
        "w1": torch.randn(64, 64, generator=draw) / 8,
        "b1": torch.zeros(64),
        "w2": torch.randn(64, 10, generator=draw) / 8,
        "b2": torch.zeros(10),
    }
    init, decent_step = df.adapt_while_communicate(loss_fn, df.sgd(0.1, momentum=0.9), who_meets_whom)
    state = init({name: p.to(world.device) for name, p in params.items()})
    if simulate:
        state, decent_step = df.stack(state, simulate), df.simulate(decent_step, simulate)
    for t in range(steps):
        rows = torch.stack([shards.batch_at(t, worker) for worker in world.workers(simulate or 1)]).to(world.device)
        rows = rows if simulate else rows[0]
        state, metrics = decent_step(state, (images[rows], labels[rows]), t)

    distance = df.consensus_distance(state).item()  # collective, as is the mean: every rank asks for it
    accuracy = (predict(df.consensus_mean(state), images[test]).argmax(1) == labels[test]).float().mean().item()
    if world.rank == 0:
        print(f"{num_workers} workers: held-out accuracy {accuracy:.3f}, consensus distance {distance:.3g}")
    return accuracy


if __name__ == "__main__":
    run(main)
