"""Sixty-four workers in one process, compiled into one graph; the same step would train on sixty-four machines.

python examples/sixty_four_workers.py
python examples/sixty_four_workers.py --no-compile                          without waiting for the compiler
torchrun --standalone --nproc-per-node 2 examples/sixty_four_workers.py      thirty-two in each process

Every worker has about twenty images of a few digits, and alone it learns only these. In a step it averages with one
other, on a schedule of six rounds that connects all workers (`one-peer-exp`), and the workers' mean recognizes all ten.
"""

import time

import command_line
import skewed_digits as digits
import torch

import decentfn as df


def main(
    num_workers: int = 64, steps: int = 300, alpha: float = 0.1, topology: str = "one-peer-exp", compile: bool = True
) -> float:
    """Returns the held-out accuracy of the workers' mean model.

    Args:
        alpha: of the Dirichlet distribution of labels; 0.1 is skewed, 100 is even.
        topology: a name that `df.topologies.topology_names()` knows.
    """
    world = df.init()
    command_line.at_least(1, steps=steps)
    local = command_line.workers_here(num_workers, world.size)
    who_meets_whom = df.topology(topology, num_workers)
    data, held_out = digits.load()
    shards = df.data.fixed_shards(df.data.dirichlet_shards(data.labels, num_workers, alpha), batch_size=16)

    # Small buckets: nothing travels between workers of one process, so they cost nothing and spare the gradients a copy.
    init, step = df.adapt_while_communicate(digits.loss_fn, df.sgd(0.1, momentum=0.9), who_meets_whom, bucket_mb=0.02)
    state, step = df.stack(init(digits.start()), local), df.simulate(step, local)
    step = df.compile(step) if compile else step
    began = time.perf_counter()
    for t in range(steps):
        rows = torch.stack([shards.batch_at(t, worker) for worker in world.workers(local)])
        state, metrics = step(state, data.take(rows), t)
        if t == 0:
            first, began = time.perf_counter() - began, time.perf_counter()
    each = (time.perf_counter() - began) / max(1, steps - 1)

    mean, distance = df.consensus_mean(state), df.consensus_distance(state).item()  # collective
    accuracy = digits.accuracy(mean, held_out)
    alone = [digits.accuracy(df.params(df.worker(state, i)), held_out) for i in range(local)]
    if world.rank == 0:
        print(f"first step {first:.1f} s, then {1e3 * each:.1f} ms for all {num_workers} workers")
        print(f"held-out accuracy: workers here {min(alone):.3f} to {max(alone):.3f}, mean of all {accuracy:.3f}")
        print(f"consensus distance {distance:.2f}")
    return accuracy


if __name__ == "__main__":
    command_line.run(main)
