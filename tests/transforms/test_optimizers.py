"""Optimizers and clipping, each against an independent reference: torch.optim, or the equations in float64."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from decentfn.core import trees
from decentfn.core.buckets import Buckets, flatten, global_norm
from decentfn.optim.transforms import (
    Transform,
    accum_adam,
    accum_adamw,
    adam,
    adamw,
    by_leaf,
    chain,
    clip_by_global_norm,
    not_bias_or_norm,
    partition,
    scale_by_learning_rate,
    sgd,
)


def tree():
    g = torch.Generator().manual_seed(0)
    return {
        "a": {"weight": _normal(g, 3, 4), "bias": _normal(g, 4)},
        "b": {"weight": _normal(g, 4, 2), "bias": _normal(g, 2)},
    }


def _normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def apply(x, updates):
    return Buckets([a + u for a, u in zip(x, updates, strict=True)], x.plan)


def assert_all_close(actual, expected, rtol=1e-12, atol=1e-13):
    actual, expected = trees.leaves(actual), trees.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


# One worker equals torch.optim


def problem():
    """Two layers and data; the loss of a tree of parameters."""
    g = torch.Generator().manual_seed(7)
    inputs = torch.randn(16, 3, generator=g, dtype=torch.float64)
    targets = torch.randn(16, 2, generator=g, dtype=torch.float64)

    def loss(p):
        hidden = torch.tanh(inputs @ p["a"]["weight"] + p["a"]["bias"])
        return ((hidden @ p["b"]["weight"] + p["b"]["bias"] - targets) ** 2).mean()

    return loss


def train(transform, steps=100):
    loss = problem()
    x = flatten(tree(), masks=getattr(transform, "masks", ()))
    state = transform.init(x)
    gradient = grad(lambda x: loss(x.tree()))
    for _ in range(steps):
        updates, state = transform.update(gradient(x), state, x)
        x = apply(x, updates)
    return x.tree()


def train_torch(make_optimizer, steps=100, before_step=lambda optimizer, u: None):
    loss = problem()
    params = trees.map(lambda leaf: leaf.requires_grad_(), tree())
    optimizer = make_optimizer(params)
    for u in range(steps):
        optimizer.zero_grad()
        loss(params).backward()
        before_step(optimizer, u)
        optimizer.step()
    return trees.map(torch.Tensor.detach, params)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"),
    [c for c in product([0.0, 0.9], [False, True], [0.0, 0.01]) if c[0] or not c[1]],
)
def test_sgd_equals_torchs(momentum, nesterov, weight_decay):
    kwargs = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    expected = train_torch(lambda p: torch.optim.SGD(trees.leaves(p), lr=0.05, **kwargs))
    assert_all_close(train(sgd(0.05, **kwargs)), expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(adam, torch.optim.Adam), (adamw, torch.optim.AdamW)],
    ids=["adam", "adamw"],
)
def test_adam_and_adamw_equal_torchs(ours, theirs, weight_decay):
    expected = train_torch(
        lambda p: theirs(trees.leaves(p), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    )
    assert_all_close(train(ours(0.01, 0.8, 0.95, 1e-6, weight_decay)), expected)


def test_the_defaults_are_torchs():
    assert_all_close(train(adam()), train_torch(lambda p: torch.optim.Adam(trees.leaves(p))))
    assert_all_close(train(adamw()), train_torch(lambda p: torch.optim.AdamW(trees.leaves(p))))


def test_adamw_with_a_schedule_clipping_and_masked_decay_equals_torchs():
    def make(p):
        weights, biases = ([layer[kind] for layer in p.values()] for kind in ("weight", "bias"))
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}])

    def before_step(optimizer, u):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + u)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

    transform = chain(
        clip_by_global_norm(0.05),
        adamw(lambda count: 0.01 / (1 + count.to(torch.float64)), weight_decay=0.1, mask=not_bias_or_norm),
    )
    assert_all_close(train(transform), train_torch(make, before_step=before_step))


def test_parameter_groups_equal_torchs():
    def make(p):
        return torch.optim.SGD(
            [{"params": trees.leaves(p["a"]), "lr": 0.1}, {"params": trees.leaves(p["b"]), "lr": 0.01, "momentum": 0.9}]
        )

    transform = partition({"b": sgd(0.01, momentum=0.9), "a": sgd(0.1)}, lambda name, shape: name.split(".")[0])
    assert_all_close(train(transform), train_torch(make))


# Other references


@pytest.mark.parametrize("s", [1, 2, 3, 4])
@pytest.mark.parametrize("decoupled", [False, True])
def test_accum_adam_equals_its_equations(s, decoupled):
    lr, b1, b2, eps, wd = 0.01, 0.8, 0.95, 1e-6, 0.1
    gradient = grad(lambda leaves: problem()(trees.fill(template, leaves)))
    template = trees.enumerate_leaves(tree())
    x = trees.leaves(tree())
    mean, first, second = ([torch.zeros_like(leaf) for leaf in x] for _ in range(3))
    for k in range(1, 41):
        window = math.ceil(k / s)
        for i, g in enumerate(gradient(x)):
            if decoupled:
                decayed = x[i] * (1 - lr * wd)
            else:
                decayed, g = x[i], g + wd * x[i]
            mean[i] = mean[i] + g / s
            root = ((second[i] + (1 - b2) * g**2) / (1 - b2**window)).sqrt()
            x[i] = decayed - lr / (1 - b1**window) * (first[i] + (1 - b1) * g) / (root + eps)
            if k % s == 0:
                first[i] = b1 * (first[i] + (1 - b1) * mean[i])
                second[i] = b2 * (second[i] + (1 - b2) * mean[i] ** 2)
                mean[i] = torch.zeros_like(mean[i])
    optimizer = (accum_adamw if decoupled else accum_adam)(lr, b1, b2, eps, wd, accum_iter=s)
    assert_all_close(train(optimizer, steps=40), x)


@pytest.mark.parametrize(("accumulating", "plain"), [(accum_adam, adam), (accum_adamw, adamw)])
def test_accum_adam_with_windows_of_one_is_adam(accumulating, plain):
    assert_all_close(train(accumulating(weight_decay=0.1, accum_iter=1)), train(plain(weight_decay=0.1)))


seeds = st.integers(0, 2**20)
shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5)


def drawn(seed, shapes, size=1.0):
    g = torch.Generator().manual_seed(seed)
    return {f"p{i}": size * torch.randn(s, generator=g, dtype=torch.float64) for i, s in enumerate(shapes)}


@given(seed=seeds, shapes=shapes, size=st.sampled_from([1e-3, 1.0, 1e3]), max_norm=st.sampled_from([0.1, 1.0, 50.0]))
def test_clip_by_global_norm_equals_torchs(seed, shapes, size, max_norm):
    gradients = drawn(seed, shapes, size)
    x = flatten(gradients, bucket_mb=1e-4)
    clipped, _ = clip_by_global_norm(max_norm).update(x, (), x)
    params = [leaf.clone().requires_grad_() for leaf in gradients.values()]
    for p, g in zip(params, gradients.values(), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert_all_close(list(clipped.tree().values()), [p.grad for p in params])
    torch.testing.assert_close(global_norm(x), norm)


@given(seed=seeds, shapes=shapes, bucket_mb=st.sampled_from([1e-5, 1e-4, 25.0]))
def test_an_update_does_not_depend_on_the_buckets(seed, shapes, bucket_mb):
    def three(transform, bucket_mb):
        x = flatten(drawn(seed, shapes), bucket_mb=bucket_mb)
        state = transform.init(x)
        for k in range(3):
            updates, state = transform.update(flatten(drawn(seed + 1 + k, shapes), bucket_mb=bucket_mb), state, x)
            x = apply(x, updates)
        return x.tree()

    transform = chain(clip_by_global_norm(1.0), adamw(0.1))
    assert_all_close(three(transform, bucket_mb), three(transform, 1e-6))
    assert_all_close(three(by_leaf(sgd_on_trees(0.1)), bucket_mb), three(sgd(0.1), bucket_mb))


def sgd_on_trees(lr):
    return Transform(lambda params: (), lambda grads, state, params: (trees.map(lambda g: -lr * g, grads), state))


@pytest.mark.parametrize("weight_decay", [0.1, lambda count: 0.1])
def test_with_a_mask_that_takes_no_leaf_nothing_decays(weight_decay):
    optimizer = adamw(weight_decay=weight_decay, mask=lambda name, shape: False)
    assert_all_close(train(optimizer), train(adamw(weight_decay=0.0)))


# Sixteen bits


def test_sixteen_bit_moments_are_kept_in_float32():
    """In bfloat16 `0.999 v + 0.001 g²` would stop to move."""
    x = flatten({"w": torch.ones(4, dtype=torch.bfloat16)})
    transform = adam()
    state = transform.init(x)
    for _ in range(50):
        _, state = transform.update(x, state, x)
    (adam_state, _) = state
    torch.testing.assert_close(adam_state.nu[0], torch.full((4,), 1 - 0.999**50), rtol=1e-5, atol=0)


def test_a_tiny_scheduled_number_is_not_rounded_to_the_dtype_of_the_bucket():
    x = flatten({"w": torch.full((4,), 256.0, dtype=torch.bfloat16)})
    for rate in (0.00390625 * 1.25, lambda count: 0.00390625 * 1.25):
        transform = scale_by_learning_rate(rate)
        updates, _ = transform.update(x, transform.init(x), x)
        assert torch.equal(updates[0], torch.full((4,), -1.25, dtype=torch.bfloat16))
