"""Your own optimizer: a pair of functions, `init` and `update`, as in optax. This one is Lion.

python examples/custom_optimizer.py

Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2):

    c  = b1 m + (1 - b1) g
    x+ = x - lr (sign(c) + decay x)
    m+ = b2 m + (1 - b2) g

This file implements only its direction. Decoupled decay and the learning rate (a number or a schedule) are existing
transforms, appended by `df.chain`. tests/test_small_examples.py checks the three lines in float64.
"""

import command_line
import skewed_digits as digits
import torch

import decentfn as df
from decentfn import kit


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> df.Transform:
    """The direction sign(c). What it sees are flat buckets: `kit.each` goes through them."""

    def update(grads, m, params):
        direction = kit.each(lambda m, g: torch.sign(b1 * m + (1 - b1) * g).to(g.dtype), m, grads)
        return direction, kit.each(lambda m, g: b2 * m + (1 - b2) * g, m, grads)

    return df.Transform(kit.zeros_like, update)  # m starts at 0, in float32 or wider


def lion(learning_rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mask=None) -> df.Transform:
    """Lion, whole. `learning_rate` is a float or a function of the update's number; `mask` says which leaves decay."""
    return df.chain(
        scale_by_lion(b1, b2),
        df.transforms.add_decayed_weights(weight_decay, mask),
        df.transforms.scale_by_learning_rate(learning_rate),
    )


def main(steps: int = 200, num_workers: int = 8) -> dict[str, float]:
    """Returns the held-out accuracy of the workers' mean model with each optimizer."""
    command_line.at_least(1, steps=steps)
    topology = df.topology("static-exp", num_workers)
    _, held_out = digits.load()
    accuracies = {}
    for name, optimizer in {
        "lion": lion(df.schedules.cosine(0.01, steps), weight_decay=0.1, mask=df.transforms.not_bias_or_norm),
        "adamw": df.adamw(df.schedules.cosine(0.01, steps), weight_decay=0.03),
    }.items():
        state = digits.train(
            df.adapt_while_communicate(digits.loss_fn, optimizer, topology), num_workers, steps, alpha=10.0
        )
        accuracies[name] = digits.accuracy(df.consensus_mean(state), held_out)
        print(f"{name:5}: held-out accuracy of the mean of {num_workers} workers {accuracies[name]:.3f}")
    return accuracies


if __name__ == "__main__":
    command_line.run(main)
