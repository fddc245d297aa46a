"""Seconds of real ranks to the same held-out accuracy or bits per byte: `python -m tests.time_to_quality`, about 12 minutes.

Four gloo ranks; a step lasts 0.1 s (the rest of it is a sleep, so that two cores are enough), 0.3 s on worker 3 where it is
slow. Each rank keeps its parameters of every step, and what is compared is the mean of all ranks' z, every quarter of a
second, evaluated when the run has ended. `python -m tests.time_to_quality digits`: one of digits, skewed, bytes.
"""

import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from tests.ranks import Ranks
from tests.timing.skewed_labels import uncorrected_push

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
N, COMPUTE_S, EVERY_S = 4, 0.1, 0.25
PACES = {"equal workers": 1, "worker 3 three times slower": 3}
ONE_PEER = "one-peer-exp"
METHODS = {
    "PyTorch DDP": None,
    "one-peer gossip": lambda loss, inner: df.adapt_while_communicate(loss, inner, df.topology(ONE_PEER, N)),
    "asynchronous push": lambda loss, inner: df.asynchronous_gradient_push(loss, inner, df.topology(ONE_PEER, N)),
}
UNCORRECTED = {"asynchronous push, η / w": lambda loss, inner: uncorrected_push(loss, inner, df.topology(ONE_PEER, N))}


