"""Draws are functions of (seed, t, stream, worker): repeatable, traceable, and random enough."""

import numpy as np
import pytest
import torch

from decentfn.core import draws


def test_draws_are_the_same_on_every_machine():
    # From an implementation in unbounded Python integers.
    assert draws.bits(-1, 2**40, 3, (2, 2)).tolist() == [[_word(-1, 2**40, 3, i + j) for j in (0, 1)] for i in (0, 2)]
    assert draws.bits(0, 0, 0, ()).item() == _word(0, 0, 0, 0)
    assert draws.bits(5, 9, 1, (3,), worker=2).tolist() == [_word(5, 9, 1, i, 2) for i in range(3)]


def _scrambled(x):
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x21F0AAAD), (15, 0x31848BAB)):
        x = (x ^ x >> shift) * multiplier % 2**32
    return x ^ x >> 14


def _word(seed, t, stream, index, worker=0):
    words = (seed % 2**32, (seed >> 32) % 2**32, stream, worker, t % 2**32, t >> 32)
    starts = (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
        (0x082EFA98, 0xEC4E6C89, 0x452821E6, 0x38D01377, 0xBE5466CF, 0x34E90C6C),
    )
    first, second = (
        _scrambled(sum(_scrambled(start ^ word) for start, word in zip(half, words, strict=True)) % 2**32)
        for half in starts
    )
    return _scrambled((_scrambled(index ^ first) + second) % 2**32)


def test_compiled_and_eager_draws_are_equal():
    def draw(t, worker):
        return (
            draws.uniform(7, t, 1, (5,), worker=worker),
            draws.permutation(7, t, 9),
            draws.integers(7, t, 2, (3,), 11),
            draws.sign(7, t, 3, (4,)),
        )

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for t in (0, 3, 10**6):
        for a, b in zip(
            draw(torch.tensor(t), torch.tensor(2)), compiled(torch.tensor(t), torch.tensor(2)), strict=True
        ):
            assert torch.equal(a, b)


def test_new_seeds_and_streams_compile_at_once_though_dynamo_makes_symbols_of_them():
    def drawing(seed, stream, size):
        return lambda t: draws.uniform(seed, t, stream, (size,))

    for seed, stream, size in [(2, 3, 4), (7, 8, 9), (-3, 9, 11), (2**40 + 1, 10, 12)]:
        compiled = torch.compile(drawing(seed, stream, size), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.tensor(5)), drawing(seed, stream, size)(5))


def test_each_worker_draws_its_own_under_vmap():
    t = torch.tensor(3)
    drawn = torch.func.vmap(lambda worker: draws.bits(7, t, 1, (6,), worker=worker))(torch.arange(4))
    alone = torch.stack([draws.bits(7, 3, 1, (6,), worker=worker) for worker in range(4)])
    assert torch.equal(drawn, alone)
    assert drawn.unique().numel() == 24


def test_bits_are_uniform():
    drawn = draws.bits(1, 2, 0, (2**16,))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(drawn >> shift & 255, minlength=256).double()
        chi_square = ((counts - 256) ** 2 / 256).sum().item()
        assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6  # 255 degrees of freedom, deviation √510


def test_uniform_has_the_moments_of_a_uniform_and_signs_balance():
    drawn = draws.uniform(3, 1, 0, (10**5,))
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean().item() - 0.5) < 5 * (1 / 12 / 1e5) ** 0.5
    assert abs(drawn.var().item() - 1 / 12) < 5 * (1 / 180 / 1e5) ** 0.5
    signs = draws.sign(3, 1, 0, (10**5,))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 5 / 1e5**0.5


@pytest.mark.parametrize("key", ["seed", "t", "stream", "worker"])
def test_draws_of_neighboring_keys_do_not_correlate(key):
    def draw(value):
        keys = {"seed": 0, "t": 0, "stream": 0, "worker": 0} | {key: value}
        return draws.uniform(keys["seed"], keys["t"], keys["stream"], (1000,), worker=keys["worker"])

    correlations = torch.corrcoef(torch.stack([draw(value) for value in range(40)])).fill_diagonal_(0)
    assert correlations.abs().max() < 5.5 / 1000**0.5


def test_successive_steps_draw_uniformly_for_one_entry():
    first = torch.stack([draws.integers(0, t, 0, (), 16) for t in range(4000)])
    counts = torch.bincount(first, minlength=16).double()
    assert ((counts - 250) ** 2 / 250).sum() < 15 + 5 * 30**0.5


def test_permutations_are_permutations_and_every_order_is_alike():
    orders = [tuple(draws.permutation(4, t, 4).tolist()) for t in range(2400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    counts = np.unique([str(order) for order in orders], return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 100) ** 2 / 100).sum() < 23 + 5 * 46**0.5


def test_integers_stay_below_their_bound():
    assert set(draws.integers(0, 0, 0, (1000,), 7).tolist()) == set(range(7))
    with pytest.raises(ValueError, match=r"draws.integers\(bound=0\)"):
        draws.integers(0, 0, 0, (1,), 0)
