"""Cost of `df.survive` while nothing fails: `python -m tests.survival_cost [BACKEND]`, on a quiet machine.

Four gloo ranks take blocks of steps with and without it in turn; a step computes for 20 ms (a sleep, so that two cores
are enough). Prints the median step of each, over all ranks.
"""

import statistics
import sys
import time

import torch

import decentfn as df
from tests.ranks import Ranks

N, COMPUTE_S, PARAMETERS = 4, 0.02, 100_000
BLOCKS, BLOCK = 120, 10


@df.autograd
def loss_fn(params, batch):
    time.sleep(COMPUTE_S)
    return ((params - batch) ** 2).sum()


def times(backend):
    """Seconds of this rank's steps without and with `df.survive`, but for the first of each block."""
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", N))
    if backend:
        step = df.compile(step, donate=False, backend=backend)
    steps = step, df.survive(step)
    state, batch, t = init(torch.zeros(PARAMETERS)), torch.ones(PARAMETERS), 0
    taken = [], []
    for block in range(-2, 2 * BLOCKS):
        for k in range(BLOCK):
            since = time.perf_counter()
            state, _ = steps[block % 2](state, batch, t)
            if block >= 0 and k:
                taken[block % 2].append(time.perf_counter() - since)
            t += 1
    return taken


def main(backend=None):
    ranks = Ranks(N)
    found = ranks.run(times, backend)
    ranks.close()
    without, with_it = (statistics.median(s for its in found for s in its[kind]) for kind in range(2))
    print(
        f"a step of {1e3 * without:.3f} ms takes {1e3 * with_it:.3f} ms with df.survive: {with_it / without - 1:+.2%}"
    )
    of_ranks = [statistics.median(its[1]) / statistics.median(its[0]) - 1 for its in found]
    print("by rank: " + ", ".join(f"{share:+.2%}" for share in of_ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
