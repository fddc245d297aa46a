"""Compressors: fixed bytes, contraction and unbiasedness as promised, batched as alone, and the same every time."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.fft import dctn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from decentfn import compressors
from decentfn.compressors import Key, wire
from decentfn.core.buckets import BucketPlan, Segment, flatten
from decentfn.core.scalars import kernels

COMPRESSORS = {
    c.name: c
    for c in (
        compressors.identity(),
        compressors.cast(torch.bfloat16),
        compressors.top_k(0.1),
        compressors.top_k(k=3),
        compressors.chunk_top_k(3, chunk=8),
        compressors.chunk_top_k(3, chunk=7, bits=2),
        compressors.random_k(0.1),
        compressors.random_k(k=5, seed=3),
        compressors.sign(),
        compressors.sign(8),
        compressors.sign(None),
        compressors.qsgd(1, chunk=4),
        compressors.qsgd(7, chunk=16),
        compressors.qsgd(100, chunk=None),
        compressors.quantize(8),
        compressors.quantize(4, chunk=5),
        compressors.quantize(2),
        compressors.quantize(8, stochastic=True),
        compressors.quantize(4, stochastic=True),
        compressors.low_rank(1),
        compressors.low_rank(2, seed=1),
        compressors.dct_top_k(3, chunk=4),
        compressors.dct_top_k(2, chunk=7),
    )
}
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS.keys())
SHAPES = {"a": (6, 8), "b": (7,), "c": (3, 4, 2), "d": (), "e": (0, 3), "f": (1, 5)}


def bucket(dtype=torch.float64, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    x = flatten({name: (leaf * 10**i if i < 3 else leaf).to(dtype) for i, (name, leaf) in enumerate(leaves.items())})
    return x[0], x.plan.buckets[0]


def key(t=0, worker=0):
    return Key(torch.tensor(t), torch.tensor(worker))


def roundtrip(compressor, x, plan, key):
    return compressor.decompress(compressor.compress(x, plan, key), plan)


def test_every_public_compressor_is_tested():
    makers = set(compressors.__all__) - {"Compressor", "Key"}
    assert {name.split("(")[0] for name in COMPRESSORS} == makers


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_messages_have_the_planned_bytes_and_come_back_as_they_were(compressor, dtype):
    x, plan = bucket(dtype)
    message = compressor.compress(x, plan, key())
    y = compressor.decompress(message, plan)
    assert message.dtype == torch.uint8 and message.shape == (compressor.nbytes(plan),)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()


@every_compressor
def test_a_message_of_zeros_says_nothing(compressor):
    _, plan = bucket()
    assert (compressor.decompress(torch.zeros(compressor.nbytes(plan), dtype=torch.uint8), plan) == 0).all()


@every_compressor
def test_zeros_are_told_as_zeros(compressor):
    x, plan = bucket()
    assert (roundtrip(compressor, torch.zeros_like(x), plan, key()) == 0).all()


@every_compressor
def test_an_empty_bucket_compresses_to_itself(compressor):
    plan = BucketPlan(torch.float32, (Segment("e", (0, 3), 0, 0),), 0)
    assert roundtrip(compressor, torch.zeros(0), plan, key()).shape == (0,)


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batched_over_workers_as_alone(compressor, dtype):
    x, plan = bucket(dtype)
    stacked = torch.stack([x, -2 * x, x.flip(0)])
    both = vmap(
        lambda x, w: (m := compressor.compress(x, plan, Key(torch.tensor(5), w)), compressor.decompress(m, plan))
    )
    messages, values = both(stacked, torch.arange(3))
    for i in range(3):
        message = compressor.compress(stacked[i], plan, key(5, i))
        if "low_rank" not in compressor.name and "dct" not in compressor.name:  # batched products round otherwise
            assert torch.equal(messages[i], message)
        rounding = 100 * torch.finfo(dtype).eps * float(x.abs().max())
        torch.testing.assert_close(values[i], compressor.decompress(message, plan), rtol=0, atol=rounding)


@pytest.mark.thorough
@every_compressor
def test_the_compiled_compressor_says_the_same(compressor):
    x, plan = bucket()
    stacked = torch.stack([x, -2 * x])

    def both(x, t):
        def one(x, w):
            message = compressor.compress(x, plan, Key(t, w))
            return message, compressor.decompress(message, plan)

        return vmap(one)(x, torch.arange(2))

    torch._dynamo.reset()  # all of these share a code object, which may be compiled eight times
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for t in range(2):
        for left, right in zip(both(stacked, torch.tensor(t)), compiled(stacked, torch.tensor(t)), strict=True):
            torch.testing.assert_close(left, right)


@every_compressor
@given(seed=st.integers(0, 2**31))
def test_contraction_holds_as_promised(compressor, seed):
    # E‖x - C(x)‖² <= (1 - δ) ‖x‖²
    x, plan = bucket(seed=seed, shapes={"a": (6, 8), "b": (7,)})
    delta = compressor.delta(plan)
    if delta is None:
        assert compressor.is_unbiased
        return
    draws = 100 if "seed" in compressor.name else 1
    messages = vmap(lambda w: roundtrip(compressor, x, plan, Key(torch.tensor(0), w)))(torch.arange(draws))
    errors = ((messages - x) ** 2).sum(1) / (x**2).sum()
    slack = 4 * errors.std() / math.sqrt(draws) if draws > 1 else 0
    assert 0 < delta <= 1
    assert errors.mean() <= 1 - delta + slack + 1e-12


@pytest.mark.parametrize(
    ("compressor", "worst"),
    [
        (compressors.top_k(k=2), torch.ones(8)),
        (compressors.sign(8), torch.eye(8)[0]),
        (compressors.quantize(4, chunk=8), torch.tensor([7.0] + 7 * [0.5])),
    ],
    ids=str,
)
def test_the_worst_case_attains_the_promised_contraction(compressor, worst):
    x = flatten({"x": worst.double()})
    plan = x.plan.buckets[0]
    error = ((roundtrip(compressor, x[0], plan, key()) - x[0]) ** 2).sum() / (x[0] ** 2).sum()
    assert error == pytest.approx(1 - compressor.delta(plan), rel=1e-12)


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS.values() if c.is_unbiased], ids=str)
def test_unbiased_ones_are_right_on_average(compressor):
    x, plan = bucket(shapes={"a": (4, 5)})
    draws = 5_000
    values = vmap(lambda w: roundtrip(compressor, x, plan, Key(torch.tensor(1), w)))(torch.arange(draws))
    error = (values.mean(0) - x).abs()
    assert (error <= 5 * values.std(0) / math.sqrt(draws) + 1e-12).all()


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS.values() if "seed" in c.name], ids=str)
def test_draws_differ_by_step_and_worker_and_repeat(compressor):
    if "stochastic=False" in compressor.name:
        return
    x, plan = bucket()
    messages = [compressor.compress(x, plan, key(t, w)) for t, w in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert torch.equal(messages[0], messages[1])
    assert not torch.equal(messages[0], messages[2]) and not torch.equal(messages[0], messages[3])


@pytest.mark.parametrize(("numel", "k"), [(10, 3), (7, 7), (100, 1), (33, 32)])
def test_random_k_sends_k_distinct_places_each_equally_often(numel, k):
    x = flatten({"x": torch.ones(numel, dtype=torch.float64)})
    plan, compressor, draws = x.plan.buckets[0], compressors.random_k(k=k), 4000
    sent = vmap(lambda w: roundtrip(compressor, x[0], plan, Key(torch.tensor(0), w)))(torch.arange(draws))
    assert (sent.sum(1) == k).all()
    share = k / numel
    assert ((sent.mean(0) - share).abs() <= 5 * math.sqrt(share * (1 - share) / draws) + 1e-12).all()


def test_top_k_keeps_the_largest():
    x, plan = bucket()
    y = roundtrip(compressors.top_k(k=5), x, plan, key()).numpy()
    expected = np.zeros(len(x))
    places = np.argsort(-np.abs(x.numpy()), kind="stable")[:5]
    expected[places] = x.numpy()[places]
    np.testing.assert_array_equal(y, expected)


PATTERNS = {
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(0)),
    "few are not zero": lambda n: torch.zeros(n).index_fill(0, torch.arange(5, n, 997), -1.0),
    "every sampled value is large": lambda n: torch.linspace(0, 1, n) + 2 * (torch.arange(n) % (n // 4096) == 0),
    "every sampled value is small": lambda n: torch.linspace(1, 2, n) * (torch.arange(n) % (n // 4096) != 0),
    "equal": lambda n: torch.ones(n),
    "with NaN": lambda n: torch.randn(n).index_fill(0, torch.tensor([7, 4097]), torch.nan),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 300, 9_000, 20_000])
def test_the_largest_of_many_values_are_those_that_a_sort_finds(pattern, dtype, k):
    """k distinct places, whose magnitudes are the k largest; NaN counts as larger. Also batched."""
    x = PATTERNS[pattern](20_000).to(dtype)
    expected = x.abs().sort(descending=True).values[:k]
    rows = torch.stack([x, x.flip(0)])
    for values, places in (
        (x, wire.largest(x, k)),
        *zip(rows, vmap(lambda row: wire.largest(row, k))(rows), strict=True),
    ):
        assert len(places.unique()) == k
        assert torch.equal(values[places].abs().sort(descending=True).values.nan_to_num(9), expected.nan_to_num(9))


def test_the_largest_of_a_million_values_are_found_without_sorting_them():
    """Counted: the values that PyTorch's `topk` sees, without which it would move all of them with their places."""
    seen, x = [], torch.randn(2**20)

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.extend([args[0].numel()] if function is torch.ops.aten.topk.default else [])
            return function(*args, **kwargs or {})

    with Counts():
        kernels[wire.largest](x, len(x) // 100)  # in the operator no mode sees it
    assert seen and sum(seen) < len(x) // 20


def test_sign_scales_each_chunk_by_its_mean_magnitude():
    x, plan = bucket(shapes={"b": (11,)})
    y = roundtrip(compressors.sign(4), x, plan, key()).numpy()
    chunks = np.split(x.numpy(), [4, 8])
    np.testing.assert_allclose(y, np.concatenate([np.abs(c).mean() * np.sign(c) for c in chunks]), rtol=1e-14)


def test_dct_top_k_keeps_the_largest_coefficients_of_each_tile():
    x, plan = bucket(shapes={"a": (6, 8)})
    y = roundtrip(compressors.dct_top_k(3, chunk=4), x, plan, key()).numpy().reshape(6, 8)  # tiles of 3 x 4
    for i in range(0, 6, 3):
        for j in range(0, 8, 4):
            turned = dctn(x.numpy().reshape(6, 8)[i : i + 3, j : j + 4], norm="ortho")
            turned[np.abs(turned) < np.sort(np.abs(turned).reshape(-1))[-3]] = 0
            np.testing.assert_allclose(dctn(y[i : i + 3, j : j + 4], norm="ortho"), turned, atol=1e-12)


def test_low_rank_is_exact_on_matrices_of_that_rank():
    a, b = torch.randn(6, 2, dtype=torch.float64), torch.randn(2, 9, dtype=torch.float64)
    x = flatten({"m": a @ b, "v": torch.randn(4, dtype=torch.float64)})
    torch.testing.assert_close(roundtrip(compressors.low_rank(2), x[0], x.plan.buckets[0], key()), x[0])


@given(bits=st.sampled_from([1, 2, 4, 8]), values=st.lists(st.integers(0, 255), max_size=40))
def test_packed_bits_unpack(bits, values):
    given = torch.tensor([v % 2**bits for v in values], dtype=torch.uint8)
    packed = wire.pack(given, bits)
    assert packed.shape == (math.ceil(len(values) * bits / 8),) and packed.dtype == torch.uint8
    assert torch.equal(wire.unpack(packed, len(values), bits), given)


@pytest.mark.parametrize(
    ("compressor", "bytes_per_value"),
    [
        (compressors.top_k(0.01), 0.08),
        (compressors.random_k(0.01), 0.04),
        (compressors.sign(), 1 / 8 + 4 / 1024),
        (compressors.qsgd(7), 0.5 + 4 / 512),
        (compressors.quantize(8), 1 + 4 / 256),
        (compressors.quantize(4), 0.5 + 4 / 64),
        (compressors.cast(torch.bfloat16), 2),
        (compressors.low_rank(1), 4 * 2 / 1024),
        (compressors.dct_top_k(), 32 * 6 / 4096),
    ],
    ids=str,
)
def test_bytes_per_float32_value_really_shrink(compressor, bytes_per_value):
    plan = flatten({"w": torch.zeros(1024, 1024)}).plan.buckets[0]
    assert compressor.nbytes(plan) == pytest.approx(bytes_per_value * plan.numel, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: compressors.top_k(0.0),
        lambda: compressors.top_k(1.5),
        lambda: compressors.top_k(k=0),
        lambda: compressors.random_k(-1.0),
        lambda: compressors.sign(0),
        lambda: compressors.qsgd(128),
        lambda: compressors.quantize(3),
        lambda: compressors.low_rank(0),
        lambda: compressors.dct_top_k(0),
        lambda: compressors.dct_top_k(chunk=None),
        lambda: compressors.cast(torch.int8),
    ],
)
def test_wrong_arguments_are_named(make):
    with pytest.raises(ValueError, match=r"^\w+\("):
        make()


