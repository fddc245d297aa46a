"""Half the bytes, the same curve: parameters that travel as bfloat16 train as well as those that travel whole."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import decentfn as df

pytestmark = pytest.mark.thorough

N, STEPS, SEEDS = 8, 150, 5


def curve(seed, wire_dtype):
    """Mean training loss of the workers, averaged over windows of 30 steps: `[STEPS / 30]`."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)

    def loss_fn(params, batch):
        hidden = torch.relu(batch[0] @ params["a"] + params["b"])
        return cross_entropy(hidden @ params["c"], batch[1])

    params = {
        "a": torch.randn(64, 32, generator=generator) / 8,
        "b": torch.zeros(32),
        "c": torch.randn(32, 10, generator=generator) / 6,
    }
    topology = df.topology("one-peer-exp", num_workers=N)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(3e-3), topology, wire_dtype=wire_dtype)
    state, step, losses = df.stack(init(params), N), df.simulate(step, N), []
    for t in range(STEPS):
        chosen = torch.randint(len(targets), (N, 32), generator=generator)
        state, metrics = step(state, (inputs[chosen], targets[chosen]), t)
        losses.append(metrics.loss.mean())
    return torch.stack(losses).view(-1, 30).mean(1)


def test_a_bfloat16_wire_leaves_the_loss_curve_within_its_noise_over_seeds():
    whole = torch.stack([curve(seed, None) for seed in range(SEEDS)])
    half = torch.stack([curve(seed, torch.bfloat16) for seed in range(SEEDS)])
    assert whole.mean(0)[-1] < 0.2 * whole.mean(0)[0]  # it does learn
    assert not torch.equal(whole, half)
    assert ((half.mean(0) - whole.mean(0)).abs() < whole.std(0)).all()