class Digits:
    """Two layers on digits; the score is held-out accuracy."""

    alpha, target, seconds = 10.0, 0.93, (12.0, 27.0)

    def __init__(self, rank, seed):
        import skewed_digits

        self.data, self.held_out = skewed_digits.load()
        self.shards = df.data.fixed_shards(
            df.data.dirichlet_shards(self.data.labels, N, self.alpha, seed), batch_size=32, seed=seed
        )
        draw = torch.Generator().manual_seed(seed)
        self.module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=draw)
        self.rank, self.inner = rank, df.sgd(0.1, momentum=0.9)

    def torch_optimizer(self, parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def batch(self, t):
        return tuple(self.data.take(self.shards.batch_at(t, self.rank)))

    def criterion(self, outputs, labels):
        return F.cross_entropy(outputs, labels)

    def score(self, module):
        return (module(self.held_out.images).argmax(-1) == self.held_out.labels).double().mean().item()

    def is_reached(self, score):
        return score >= self.target


class SkewedDigits(Digits):
    """Each worker has few digits."""

    alpha, target = 0.1, 0.90


class Bytes:
    """A small transformer on the bytes of Python's standard library; the score is held-out bits per byte."""

    target, seconds = 3.5, (14.0, 32.0)

    def __init__(self, rank, seed):
        import byte_transformer as models

        train, held_out, _ = models.read_corpus()
        self.windows, self.rank, self.seed = models.Windows(train, 64), rank, seed
        held_out = models.Windows(held_out, 64)
        self.held_out = [torch.stack(x) for x in zip(*(held_out[37 * i] for i in range(128)), strict=True)]
        torch.manual_seed(seed)
        self.module, self.inner = models.Transformer(64, 32, 1, 2), df.adam(8e-3)

    def torch_optimizer(self, parameters):
        return torch.optim.Adam(parameters, 8e-3)

    def batch(self, t):
        draw = torch.Generator().manual_seed((self.seed * N + self.rank) * 100_000 + t)
        rows = torch.randint(len(self.windows), (8,), generator=draw).tolist()
        return tuple(torch.stack(x) for x in zip(*(self.windows[row] for row in rows), strict=True))

    def criterion(self, outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def score(self, module):
        return self.criterion(module(self.held_out[0]), self.held_out[1]).item() / math.log(2)

    def is_reached(self, score):
        return score <= self.target


TASKS = {"digits": Digits, "skewed": SkewedDigits, "bytes": Bytes}


def train(task, method, slower, seed, seconds):
    """This rank's parameters, flat, with the seconds at which it had them, at most one of every `EVERY_S`."""
    rank = dist.get_rank()
    its, pace = TASKS[task](rank, seed), COMPUTE_S * (slower if rank == N - 1 else 1)
    due = 0.0

    def rest():
        time.sleep(max(0.0, due - time.perf_counter()))

    if method == "PyTorch DDP":
        model = DistributedDataParallel(its.module)
        optimizer = its.torch_optimizer(model.parameters())

        def take(t):
            optimizer.zero_grad()
            inputs, targets = its.batch(t)
            loss = its.criterion(model(inputs), targets)
            rest()
            loss.backward()
            optimizer.step()

        def flat():
            return torch.nn.utils.parameters_to_vector(its.module.parameters()).detach()
    else:

        def criterion(outputs, targets):
            found = its.criterion(outputs, targets)
            rest()
            return found

        params, buffers, loss_fn = df.functional(its.module, criterion)
        init, step = (METHODS | UNCORRECTED)[method](df.autograd(loss_fn), its.inner)
        state = init(params, buffers)
        names = [name for name, _ in its.module.named_parameters()]

        def take(t):
            nonlocal state
            state, _ = step(state, its.batch(t), t)

        def flat():
            now = df.params(state)
            return torch.cat([now[name].flatten() for name in names])

    waits = not method.startswith("asynchronous")
    dist.barrier()
    found, start, t = [], time.perf_counter(), 0
    # Those that wait for each other take the same number of steps.
    while t * COMPUTE_S * slower < seconds if waits else time.perf_counter() - start < seconds:
        due = time.perf_counter() + pace
        take(t)
        t, now = t + 1, time.perf_counter() - start
        if found and int(found[-1][0] / EVERY_S) == int(now / EVERY_S):
            found.pop()
        found.append((now, flat().clone()))
    dist.barrier()
    return t, [(now, x.numpy()) for now, x in found]


def curve(task, seed, found):
    """Scores of the ranks' mean, by seconds."""
    its = TASKS[task](0, seed)
    last = min(rows[-1][0] for _, rows in found)
    scores, places = [], [0] * N
    for at in torch.arange(EVERY_S, last + EVERY_S, EVERY_S).tolist():
        for i, (_, rows) in enumerate(found):
            while places[i] + 1 < len(rows) and rows[places[i] + 1][0] <= at:
                places[i] += 1
        if all(rows[0][0] <= at for _, rows in found):
            mean = sum(torch.from_numpy(rows[places[i]][1]) for i, (_, rows) in enumerate(found)) / N
            torch.nn.utils.vector_to_parameters(mean, its.module.parameters())
            with torch.no_grad():
                scores.append((at, its.score(its.module)))
    first = next(
        (at for (at, a), (_, b) in zip(scores, scores[1:], strict=False) if its.is_reached(a) and its.is_reached(b)),
        math.inf,
    )
    return first, scores


def main(*tasks, seeds=(0, 1)):
    torch.set_num_threads(1)
    for task in tasks or TASKS:
        methods = [*METHODS, *(UNCORRECTED if task == "skewed" else ())]
        for pace, slower in PACES.items():
            seconds = TASKS[task].seconds[slower > 1]
            for method in methods:
                lasts = TASKS[task].seconds[0] if method.startswith("asynchronous") else seconds
                firsts, ends, steps = [], [], []
                for seed in seeds:
                    ranks = Ranks(N)
                    found = ranks.run(train, task, method, slower, seed, lasts)
                    ranks.close()
                    first, scores = curve(task, seed, found)
                    firsts.append(first)
                    ends.append(sum(score for _, score in scores[-8:]) / len(scores[-8:]))
                    steps.append([t for t, _ in found])
                    print("   ", seed, [round(score, 3) for _, score in scores[3::4]], file=sys.stderr)
                print(
                    f"{task}, {pace}: {method:28} to {TASKS[task].target}: {', '.join(f'{s:.2f}' for s in firsts)} s;"
                    f" at the end {', '.join(f'{s:.3f}' for s in ends)}; steps {steps}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
