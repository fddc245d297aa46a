"""Time to 93 % held-out accuracy on digits, of real ranks: asynchronous push, one-peer gossip and DDP, by a sleep per step.

python -m tests.timing.to_accuracy 0 1                seeds 0 and 1, with equal workers and with one that is always 3 times slower
python -m tests.timing.to_accuracy 0 equal            equal workers alone

Each rank keeps its parameters of every step; their mean at every 0.1 s is evaluated afterwards.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from tests.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import skewed_digits as digits

N, COMPUTE_S, SLOWER, LEARNING_RATE, TARGET = 4, 0.1, 3, 0.05, 0.93
SECONDS = {"equal": 20.0, "one slow": 45.0}
METHODS = {"asynchronous": df.asynchronous_gradient_push, "gossip": df.adapt_while_communicate, "DDP": None}


class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.all = torch.nn.ParameterDict(digits.start(seed))

    def forward(self, batch):
        return digits.loss_fn(dict(self.all), batch)


def steps_of(method, seed, compute):
    """A function that takes a step, and returns this rank's parameters after it."""
    if METHODS[method] is None:
        model = Model(seed)
        both, optimizer = (
            DistributedDataParallel(model),
            torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9),
        )

        def by_torch(batch, t):
            optimizer.zero_grad()
            loss = both(batch)
            compute()
            loss.backward()
            optimizer.step()
            return {name: x.detach().clone() for name, x in model.all.items()}

        return by_torch

    @df.autograd
    def loss(params, batch):
        compute()
        return digits.loss_fn(params, batch)

    init, step = METHODS[method](loss, df.sgd(LEARNING_RATE, momentum=0.9), df.topology("one-peer-exp", N))
    state = init(digits.start(seed))

    def take(batch, t):
        nonlocal state
        state, _ = step(state, batch, t)
        return {name: x.clone() for name, x in df.params(state).items()}

    return take


def run(method, seed, where):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    sleeps = COMPUTE_S * (SLOWER if where == "one slow" and rank == N - 1 else 1)
    take = steps_of(method, seed, lambda: time.sleep(sleeps))
    data, _ = digits.load()
    shards = df.data.dirichlet_shards(data.labels, N, 10.0, seed)
    rows = df.data.fixed_shards(shards, batch_size=16, seed=seed)
    batches = (data.take(rows.batch_at(k, rank)) for k in range(10**9))
    dist.barrier()
    began, found = time.perf_counter(), []
    if method == "asynchronous":
        loop = df.data.until(batches, seconds=SECONDS[where])
    else:  # all take the same number of steps
        slowest = COMPUTE_S * (SLOWER if where == "one slow" else 1)
        loop = zip(range(int(SECONDS[where] / slowest)), batches, strict=False)
    for t, batch in loop:
        x = take(batch, t)
        found.append((time.perf_counter() - began, x))
    dist.barrier()
    return found


def first(ranks):
    """Seconds until the mean of all ranks' parameters is this accurate at five evaluations in a row."""
    _, held_out = digits.load()
    in_a_row = 0
    for tenth in range(1, 10 * int(max(SECONDS.values()))):
        now = [[x for at, x in its if at <= tenth / 10][-1:] for its in ranks]
        if all(now):
            mean = {name: torch.stack([x[name] for [x] in now]).mean(0) for name in now[0][0]}
            in_a_row = in_a_row + 1 if digits.accuracy(mean, held_out) >= TARGET else 0
            if in_a_row == 5:
                return (tenth - 4) / 10
    return float("inf")


if __name__ == "__main__":
    ranks = Ranks(N)
    for where in [where for where in sys.argv[1:] if where in SECONDS] or SECONDS:
        for seed in map(int, filter(str.isdigit, sys.argv[1:])):
            took = {method: first(ranks.run(run, method, seed, where)) for method in METHODS}
            print(f"{where:9} seed {seed}: " + ", ".join(f"{name} {s:.1f} s" for name, s in took.items()), flush=True)
    ranks.close()
