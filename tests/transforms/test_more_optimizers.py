"""Lion, RMSprop, Adagrad, NAdam, RAdam, schedule-free AdamW, LAMB, Adafactor and Muon: torch.optim's, or their equations."""

import math

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.core.buckets import flatten
from decentfn.optim.transforms import (
    accum_adamw,
    adafactor,
    adagrad,
    adamw,
    lamb,
    lion,
    muon,
    nadam,
    partition,
    radam,
    rmsprop,
    schedule_free_adamw,
)
from tests.transforms.test_optimizers import apply, assert_all_close, problem, train, train_torch, tree

STEPS = 50


@pytest.fixture(autouse=True)
def float64():
    """torch.optim keeps counts and products in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rmsprop(0.01), lambda p: torch.optim.RMSprop(trees.leaves(p), 0.01)),
        (
            rmsprop(0.01, 0.9, 1e-6, momentum=0.8, centered=True, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(
                trees.leaves(p), 0.01, 0.9, 1e-6, weight_decay=0.1, momentum=0.8, centered=True
            ),
        ),
        (adagrad(0.1), lambda p: torch.optim.Adagrad(trees.leaves(p), 0.1)),
        (
            adagrad(0.1, 1e-5, initial=0.5, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(
                trees.leaves(p), 0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-5
            ),
        ),
        (nadam(), lambda p: torch.optim.NAdam(trees.leaves(p))),
        (
            nadam(0.01, 0.8, 0.9, 1e-3, 0.2, 0.1),
            lambda p: torch.optim.NAdam(trees.leaves(p), 0.01, (0.8, 0.9), 1e-3, 0.1, 0.2),
        ),
        (radam(0.05, weight_decay=0.1), lambda p: torch.optim.RAdam(trees.leaves(p), 0.05, weight_decay=0.1)),
        (
            radam(0.05, 0.8, 0.7, 1e-5),
            lambda p: torch.optim.RAdam(trees.leaves(p), 0.05, (0.8, 0.7), 1e-5),
        ),  # never rectified
        (adafactor(), lambda p: torch.optim.Adafactor(trees.leaves(p))),
        (
            adafactor(0.5, 0.7, 1e-2, clip=1.2, weight_decay=0.1),
            lambda p: torch.optim.Adafactor(trees.leaves(p), 0.5, -0.7, (None, 1e-2), 1.2, 0.1),
        ),
    ],
)
def test_an_optimizer_of_torch_equals_torchs(ours, theirs):
    assert_all_close(train(ours, STEPS), train_torch(theirs, STEPS))


def in_plain_python(update):
    """Train the problem's leaves one by one with `update(k, x, g, state) -> x`, k from 1."""
    loss, template = problem(), trees.enumerate_leaves(tree())
    leaves = trees.leaves(tree())
    states = [{} for _ in leaves]
    for k in range(1, STEPS + 1):
        held = [leaf.clone().requires_grad_() for leaf in leaves]
        grads = torch.autograd.grad(loss(trees.fill(template, held)), held)
        leaves = [update(k, leaf, g, state) for leaf, g, state in zip(leaves, grads, states, strict=True)]
    return trees.fill(template, leaves), states


def test_lion_equals_its_equations():
    def update(k, x, g, state):
        m = state.get("m", torch.zeros_like(x))
        state["m"] = 0.95 * m + 0.05 * g
        return x - 0.01 * (torch.sign(0.8 * m + 0.2 * g) + 0.1 * x)

    assert_all_close(train(lion(0.01, 0.8, 0.95, weight_decay=0.1), STEPS), in_plain_python(update)[0])


def test_lamb_equals_its_equations():
    def update(k, x, g, state):
        m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
        v = state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * g**2
        d = m / (1 - 0.9**k) / ((v / (1 - 0.99**k)) ** 0.5 + 1e-6) + 0.1 * x
        return x - 0.01 * x.norm() / d.norm() * d

    assert_all_close(train(lamb(0.01, 0.9, 0.99, weight_decay=0.1), STEPS), in_plain_python(update)[0])
    zero = flatten({"w": torch.zeros(3)})
    optimizer = lamb(0.1)
    updates, _ = optimizer.update(flatten({"w": torch.ones(3)}), optimizer.init(zero), zero)
    assert_all_close(updates[0], torch.full((3,), -0.1), rtol=1e-5)


def test_lamb_of_complex_leaves_is_lamb_of_their_parts():
    g = torch.Generator().manual_seed(0)
    x, grads = (torch.randn(3, 4, generator=g, dtype=torch.complex128) for _ in range(2))
    ends = []
    for form in (lambda z: z, lambda z: torch.view_as_real(z).clone()):
        flat, optimizer = flatten({"w": form(x)}), lamb(0.1)
        updates, _ = optimizer.update(flatten({"w": form(grads)}), optimizer.init(flat), flat)
        ends.append(apply(flat, updates).tree()["w"])
    assert_all_close(torch.view_as_real(ends[0]), ends[1])


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_its_equations(nesterov):
    def update(k, x, g, state):
        if x.dim() != 2:
            m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
            d = m / (1 - 0.9**k) / ((v / (1 - 0.999**k)) ** 0.5 + 1e-8)
            return x - 0.05 * (d + 0.01 * x)
        m = state["m"] = 0.95 * state.get("m", 0.0) + 0.05 * g
        d = 0.05 * g + 0.95 * m if nesterov else m
        # The iteration acts on the singular values alone.
        u, s, vt = torch.linalg.svd(d, full_matrices=False)
        s = s / (d.norm() + 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return x * (1 - 0.02 * 0.1) - 0.02 * math.sqrt(max(1, x.shape[0] / x.shape[1])) * (u * s) @ vt

    ours = partition({True: muon(0.02, nesterov=nesterov), False: adamw(0.05)}, lambda name, shape: len(shape) == 2)
    assert_all_close(train(ours, STEPS), in_plain_python(update)[0], rtol=1e-9, atol=1e-10)


def test_muon_is_torchs_up_to_its_bfloat16():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    optimizer, theirs = muon(0.1, weight_decay=0.0), torch.nn.Parameter(x.clone())
    theirs.grad = torch.cos(x)
    torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0).step()
    flat = flatten({"w": x})
    updates, _ = optimizer.update(flatten({"w": torch.cos(x)}), optimizer.init(flat), flat)
    torch.testing.assert_close(apply(flat, updates).tree()["w"], theirs.detach(), rtol=0, atol=0.1 * 0.02)


