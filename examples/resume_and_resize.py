"""A run that stops, resumes to the bit, and then continues with two workers instead of four.

python examples/resume_and_resize.py
torchrun --standalone --nproc-per-node 2 examples/resume_and_resize.py --folder FOLDER      two processes, one folder

A checkpoint has every worker's complete state, so the resumed run computes the same bits. With another number of workers
all start from the mean of the saved ones. docs/checkpoints.md and docs/resizing.md have the details.
"""

import tempfile
from pathlib import Path

import command_line
import skewed_digits as digits
import torch

import decentfn as df


def train(folder: Path, num_workers: int, until: int, world) -> df.State:
    """Train to step `until`, from the newest checkpoint in the folder if there is one, and leave one there."""
    local = command_line.workers_here(num_workers, world.size)
    data, _ = digits.load()
    shards = df.data.fixed_shards(df.data.dirichlet_shards(data.labels, num_workers, alpha=0.1), batch_size=16)
    topology = df.topology("base", num_workers)
    # Whatever an algorithm and an optimizer remember is in the checkpoint too: here trackers and Adam's moments.
    init, step = df.gradient_tracking(digits.loss_fn, df.adam(0.01), topology)
    state, step, begin = df.stack(init(digits.start()), local), df.simulate(step, local), 0
    if df.checkpoint.latest(folder):
        state, begin, *_ = df.checkpoint.restore(folder, state)
    for t in range(begin, until):
        rows = torch.stack([shards.batch_at(t, worker) for worker in world.workers(local)])
        state, _ = step(state, data.take(rows), t)
    df.checkpoint.save(folder, state, until)
    return state


def main(folder: Path | None = None, steps: int = 50) -> dict[str, float | bool]:
    """Returns what was seen.

    Args:
        folder: where the checkpoints go, the same for all processes; None: one process, and they are removed at the end.
        steps: of each part of the run.
    """
    world = df.init()
    command_line.at_least(1, steps=steps)
    with tempfile.TemporaryDirectory() as scratch:
        ours = folder or Path(scratch)
        if ours.exists() and any(ours.iterdir()):
            raise ValueError(f"--folder {folder}: there is something in it; take a new one.")
        whole = df.params(train(ours / "whole", 4, 2 * steps, world))
        train(ours / "parts", 4, steps, world)  # here the run is stopped
        parts = train(ours / "parts", 4, 2 * steps, world)
        same = all(torch.equal(whole[name], leaf) for name, leaf in df.params(parts).items())
        four = df.consensus_mean(parts)
        two = df.consensus_mean(train(ours / "parts", 2, 3 * steps, world))

    _, held_out = digits.load()
    seen = {"same": same, "four": digits.accuracy(four, held_out), "two": digits.accuracy(two, held_out)}
    if world.rank == 0:
        print(
            f"stopped after {steps} steps and resumed: {'the same bits as' if same else 'NOT the same as'} without a stop"
        )
        print(f"four workers, {2 * steps} steps: held-out accuracy {seen['four']:.3f}")
        print(f"two workers for {steps} more: {seen['two']:.3f}")
    return seen


if __name__ == "__main__":
    command_line.run(main)
