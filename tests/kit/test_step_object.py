"""A step is an object: its fields say what was done to it, and it is still a function for torch.func and torch.compile."""

from dataclasses import FrozenInstanceError

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing import on_ranks
from tests import network

N = 4
CASE = "adapt_then_combine on ring"


def started(wrap=lambda algorithm: algorithm):
    init, step = wrap(network.build(CASE, N))
    return df.stack(init(network.params()), N), step


def assert_equal(a, b):
    for x, y in zip(trees.leaves(a), trees.leaves(b), strict=True):
        torch.testing.assert_close(x, y)


def test_its_fields_say_what_was_done_to_it():
    _, step = started(lambda algorithm: df.guard(df.ema(algorithm)))
    done = df.compile(df.simulate(step, N), donate=False)
    assert (step.num_workers, step.transforms) == (N, (("guard", None),))
    assert (done.num_workers, done.transforms) == (N, (("guard", None), ("simulate", N), ("compile", None)))
    assert df.donate(step).had("donate") and not step.had("donate") and "adapt_then_combine.step" in repr(step)
    with pytest.raises(FrozenInstanceError):
        step.transforms = ()


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd])
@pytest.mark.parametrize("wrap", [lambda algorithm: algorithm, df.guard, df.ema, df.average_buffers])
def test_a_plain_function_in_place_of_a_step_has_its_loss_and_topology(around, wrap):
    """As a user's own wrapper: it is simulated, wrapped and resized as the step that it calls."""

    def loss_fn(params, batch):
        return ((params - batch) ** 2).sum(), 2 * batch

    own = df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("ring", N))
    plain = own._replace(step=lambda state, batch, t: own.step(state, batch, t))
    assert (plain.loss_fn, plain.topology) == (own.loss_fn, own.topology)
    batch, ends = torch.arange(3.0 * N).view(N, 3), []
    for algorithm in (wrap(own), wrap(plain)):
        state, step = df.stack(algorithm.init(torch.ones(3)), N), df.simulate(algorithm.step, N)
        for t in range(2):
            state, metrics = step(state, batch, t)
        ends.append((df.resize(state, algorithm), metrics))
    assert_equal(*ends)
    alone = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    plain = alone._replace(step=lambda state, batch, t: alone.step(state, batch, t))
    assert_equal(*(made.step(made.init(torch.ones(3)), batch[0], 0) for made in (alone, plain)))


def test_torch_func_and_torch_compile_take_it_as_a_function():
    state, step = started()
    batch = network.batches(N, 0)
    expected = df.simulate(step, N)(state, batch, 0)
    template = trees.enumerate_leaves(state)

    def on_leaves(leaves, batch):
        return trees.leaves(step(trees.fill(template, leaves), batch, torch.tensor(0))[0])

    assert_equal(torch.func.vmap(on_leaves)(trees.leaves(state), batch), expected[0])
    simulated = torch.compile(df.simulate(step, N), backend="eager", fullgraph=True)
    assert_equal(simulated(state, batch, torch.tensor(0)), expected)


def test_a_stacked_state_is_refused_also_after_one_of_its_plan_was_taken():
    init, step = df.adapt_then_combine(lambda w, b: (w * b).sum(), df.sgd(0.1), df.topology("complete", 1))
    state = init(torch.zeros(2))
    step(state, torch.ones(2), 0)
    with pytest.raises(ValueError, match=r"stacked, of 3 workers.*df\.simulate\(step, 3\)"):
        step(df.stack(state, 3), torch.ones(3, 2), 1)


def test_a_donated_step_refuses_a_state_with_other_fields():
    for make in (df.donate, lambda step: df.compile(step, backend="eager")):
        step = make(lambda state, batch, t: ({"b": state["a"] + batch}, None))
        with pytest.raises(Exception, match="in the same fields"):
            step({"a": torch.zeros(2)}, torch.ones(2), 0)


def compiled_by_torch(rank, own):
    init, step = df.adapt_then_combine(lambda w, b: (w * b).sum(), df.sgd(0.1), df.topology("one-peer-exp", 2))
    state = init(torch.zeros(2))
    around = torch.compile(step, backend="eager") if not own else df.compile(lambda *of: step(*of), backend="eager")
    return df.params(around(state, torch.full((2,), rank + 1.0), 0)[0]).tolist()


@pytest.mark.thorough
def test_torch_compile_is_refused_among_ranks_where_it_would_reorder_their_messages():
    """Inductor posted buckets in another order for another size of batch, and results were wrong without an error."""
    with pytest.raises(ValueError, match=r"torch\.compile\(step\).*several processes.*df\.compile\(step\)"):
        on_ranks(2, compiled_by_torch, False)
    assert on_ranks(2, compiled_by_torch, True) == [pytest.approx([-0.15] * 2)] * 2


def test_a_donated_step_names_the_leaf_whose_dtype_it_changes():
    for make in (df.donate, lambda step: df.compile(step, backend="eager")):
        step = make(lambda state, batch, t: ({"a": state["a"] + batch, "b": state["b"].double()}, None))
        with pytest.raises(Exception, match=r"turned \('b', .*float32.* of the state into \('b', .*float64"):
            step({"a": torch.zeros(2), "b": torch.zeros(3)}, torch.ones(2), 0)
