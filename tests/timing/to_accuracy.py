"""Time to a held-out score, of real ranks: asynchronous push, one-peer gossip and DDP, by a sleep per step.

python -m tests.timing.to_accuracy 0 1                digits to 93 %: seeds 0 and 1, with equal workers and with one that is always
                                                      3 times slower
python -m tests.timing.to_accuracy 0 equal            equal workers alone
python -m tests.timing.to_accuracy 0 language         a language model to 3.6 bits per byte

A step's gradient takes 0.1 s: its own computation, and a sleep for the rest; a slow worker's takes 0.3 s. Each method has its
own learning rate on language (tests/timing/rates.py found them), and the same on digits.

Each rank keeps its parameters; their mean at every 0.1 s is evaluated afterwards, the language model's at every 0.5 s.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from tests.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import skewed_digits

N, COMPUTE_S, SLOWER = 4, 0.1, 3
MOMENTUM = (lambda params, rate: torch.optim.SGD(params, rate, momentum=0.9), lambda rate: df.sgd(rate, momentum=0.9))
ADAM = (lambda params, rate: torch.optim.AdamW(params, rate), lambda rate: df.adamw(rate, weight_decay=0.01))
ONE_PEER = "one-peer-exp"
TUNED = {"asynchronous": (ONE_PEER, 4e-3, 60), "gossip": (ONE_PEER, 2e-3, 0), "DDP": ("complete", 2e-3, 0)}
METHODS = {"asynchronous": df.asynchronous_gradient_push, "gossip": df.adapt_while_communicate, "DDP": None}


class Task(NamedTuple):
    """What is learned. Steps begin with equal modules; a batch is what the module takes, and what it returns is the loss."""

    module: Callable[[int], torch.nn.Module]
    batches: Callable[[int, int], Iterator[Any]]  # of a seed and a rank
    score: Callable[[torch.nn.Module], float]
    target: float
    optimizers: tuple[Callable[..., torch.optim.Optimizer], Callable[..., Any]]  # PyTorch's and this library's
    settings: dict[
        str, tuple[str, float, int]
    ]  # of each method: topology, peak rate, updates of the linear warm-up to it
    every_s: float  # between two evaluations
    in_a_row: int
    seconds: dict[str, float]


class Digits(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.all = torch.nn.ParameterDict(skewed_digits.start(seed))

    def forward(self, batch):
        return skewed_digits.loss_fn(dict(self.all), batch)


def digits_of(seed, rank):
    data, _ = skewed_digits.load()
    shards = df.data.dirichlet_shards(data.labels, N, 10.0, seed)
    rows = df.data.fixed_shards(shards, batch_size=16, seed=seed)
    return (data.take(rows.batch_at(k, rank)) for k in range(10**9))


def accuracy(module):
    return skewed_digits.accuracy(dict(module.all), skewed_digits.load()[1])


class Language(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        from byte_transformer import Transformer  # here, as pytest imports this file, and that one filters warnings

        torch.manual_seed(seed)
        self.transformer = Transformer(seq_len=64, dim=64, layers=2, heads=4)

    def forward(self, batch):
        inputs, targets = batch
        return cross_entropy(self.transformer(inputs).flatten(0, 1), targets.flatten())


@cache
def windows(held_out):
    from byte_transformer import Windows, read_corpus

    return Windows(read_corpus()[held_out], 64)


def text_of(seed, rank):
    text = windows(False)
    rows = df.data.shards(len(text), N, 8, seed=seed)
    return (
        tuple(map(torch.stack, zip(*(text[int(i)] for i in rows.batch_at(k, rank)), strict=True))) for k in range(10**9)
    )


@torch.no_grad()
def minus_bits(module):
    text = windows(True)
    some = [text[i] for i in range(0, len(text), len(text) // 128)]
    return -float(module(tuple(map(torch.stack, zip(*some, strict=True))))) / math.log(2)


TASKS = {
    "digits": Task(
        Digits,
        digits_of,
        accuracy,
        0.93,
        MOMENTUM,
        dict.fromkeys(METHODS, (ONE_PEER, 0.05, 0)),
        0.1,
        5,
        {"equal": 20.0, "one slow": 45.0},
    ),
    "language": Task(Language, text_of, minus_bits, -3.6, ADAM, TUNED, 0.5, 2, {"equal": 30.0, "one slow": 60.0}),
}


def steps_of(task, method, seed, compute):
    """A function that takes a step, and returns this rank's parameters after it."""
    module, (schedule, peak, warmup) = task.module(seed), task.settings[method]
    if METHODS[method] is None:
        both = DistributedDataParallel(module)
        optimizer = task.optimizers[0](module.parameters(), peak)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / warmup) if warmup else 1.0)

        def by_torch(batch, t):
            optimizer.zero_grad()
            loss = both(batch)
            compute()
            loss.backward()
            optimizer.step()
            rate.step()
            return {name: x.detach().clone() for name, x in module.named_parameters()}

        return by_torch

    params, buffers, of_module = df.functional(module, lambda loss, _: loss)

    @df.autograd
    def loss(params, buffers, batch):
        compute()
        return of_module(params, buffers, (batch, None))

    optimizer = task.optimizers[1](df.schedules.linear(0.0, peak, warmup) if warmup else peak)
    init, step = METHODS[method](loss, optimizer, df.topology(schedule, N))
    state = init(params, buffers)

    def take(batch, t):
        nonlocal state
        state, _ = step(state, batch, t)
        return {name: x.clone() for name, x in df.params(state).items()}

    return take


