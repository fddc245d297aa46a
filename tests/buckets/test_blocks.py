"""What is put off to the end of an eager step and done block by block is what would have been done at once, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn import buckets, kit, trees
from decentfn.buckets import blocks
from decentfn.testing.algorithms import _full
from decentfn.testing.subjects import assert_close, ranks, simulated
from tests import contract
from tests.allocations import peak_of


@pytest.fixture
def block(monkeypatch):
    """Blocks of 8 elements, so that small vectors have many."""
    monkeypatch.setattr(blocks, "BLOCK", 8)


def a_step(state, g):
    """Of a small optimizer: parameters, momentum, previous parameters, a count; and one value that is looked at."""
    x, m, before, count = state
    m = kit.elementwise(lambda m, g: 0.9 * m + g, m, g)
    u = kit.elementwise(lambda m, x: -0.1 * m - 0.01 * x, m, x)
    seen = float(u[0].sum())
    return (kit.add(x, u), m, x, count + 1), (seen, kit.elementwise(torch.sub, x, before))


@given(st.integers(1, 40), st.integers(0, 99))
def test_a_step_in_blocks_is_the_step_at_once_pure_and_over_its_state(numel, seed):
    draw = torch.Generator().manual_seed(seed)
    x, m, before, g = (buckets.flatten({"a": torch.randn(numel, generator=draw)}) for _ in range(4))
    state = (x, m, before, torch.tensor(3))
    expected = a_step(state, g)
    kept = trees.map(torch.clone, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 8)
        with blocks.deferring():
            pure = a_step(state, g)
            buckets.evaluated(buckets.parts_of(pure[0]))
        given_over = trees.map(torch.clone, state)
        donated, metrics = df.donate(lambda state, batch, t: a_step(state, batch)), ()
        for _ in range(2):  # the first call looks at the layout
            before_call = trees.map(torch.clone, given_over)
            result, metrics = donated(given_over, g, 0)
            assert result is given_over
    for got, wanted in ((pure, expected), (state, kept), ((given_over, metrics), a_step(before_call, g))):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b))
            for a, b in zip(trees.leaves(got), trees.leaves(wanted), strict=True)
        )


def swapped(state, batch, t):
    a, b, c = state
    return (b, kit.elementwise(torch.add, a, b), kit.elementwise(lambda a: a, a)), None


def shifted(state, batch, t):
    """One deferred vector in two places, and one that is read through a view with another beginning."""
    a, b, c = state
    new = kit.elementwise(torch.mul, a, c)
    late = kit.Buckets([torch.cat([b[0][5:], a[0][:5]])], b.plan)
    return (new, kit.elementwise(torch.add, late, kit.Buckets([torch.roll(a[0], 3)], a.plan)), new), None


@pytest.mark.parametrize("step", [swapped, shifted])
def test_a_donated_step_may_move_what_it_was_given_from_place_to_place(block, step):
    def start():
        return tuple(buckets.flatten({"x": torch.arange(21.0) + 100 * i}) for i in range(3))

    donated, over, expected = df.donate(step), start(), start()
    for t in range(3):
        donated(over, None, t)
        expected, _ = step(expected, None, t)
    for got, wanted in zip(trees.leaves(over), trees.leaves(expected), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("way", "most"), [(lambda loss_fn: loss_fn, 2.1), (df.autograd, 3.1)], ids=["traced", "by autograd"]
)
def test_the_first_donated_step_needs_no_second_state(way, most):
    """Beside the state a gradient, and what the loss computes; by autograd a copy of the parameters, to see what it writes over."""
    loss_fn = way(lambda params, batch: (params["w"].mean() * batch) ** 2)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(0.1), df.topology("ring", 1))
    state, step = init({"w": torch.ones(8 * blocks.BLOCK)}), df.donate(step)
    assert peak_of(lambda: step(state, torch.tensor(2.0), 0)) < most * state.params.plan.nbytes


def test_to_look_at_a_layout_changes_nothing(block):
    x = buckets.flatten({"x": torch.ones(21)})
    with blocks.deferring():
        narrow = kit.elementwise(lambda a: a.mul_(2).to(torch.bfloat16), x)
        assert buckets.layouts(buckets.parts_of((x, narrow))) == [((21,), torch.float32), ((21,), torch.bfloat16)]
    assert torch.equal(x[0], torch.ones(21))


def test_what_is_read_at_other_elements_than_are_written_is_read_first(block):
    whole = torch.arange(33.0)
    place = whole[1:]
    expected = -whole[:-1]
    with blocks.deferring():
        blocks.write_over([place], [blocks.defer(torch.neg, whole[:-1])])
    assert torch.equal(place, expected)


@pytest.mark.parametrize("row", contract.ROWS)
def test_every_algorithm_in_blocks_and_over_its_state_is_the_pure_one_while_messages_leave_late(row, monkeypatch):
    """On ranks, with a scaled loss, an EMA and buffers: bit for bit, while messages are read from memory late."""
    subject = contract.ROWS[row]
    run = _full(subject)._replace(backend=None)
    if row == "quasi_global_adam":  # a norm is summed block by block, in another order
        monkeypatch.setattr(blocks, "BLOCK", 8)
    expected = ranks(subject, run, steps=3)
    monkeypatch.setattr(blocks, "BLOCK", 8)
    for mine, theirs in zip(ranks(subject, run._replace(backend="donate"), steps=3, delay=0.02), expected, strict=True):
        assert_close(mine, theirs, within={})


def decay(m, v, g):
    """Writes over two of three vectors."""
    m.mul_(0.5).add_(g)
    v.add_(m)
    return m - v


def decayed(m, v, g):
    """The same, of whole vectors, without writing."""
    new_m = kit.elementwise(lambda m, g: m * 0.5 + g, m, g)
    new_v = kit.elementwise(torch.add, v, new_m)
    return kit.elementwise(torch.sub, new_m, new_v), new_m, new_v


def over(state, g, t):
    m, v, *rest = state
    u, new_m, new_v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    return (new_m, new_v, kit.add(rest[0], u)), None


def over_what_is_still_read(state, g, t):
    """The old vectors count after they are written over, as they are and through another name of theirs."""
    m, v, x = state
    same = kit.elementwise(lambda m: m, m)
    u, new_m, new_v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    return (new_m, kit.elementwise(lambda new, u, v: new + u * v, new_v, u, v), kit.add(x, same)), None


def over_what_was_shown(state, g, t):
    """One of the old vectors has another name, by which it is read afterwards."""
    x, m, v = state
    same = kit.elementwise(lambda m: m, m)
    u, new_m, new_v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    return (kit.elementwise(lambda old, u: old + u, same, u), new_m, new_v), None


def over_and_swapped(state, g, t):
    m, v, x = state
    u, new_m, new_v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    return (new_v, new_m, kit.elementwise(lambda u: u, u)), None


def over_one_twice(state, g, t):
    """What was written over is written over again, and one vector is given in two places."""
    m, v, x = state
    _, m, v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    u, m, again = buckets.in_blocks(decay, decayed(m, m, v), m, m, v)
    return (m, v, kit.elementwise(torch.add, u, again)), None


def over_looked_at(state, g, t):
    """What is returned is looked at before what is written over is computed."""
    m, v, x = state
    u, m, v = buckets.in_blocks(decay, decayed(m, v, g), m, v, g)
    return (m, v, kit.add(x, u)), u[0].sum()


STEPS = (over, over_what_is_still_read, over_what_was_shown, over_and_swapped, over_one_twice, over_looked_at)


@pytest.mark.parametrize("step", STEPS)
def test_what_writes_over_blocks_is_what_does_not_pure_and_over_its_state(block, step):
    def start():
        return tuple(buckets.flatten({"x": torch.arange(21.0) + 10 * i}) for i in range(3))

    g, donated, given, expected = start()[0], df.donate(step), start(), start()
    for t in range(3):
        with blocks.deferring():
            pure, _ = step(expected, g, t)
            buckets.evaluated(buckets.parts_of(pure))
        expected, _ = step(expected, g, t)  # at once
        donated(given, g, t)
        for wanted, one, other in zip(*map(trees.leaves, (expected, pure, given)), strict=True):
            assert torch.equal(one, wanted) and torch.equal(other, wanted)


def test_vectors_are_written_over_in_their_own_memory(block, monkeypatch):
    """All blocks but the first, which is a copy until it is known that nothing raises."""
    seen, plain = [], decay

    def noted(m, v, g):
        seen.append(m.data_ptr())
        return plain(m, v, g)

    state, g = (
        tuple(buckets.flatten({"x": torch.arange(40.0)}) for _ in range(3)),
        buckets.flatten({"x": torch.ones(40)}),
    )
    own = [block.data_ptr() for block in state[0][0].split(8)]
    monkeypatch.setitem(globals(), "decay", noted)
    donated = df.donate(over)
    donated(state, g, 0)  # looks at the layout
    seen.clear()
    donated(state, g, 1)
    assert len(seen) == 5 and seen[0] != own[0] and seen[1:] == own[1:]


def test_a_function_that_raises_after_another_one_wrote_leaves_the_state(block):
    def raises(x):
        raise RuntimeError("no")

    def step(state, g, t):
        (m, v, x), _ = over(state, g, t)
        return (m, v, kit.elementwise(raises, x) if t else x), None

    state = tuple(buckets.flatten({"x": torch.arange(21.0) + i}) for i in range(3))
    donated = df.donate(step)
    donated(state, state[2], 0)
    kept = trees.map(torch.clone, state)
    with pytest.raises(RuntimeError, match="no"):
        donated(state, buckets.flatten({"x": torch.ones(21)}), 1)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(state), trees.leaves(kept), strict=True))


ADAM_ROWS = ("adapt_while_communicate", "adapt_then_combine", "all_reduce", "momentum_tracking", "d2", "choco_sgd")


@pytest.mark.parametrize("row", ADAM_ROWS)
def test_with_fused_adam_a_donated_step_is_the_pure_one_and_the_simulators_to_rounding(row, block):
    """On ranks, with a scaled loss, an EMA and buffers, while messages are read from memory late."""
    subject = contract.ROWS[row]
    made = subject.algorithm
    subject = replace(subject, algorithm=lambda loss, _, *rest, **own: made(loss, df.adamw(0.01), *rest, **own))
    run = _full(subject)._replace(backend=None)
    expected = ranks(subject, run, steps=3)
    for mine, theirs in zip(ranks(subject, run._replace(backend="donate"), steps=3, delay=0.02), expected, strict=True):
        assert_close(mine, theirs, within={})
    assert_close(expected[-1], simulated(subject, run)[3])


def test_the_norm_of_long_vectors_is_summed_in_blocks(block):
    x = buckets.flatten({"a": torch.randn(50, dtype=torch.float64), "b": torch.randn(30)}, bucket_mb=1e-4)
    expected = sum(float((b.double() ** 2).sum()) for b in x) ** 0.5
    torch.testing.assert_close(float(buckets.global_norm(x)), expected, rtol=1e-6, atol=0)
