"""Steps per second of fast workers beside a slow one: `python -m tests.stragglers` prints the table of docs/surviving.md.

Four gloo ranks; a step computes for 0.1 s (a sleep, so that two cores are enough), 0.3 s where a worker is slow.
In brackets: the share of its time in which a fast worker computes; 1.00 is as fast as itself, whoever is slow.
`python -m tests.stragglers 0.02 asynchronous gossip`: of 0.02 s; methods with these words in their names.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from tests.ranks import Ranks

N, STEPS, WARM_UP = 4, 44, 4
COMPUTE_S, SLOWER = 0.1, 3
METHODS = {
    "no messages": lambda loss: df.adapt_while_communicate(
        loss, df.sgd(0.1), df.topologies.every(10**9, df.topology("one-peer-exp", N))
    ),
    "no library: torch.optim.SGD": None,
    "one-peer gossip (`adapt_while_communicate`)": lambda loss: df.adapt_while_communicate(
        loss, df.sgd(0.1), df.topology("one-peer-exp", N)
    ),
    "push-sum": lambda loss: pushed(loss, delay=0),
    "push-sum, 1 step late": lambda loss: pushed(loss, delay=1),
    "push-sum, 4 steps late": lambda loss: pushed(loss, delay=4),
    "push-sum, 1 to 4 steps late": lambda loss: pushed(loss, delay=4, least_delay=1),
    "asynchronous push-sum": lambda loss: df.asynchronous_gradient_push(
        loss, df.sgd(0.1), df.topology("one-peer-exp-directed", N)
    ),
    "DiLoCo, 20 inner steps": lambda loss: df.diloco(loss, df.sgd(0.1), df.topology("complete", N), inner_steps=20),
    "PyTorch DDP": None,
}
SLOW = {
    "worker 3, always": lambda rank, t: rank == 3,
    "one worker, drawn in each step": lambda rank, t: rank == int(df.draws.integers(0, t, 0, (), N)),
    "nobody": lambda rank, t: False,
}


def pushed(loss, **delays):
    return df.stochastic_gradient_push(loss, df.sgd(0.1), df.topology("one-peer-exp-directed", N), **delays)


def loss_fn(params, batch):
    return ((params - batch) ** 2).sum()


def torch_step(method):
    model = torch.nn.Linear(32, 32)
    model = DistributedDataParallel(model) if method == "PyTorch DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(rank, t):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 32)).square().sum()
        compute(rank, t)
        loss.backward()
        optimizer.step()

    return step


def gossip_step(method):
    waits = []

    @df.autograd
    def loss(params, batch):
        compute(*waits)
        return loss_fn(params, batch)

    init, step = METHODS[method](loss)
    state = init(torch.zeros(1024))

    def take(rank, t):
        nonlocal state
        waits[:] = rank, t
        state, _ = step(state, torch.ones(1024), t)

    return take


slow, seconds = None, COMPUTE_S


def compute(rank, t):
    time.sleep(lasts(rank, t))


def lasts(rank, t):
    return seconds * (SLOWER if SLOW[slow](rank, t) else 1)


def rate(method, who, of_compute):
    """Steps per second of this worker, and the share of its time in which it computes."""
    global slow, seconds
    slow, seconds, rank = who, of_compute, dist.get_rank()
    step = torch_step(method) if METHODS[method] is None else gossip_step(method)
    dist.barrier()
    for t in range(STEPS):
        if t == WARM_UP:
            start = time.perf_counter()
        step(rank, t)
    took = time.perf_counter() - start
    return (STEPS - WARM_UP) / took, sum(lasts(rank, t) for t in range(WARM_UP, STEPS)) / took


def main(of_compute=COMPUTE_S, *words):
    ranks = Ranks(N)
    heads = ["steps/s of workers 0 to 2", *SLOW]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for method in METHODS:
        if words and not any(word in method for word in words):
            continue
        rates = [torch.tensor(ranks.run(rate, method, who, float(of_compute))[:3]).mean(0).tolist() for who in SLOW]
        print(f"| {method} | " + " | ".join(f"{r:.1f} ({share:.2f})" for r, share in rates) + " |", flush=True)
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
