"""A compiled simulation takes its state leaf by leaf, and writes new parameters beside the old ones."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.engine.layout import Layout
from decentfn.testing import problem
from tests.contract import ROWS

FEW = ("adapt_while_communicate", "diloco")
NARROW = {"rtol": 0.02, "atol": 0.02}
"""Of the tests' sixteen-bit leaves, whose last place is 1/128."""


def made(name, **options):
    subject = ROWS[name]
    algorithm = subject.build(loss_fn=problem.loss_fn, **options)
    state = subject.start(algorithm, range(subject.num_workers), stacked=True)
    return df.simulate(algorithm.step, subject.num_workers), state


def batch(name, t):
    return problem.stacked([problem.batch(i, t) for i in range(ROWS[name].num_workers)])


def assert_close(mine, theirs):
    for x, y in zip(trees.leaves(mine), trees.leaves(theirs), strict=True):
        tolerance = NARROW if x.dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(x, y, **tolerance, equal_nan=True)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name != FEW[0])) for name in ROWS])
def test_every_algorithm_is_the_same_leaf_by_leaf(name):
    """Not compiled: only a norm over all leaves is summed in another order.

    A few are traced by Dynamo; the others call what it would trace, which the contract has traced.
    """
    (step, state), (_, mine) = made(name), made(name)
    compiled = df.compile(step, backend="eager")
    for t in range(4):
        state, metrics = step(state, batch(name, t), t)
        with nullcontext() if name in FEW else torch.compiler.set_stance("force_eager"):
            mine, its = compiled(mine, batch(name, t), t)
    assert_close((mine, its), (state, metrics))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("choco_sgd", "sparta", "streaming_diloco", "diloco, 4 bits")),
        *((name, {"compressor": df.compressors.quantize(8)}) for name in ("slowmo", "noloco", "gasloc")),
        ("factored_gossip_diloco", {"compressor": df.compressors.quantize(8)}),
        ("diloco", {"fraction": 0.5}),
    ],
)
def test_what_is_chosen_or_compressed_in_a_bucket_is_not_taken_apart(name, options):
    step, state = made(name, **options)
    assert not step.by_leaf
    assert len(Layout(state, step.by_leaf).template.params) == len(state.params)


def test_an_optimizer_of_the_users_sees_whole_buckets():
    """It may compute on a bucket what it likes, and sees the same buckets as in an eager step."""
    seen = []

    def update(grads, state, params):
        seen.append([b.shape[-1] for b in grads])
        return df.kit.each(lambda g: -0.1 * g / g.norm(), grads), state

    optimizer = df.Transform(lambda params: (), update)
    params = {"a": torch.ones(4, 5), "b": torch.ones(7)}
    init, step = df.adapt_while_communicate(
        lambda p, x: (p["a"] @ x).square().sum() + p["b"].sum(), optimizer, df.topology("complete", 3)
    )
    step = df.compile(df.simulate(step, 3), backend="eager")
    step(df.stack(init(params), 3), torch.ones(3, 5), 0)
    assert seen[-1] == [27]


@pytest.mark.parametrize("moves", [0, 1])
def test_a_step_may_move_some_of_the_parameters_or_none(moves):
    """What stays is no new tensor, and must not change places with a spare that nobody has written."""
    worker, n = df.kit.Worker(lambda x, batch: (x[0] - batch).square().sum(), df.sgd(0.1), df.topology("ring", 4)), 4

    def step(state, batch, t):
        g, local = worker.gradient(state.params, state.local, batch, t)
        new = [x * 0.5 if i < moves else x for i, x in enumerate(state.params)]
        return df.kit.State(df.kit.Buckets(new, state.params.plan), local), g.metrics

    init, step = worker.algorithm(step)
    state = df.stack(init([torch.arange(3.0), torch.arange(3.0, dtype=torch.float64)]), n)
    expected = [x * 0.5**3 if i < moves else x.clone() for i, x in enumerate(state.params)]
    compiled = df.compile(df.simulate(step, n), backend="eager")
    for t in range(3):
        state, _ = compiled(state, torch.ones(n, 3), t)
    assert all(map(torch.equal, state.params, expected))


