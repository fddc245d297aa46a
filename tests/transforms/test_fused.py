"""Adam by PyTorch's fused kernel, in the blocks of an eager step, is Adam by its equations."""

import pytest
import torch

import decentfn as df
from decentfn import trees
from decentfn.buckets import Buckets, blocks, deferring, evaluated, flatten, parts_of
from decentfn.torch_private import fused

OPTIMIZERS = {
    "adam": lambda: df.adam(0.01),
    "adam with l2": lambda: df.adam(0.01, weight_decay=0.1),
    "adamw": lambda: df.adamw(0.01, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1),
    "scheduled": lambda: df.adamw(lambda k: 0.01 / (k + 1), weight_decay=lambda k: 0.1 * (k + 1)),
    "masked": lambda: df.adamw(0.01, weight_decay=0.1, mask=df.transforms.not_bias_or_norm),
    "clipped": lambda: df.chain(df.clip_by_global_norm(0.5), df.adamw(0.01)),
    "groups": lambda: df.transforms.partition(
        {"w": df.adamw(0.01), "b": df.sgd(0.1)}, lambda name, shape: "b" if "bias" in name else "w"
    ),
}


def lay_out(seed, dtype, optimizer, size=50):
    g = torch.Generator().manual_seed(seed)
    tree = {"weight": torch.randn(size, 3, generator=g), "bias": torch.randn(17, generator=g)}
    return flatten(trees.map(lambda x: x.to(dtype), tree), masks=getattr(optimizer, "masks", ()))


def train(optimizer, dtype, in_blocks, size=50):
    """Four updates from random gradients; the kernel's calls are counted by whoever asks."""
    x = lay_out(0, dtype, optimizer, size)
    state = optimizer.init(x)
    for t in range(4):
        g = lay_out(t + 1, dtype, optimizer, size)
        if in_blocks:
            with deferring():
                u, state = optimizer.update(g, state, x)
                evaluated(parts_of((u, state)))
        else:
            u, state = optimizer.update(g, state, x)
        x = Buckets([a + b for a, b in zip(x, u, strict=True)], x.plan)
    return trees.leaves((x, state))


@pytest.fixture
def calls(monkeypatch):
    """Blocks of 16 elements; the sizes that the kernel was called with."""
    seen, adam = [], fused.adam
    monkeypatch.setattr(blocks, "BLOCK", 16)
    monkeypatch.setattr(fused, "adam", lambda m, *rest: seen.append(m.numel()) or adam(m, *rest))
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_adam_is_adam(name, dtype, calls):
    optimizer = OPTIMIZERS[name]()
    got = train(optimizer, dtype, True)
    assert 16 in calls and max(calls) <= 16
    calls.clear()
    expected = train(optimizer, dtype, False)
    assert not calls
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_short_vectors_and_other_versions_of_pytorch_take_the_equations(calls, monkeypatch):
    optimizer = df.adamw(0.01)
    expected = train(optimizer, torch.float32, False, size=5)
    monkeypatch.setattr(blocks, "BLOCK", 64)
    assert all(torch.equal(a, b) for a, b in zip(train(optimizer, torch.float32, True, size=5), expected, strict=True))
    expected = train(optimizer, torch.float32, False)
    monkeypatch.setattr(fused, "HAS_ADAM", False)
    assert all(torch.equal(a, b) for a, b in zip(train(optimizer, torch.float32, True), expected, strict=True))
    assert not calls


def test_simulated_and_differentiated_vectors_take_the_equations(calls):
    optimizer = df.adamw(0.01)
    x = lay_out(0, torch.float32, optimizer)
    state = optimizer.init(x)
    stacked = [trees.map(lambda leaf: torch.stack([leaf, leaf]), part) for part in (x, state, x)]
    with deferring():
        torch.func.vmap(lambda g, s, x: trees.leaves(optimizer.update(g, s, x)))(*stacked)
        torch.func.grad(lambda v: optimizer.update(Buckets([v], x.plan), state, x)[0][0].sum())(x[0])
    assert not calls
