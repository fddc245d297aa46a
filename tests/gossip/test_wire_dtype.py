"""Half the bytes, the same curve: parameters that travel as bfloat16 train as well as those that travel whole."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import decentfn as df
from decentfn.compat import decent_dp

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


@pytest.mark.slow
def test_a_bfloat16_wire_leaves_the_loss_curve_within_its_noise_over_seeds():
    whole = torch.stack([curve(seed, None) for seed in range(SEEDS)])
    half = torch.stack([curve(seed, torch.bfloat16) for seed in range(SEEDS)])
    assert whole.mean(0)[-1] < 0.2 * whole.mean(0)[0]  # it does learn
    assert not torch.equal(whole, half)
    assert ((half.mean(0) - whole.mean(0)).abs() < whole.std(0)).all()


def nothing(params, batch):
    return (params * 0).sum()


def from_one_to_seven(init, n=4):
    state = df.stack(init(torch.zeros(8)), n)
    return df.with_params(state, torch.arange(1.0, 2 * n, 2)[:, None].expand(n, 8).clone())


def test_mass_is_kept_by_a_group_mean_over_a_narrow_wire():
    """Push-sum on a schedule with group means: Σ w stays N, and the mean of w z that of the starts."""
    n = 4
    unequal = torch.tensor(
        [[0.5, 0, 0, 0.3], [0.5, 0.5, 0, 0.3], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.4]], dtype=torch.float64
    )
    schedule = df.topologies.pga(3, df.topologies.from_matrices("unequal", unequal, needs_push_sum=True))
    for make in (df.stochastic_gradient_push, df.push_diging):
        init, step = make(nothing, df.sgd(0.1), schedule, wire_dtype=torch.bfloat16)
        state, step = from_one_to_seven(init), df.simulate(step, n)
        for t in range(12):
            state, _ = step(state, torch.zeros(n), t)
        w = state.memory.weight.view(n)
        torch.testing.assert_close(w.sum().item(), float(n), rtol=1e-3, atol=0)
        torch.testing.assert_close((w[:, None] * df.params(state)).mean(0), torch.full((8,), 4.0), rtol=1e-2, atol=0)


def test_a_group_mean_whose_weights_are_not_those_of_its_rows_does_not_grow_on_a_narrow_wire():
    schedule = decent_dp.schedule(df.topology("complete", 4))
    make = df.adapt_while_communicate
    init, step = make(nothing, df.sgd(0.1), schedule, update_at="mixed", wire_dtype=torch.bfloat16)
    state, step = from_one_to_seven(init), df.simulate(step, 4)
    for t in range(6):
        state, _ = step(state, torch.zeros(4), t)
    torch.testing.assert_close(df.params(state), torch.full((4, 8), 4.0), rtol=1e-2, atol=0)


def mean_of_four():
    """Minus the mean of the ranks' gradients, which are random numbers, by a step of rate 1; and these numbers."""
    draws = torch.randn(4, 999, generator=torch.Generator().manual_seed(0))
    init, step = df.all_reduce(
        lambda params, batch: (params * batch).sum(), df.sgd(1.0), df.topology("complete", 4), wire_dtype=torch.bfloat16
    )
    return df.params(step(init(torch.zeros(999)), draws[df.init().rank], 0)[0]), draws


def test_a_mean_over_ranks_is_rounded_once_for_each_hop_and_the_same_on_all(ranks):
    """docs/mixed_precision.md says 0.3 % of the mean of random numbers for 4 workers."""
    found, draws = zip(*ranks(4).run(mean_of_four), strict=True)
    assert all(torch.equal(found[0], other) for other in found)
    exact = draws[0].double().mean(0)
    error = (found[0] + exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.002 < error < 0.004