def of_a_gradient(module, batch):
    """Seconds of this process for a gradient: with a sleep for the rest, a slow worker's is SLOWER times a fast one's."""
    took = []
    for _ in range(5):
        began = time.thread_time()
        module(batch).backward()
        took.append(time.thread_time() - began)
    return min(took)


def run(name, method, seed, where):
    torch.set_num_threads(1)
    task, rank = TASKS[name], dist.get_rank()
    batches = task.batches(seed, rank)
    seconds = COMPUTE_S * (SLOWER if where == "one slow" and rank == N - 1 else 1)
    sleeps = max(0.0, seconds - of_a_gradient(task.module(seed), next(batches)))
    take = steps_of(task, method, seed, lambda: time.sleep(sleeps))
    dist.barrier()
    began, found = time.perf_counter(), []
    if method == "asynchronous":
        loop = df.data.until(batches, seconds=task.seconds[where])
    else:  # all take the same number of steps
        slowest = COMPUTE_S * (SLOWER if where == "one slow" else 1)
        loop = zip(range(int(task.seconds[where] / slowest)), batches, strict=False)
    for t, batch in loop:
        x = take(batch, t)
        now = time.perf_counter() - began
        if len(found) > 1 and now // task.every_s == found[-2][0] // task.every_s:
            found.pop()  # one later in the same interval counts
        found.append((now, x))
    dist.barrier()
    return [(at, {name: leaf.numpy() for name, leaf in x.items()}) for at, x in found]  # a tensor would send a file


def first(task, ranks):
    """Seconds until the mean of all ranks' parameters is this good at so many evaluations in a row."""
    module, in_a_row = task.module(0), 0
    for number in range(1, int(max(task.seconds.values()) / task.every_s)):
        now = [[x for at, x in its if at <= number * task.every_s][-1:] for its in ranks]
        if all(now):
            mean = {name: torch.from_numpy(np.mean([x[name] for [x] in now], 0)) for name in now[0][0]}
            module.load_state_dict(mean)
            in_a_row = in_a_row + 1 if task.score(module) >= task.target else 0
            if in_a_row == task.in_a_row:
                return (number - in_a_row + 1) * task.every_s
    return math.inf


if __name__ == "__main__":
    ranks, task = Ranks(N), "language" if "language" in sys.argv else "digits"
    for where in [where for where in sys.argv[1:] if where in TASKS[task].seconds] or TASKS[task].seconds:
        for seed in map(int, filter(str.isdigit, sys.argv[1:])):
            took = {m: first(TASKS[task], ranks.run(run, task, m, seed, where)) for m in METHODS}
            print(f"{where:9} seed {seed}: " + ", ".join(f"{name} {s:.1f} s" for name, s in took.items()), flush=True)
    ranks.close()