@pytest.mark.thorough
def test_several_states_of_one_step_share_a_spare_and_nothing_else():
    """States take turns; each equals its own eager run, and the tensors of a state stay its own objects."""
    name = "adapt_while_communicate"
    step, start = made(name)
    compiled = df.compile(step, backend="eager")
    mine, theirs = [copy.deepcopy(start) for _ in range(3)], [copy.deepcopy(start) for _ in range(3)]
    tensors = [list(state.params) for state in mine]
    for t in range(3):
        for k in range(3):
            theirs[k], _ = step(theirs[k], batch(name, t + k), t)
            mine[k], _ = compiled(mine[k], batch(name, t + k), t)
    assert_close(mine, theirs)
    assert all(x is y for state, its in zip(mine, tensors, strict=True) for x, y in zip(state.params, its, strict=True))
    places = [x.untyped_storage().data_ptr() for state in mine for x in trees.leaves(state)]
    assert len(set(places)) == len(places)


def test_a_view_of_parameters_is_of_one_step_and_a_copy_stays():
    """As docs/gotchas.md says: old values after the next step. What is made anew follows, and a copy never changes."""
    name = "adapt_while_communicate"
    step, state = made(name)
    step = df.compile(step, backend="eager")
    state, _ = step(state, batch(name, 0), 0)
    view, copied = state.params[0].detach(), df.params(state)
    old, its = state.params[0].clone(), trees.map(torch.clone, copied)
    state, _ = step(state, batch(name, 1), 1)
    assert torch.equal(view, old) and not torch.equal(view, state.params[0])
    views = [view, state.params[0].detach()]
    for t in range(2, 5):
        state, _ = step(state, batch(name, t), t)
        views.append(state.params[0].detach())
    assert all(map(torch.equal, trees.leaves(copied), trees.leaves(its)))
    assert len({x.data_ptr() for x in views}) == 2  # the spare and the old parameters change places


def test_a_state_that_was_changed_between_steps_is_read_as_it_is():
    """Parameters that were copied over, given another memory, or resumed from a copy."""
    name = "adapt_while_communicate"
    step, state = made(name)
    compiled = df.compile(step, backend="eager")
    _, mine = made(name)
    for t in range(6):
        state, _ = step(state, batch(name, t), t)
        mine, _ = compiled(mine, batch(name, t), t)
        for x, y in zip(mine.params, state.params, strict=True):
            if t == 1:
                x.mul_(0.5), y.mul_(0.5)
            if t == 2:
                x.set_(x * 0.5), y.mul_(0.5)
    assert_close(mine, state)


@pytest.mark.thorough
def test_the_generated_code_neither_joins_gradients_nor_copies_new_parameters():
    """Counted in it: no buffer of all parameters, and each leaf's update is stored into the spare it is given."""
    from torch._inductor.utils import run_and_get_code

    n, params = 8, {"v": torch.randn(16, 24), "w": torch.randn(24, 10), "b": torch.randn(24), "c": torch.randn(10)}

    def loss(p, x):
        return (torch.tanh(x @ p["v"] + p["b"]) @ p["w"] + p["c"]).square().mean()

    init, step = df.adapt_while_communicate(loss, df.adamw(0.01), df.topology("one-peer-exp", n))
    state, x = df.stack(init(params), n), torch.randn(n, 5, 16)
    _, codes = run_and_get_code(df.compile(df.simulate(step, n)), state, x, 0)
    sizes = [
        torch.Size(map(int, s.strip(" ,").split(","))).numel()
        for s in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", codes[0])
    ]
    assert sizes and max(sizes) == n * params["v"].numel()  # a gradient, as PyTorch computes it
    assert sum(size == max(sizes) for size in sizes) == 1


@pytest.mark.thorough
def test_a_step_in_inference_mode_may_come_first():
    """What it makes for later steps can be written outside that mode."""
    name = "adapt_while_communicate"
    (step, state), (_, mine) = made(name), made(name)
    compiled = df.compile(step, backend="eager")
    for t in range(4):
        with torch.inference_mode(t == 0):
            mine, _ = compiled(mine, batch(name, t), t)
        state, _ = step(state, batch(name, t), t)
    assert_close(mine, state)