def test_muon_names_a_leaf_that_is_not_a_matrix():
    with pytest.raises(ValueError, match=r"muon: leaf 'b' is \[3\], not a matrix.*partition"):
        muon().init(flatten({"w": torch.ones(2, 2), "b": torch.ones(3)}))


def test_adafactor_names_a_complex_leaf():
    with pytest.raises(ValueError, match=r"adafactor: leaf 'z' is complex.*partition.*name != 'z'"):
        adafactor().init(flatten({"w": torch.ones(2, 2), "z": torch.ones(2, dtype=torch.complex64)}))


def test_muon_takes_a_matrix_without_columns():
    x, optimizer = flatten({"w": torch.ones(2, 0), "v": torch.eye(2)}), muon()
    updates, _ = optimizer.update(x, optimizer.init(x), x)
    assert updates.tree()["w"].shape == (2, 0) and updates.tree()["v"].diagonal().lt(0).all()


def test_schedule_free_adamw_equals_its_equations():
    """With x kept instead of computed, as in the paper."""

    def rate(k):
        return 0.05 * min(1.0, k / 10)

    def update(k, y, g, state):
        x, z = state.get("x", y), state.get("z", y)
        v = state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * g**2
        state["weights"] = state.get("weights", 0.0) + rate(k) ** 2
        c = rate(k) ** 2 / state["weights"]
        z = state["z"] = z - rate(k) * (g / ((v / (1 - 0.99**k)) ** 0.5 + 1e-8) + 0.1 * y)
        x = state["x"] = (1 - c) * x + c * z
        return 0.1 * z + 0.9 * x

    optimizer = schedule_free_adamw(lambda count: 0.05 * torch.clamp((count + 1) / 10, max=1.0), 0.9, 0.99, weight_decay=0.1)  # fmt: skip
    expected, states = in_plain_python(update)
    assert_all_close(train(optimizer, STEPS), expected, rtol=1e-10, atol=1e-11)

    loss = problem()
    init, step = df.adapt_while_communicate(lambda p, batch: loss(p), optimizer, df.topology("complete", 1))
    state = init(tree())
    for t in range(STEPS):
        state, metrics = step(state, torch.zeros(1), t)
    found = trees.leaves(df.params(state))
    assert_all_close(found, [own["x"] for own in states], rtol=1e-10, atol=1e-11)
    rows = trees.leaves(df.params(df.stack(state, 2)))
    assert_all_close([row[1] for row in rows], found)
    assert float(metrics.learning_rate) == 0.05


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rmsprop(0.1, decay=1.0), r"rmsprop\(decay=1.0\)"),
        (lambda: rmsprop(-0.1), r"rmsprop\(learning_rate=-0.1\)"),
        (lambda: adagrad(0.1, eps=0.0), r"adagrad\(eps=0.0\)"),
        (lambda: nadam(b1=1.0), r"nadam\(b1=1.0\)"),
        (lambda: adafactor(decay=2.0), r"adafactor\(decay=2.0\)"),
        (lambda: muon(steps=0), r"muon\(steps=0\)"),
        (lambda: schedule_free_adamw(b1=0.0), r"schedule_free_adamw\(b1=0.0\)"),
        (lambda: lion(mask=3), r"lion\(mask=3\)"),
    ],
)
def test_a_wrong_argument_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    "optimizer",
    [
        df.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        df.chain(df.clip_by_global_norm(0.5), df.adam(0.1, weight_decay=0.1)),
        accum_adamw(0.1, accum_iter=2),
        adamw(0.1),
        lion(0.1),
        rmsprop(0.1, centered=True, momentum=0.5),
        adagrad(0.1),
        nadam(0.1, weight_decay=0.1),
        radam(0.1),
        schedule_free_adamw(0.1),
        lamb(0.1),
        adafactor(0.1),
    ],
)
def test_what_follows_three_steps_can_be_differentiated(optimizer):
    init, step = df.adapt_while_communicate(lambda x, b: ((x - b) ** 4).sum(), optimizer, df.topology("complete", 1))
    start = init(torch.tensor([0.3, -0.2, 0.1]))

    def after(batch):
        state = start
        for t in range(3):
            state, _ = step(state, batch, t)
        return df.params(state)

    batch, h = torch.tensor([0.5, 1.0, 2.0]), 1e-6
    numerical = torch.stack([(after(batch + e) - after(batch - e)) / (2 * h) for e in h * torch.eye(3)], 1)
    torch.testing.assert_close(torch.func.jacrev(after)(batch), numerical, rtol=1e-6, atol=1e-8)