@pytest.mark.parametrize("bits", [None, 2])
def test_chunk_top_k_keeps_the_largest_of_each_chunk(bits):
    k, chunk = 3, 7
    compressor = compressors.chunk_top_k(k, chunk=chunk, bits=bits)
    x, plan = bucket()
    got = compressor.decompress(compressor.compress(x, plan, key()), plan).numpy()
    expected = np.zeros(len(x))
    for first in range(0, len(x), chunk):
        row = x.numpy()[first : first + chunk]  # the last one is shorter than k
        places = np.argsort(-np.abs(row), kind="stable")[:k]
        values = row[places]
        if bits == 2:  # the multiple of ±1 and ±3 that is nearest
            levels = np.where(values > 0, 1, -1) * np.where(np.abs(values) > np.abs(values).mean(), 3, 1)
            values = levels * (levels @ values) / (levels @ levels)
        expected[first + places] = values
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("bits", [None, 2])
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 6, 8, 9])
def test_a_last_chunk_of_few_values_is_compressed_as_if_it_were_alone(bits, numel):
    x, plan = bucket(shapes={"a": (8 + numel,)})
    rest, of_rest = bucket(shapes={"a": (numel,)})
    rest.copy_(x[8:])
    compressor = compressors.chunk_top_k(5, chunk=8, bits=bits)
    torch.testing.assert_close(roundtrip(compressor, x, plan, key())[8:], roundtrip(compressor, rest, of_rest, key()))
    zeros = torch.zeros_like(x)
    assert torch.equal(roundtrip(compressor, zeros, plan, key()), zeros)
