"""What is put off to the end of an eager step and done block by block is what would have been done at once, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn import buckets, kit, trees
from decentfn.buckets import blocks
from decentfn.testing.algorithms import _full
from decentfn.testing.subjects import assert_close, ranks
from tests import contract


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
    expected = ranks(subject, run, steps=3)
    monkeypatch.setattr(blocks, "BLOCK", 8)
    for mine, theirs in zip(ranks(subject, run._replace(backend="donate"), steps=3, delay=0.02), expected, strict=True):
        assert_close(mine, theirs, within={})
