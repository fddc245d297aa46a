"""Gossip alone: every worker holds a number, and averaging with neighbors gives all of them the mean.

python examples/average_consensus.py
python examples/average_consensus.py --num-workers 64
torchrun --standalone --nproc-per-node 2 examples/average_consensus.py      eight of the sixteen in each process

With a loss of zero a training step is only mixing: x <- W x. The table shows the workers' distance from the mean after t
steps (root mean square). On `one-peer-exp` a worker averages with one other per step, and after log2(N) steps all hold
the exact mean; on a ring information moves one place per step, and the error shrinks by the spectral gap.
"""

import command_line
import torch

import decentfn as df

TOPOLOGIES = ("complete", "one-peer-exp", "static-exp", "static-ring")
SHOWN = (0, 1, 2, 3, 4, 5, 6, 8, 16, 32, 64)


def errors(name: str, num_workers: int, world) -> dict[int, float]:
    """For each step of SHOWN the consensus distance."""
    local = command_line.workers_here(num_workers, world.size)
    algorithm = df.adapt_while_communicate(lambda x, batch: 0 * x.sum(), df.sgd(1.0), df.topology(name, num_workers))
    numbers = torch.tensor([float(i) for i in world.workers(local)], dtype=torch.float64)  # worker i holds i
    state = df.with_params(df.stack(algorithm.init(torch.zeros((), dtype=torch.float64)), local), numbers)
    step, found = df.simulate(algorithm.step, local), {}
    for t in range(max(SHOWN) + 1):
        if t in SHOWN:
            found[t] = df.consensus_distance(state).item()  # collective: every rank asks for it
        state, _ = step(state, None, t)
    return found


def main(num_workers: int = 16) -> dict[str, dict[int, float]]:
    """Returns the table: by topology and number of steps.

    Args:
        num_workers: N; a power of two.
    """
    world = df.init()
    table = {name: errors(name, num_workers, world) for name in TOPOLOGIES}
    if world.rank == 0:
        print("steps  " + "".join(f"{name:>14}" for name in TOPOLOGIES))
        for t in SHOWN:
            print(f"{t:5}  " + "".join(f"{table[name][t]:14.2g}" for name in TOPOLOGIES))
    return table


if __name__ == "__main__":
    command_line.run(main)
