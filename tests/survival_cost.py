"""Cost of `df.survive` while nothing fails: `python -m tests.survival_cost [BACKEND]`, on a quiet machine.

Four gloo ranks take blocks of steps in turn: without it, with it, and without it but beside a sum of one number. A step
computes for 20 ms (a sleep, so that two cores are enough). Prints the median block's time per step, over all ranks, and
the median ratio to the block without it in the same turn, with its 95 % interval (bootstrap).
"""

import random
import sys
import time

import torch

import decentfn as df
from decentfn.comm import collectives
from tests.ranks import Ranks

N, COMPUTE_S, PARAMETERS = 4, 0.02, 100_000
TURNS, BLOCK = 150, 20


@df.autograd
def loss_fn(params, batch):
    time.sleep(COMPUTE_S)
    return ((params - batch) ** 2).sum()


def times(backend):
    """Seconds per step of this rank's blocks, by what is timed; a block's first two steps are not."""
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", N))
    if backend:
        step = df.compile(step, donate=False, backend=backend)
    group = collectives.world().channels.group

    def beside_a_sum(state, batch, t):
        work = group.allreduce([torch.zeros(1)])
        result = step(state, batch, t)
        work.wait()
        return result

    ways = {"without": step, "a sum": beside_a_sum, "df.survive": df.survive(step)}
    state, batch, t = init(torch.zeros(PARAMETERS)), torch.ones(PARAMETERS), 0
    taken = {way: [] for way in ways}
    for turn in range(-1, TURNS):
        for way in random.Random(turn).sample(list(ways), len(ways)):
            for k in range(BLOCK + 2):
                if k == 2:
                    since = time.perf_counter()
                state, _ = ways[way](state, batch, t)
                t += 1
            if turn >= 0:
                taken[way].append((time.perf_counter() - since) / BLOCK)
    return taken


def main(backend=None):
    ranks = Ranks(N)
    found = ranks.run(times, backend)
    ranks.close()
    by_way = {way: torch.tensor([its[way] for its in found]).mean(0) for way in found[0]}
    for way, seconds in by_way.items():
        ratios = seconds / by_way["without"] - 1
        drawn = ratios[torch.randint(TURNS, (1000, TURNS))].median(1).values
        low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
        print(f"{way:10}  {1e3 * seconds.median():.2f} ms  {ratios.median():+.2%} [{low:+.2%}, {high:+.2%}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
