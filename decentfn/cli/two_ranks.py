"""Program of the two ranks that `decentfn doctor` starts: one step over gloo, eager and compiled."""

import time

import torch

from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.engine.compilation import compile
from decentfn.optim.transforms import sgd
from decentfn.topologies import topology
from decentfn.train.consensus import consensus_mean
from decentfn.train.process_group import init


def _train() -> None:
    world = init(backend="gloo")
    start, step = adapt_while_communicate(lambda x, batch: (x * batch).sum(), sgd(1.0), topology("base", world.size))
    seconds = {}
    for name, run in {"eager": step, "compiled": compile(step)}.items():
        since, state = time.perf_counter(), start(torch.full((1000,), float(world.rank)))
        state, _ = run(state, torch.ones(1000), 0)
        mean = consensus_mean(state)
        if not torch.equal(mean, torch.full((1000,), -0.5)):
            raise RuntimeError(f"the {name} step computed a mean of {float(mean[0])}, not -0.5")
        seconds[name] = time.perf_counter() - since
    if world.rank == 0:
        print(", ".join(f"{name} step right after {took:.1f} s" for name, took in seconds.items()))


if __name__ == "__main__":
    _train()
