"""Messages compiled by Inductor equal eager ones for every compressor, dtype and odd size."""

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import trees
from decentfn.testing import on_ranks
from decentfn.testing.ranks import alone_as_rank_of

pytestmark = pytest.mark.thorough

COMPRESSORS = (
    compressors.random_k(0.5),
    compressors.top_k(0.25),
    compressors.dct_top_k(2, chunk=4),
    compressors.identity(),
    compressors.cast(torch.bfloat16),
    compressors.sign(8),
    compressors.qsgd(7, chunk=16),
    compressors.quantize(8),
    compressors.quantize(4, stochastic=True),
    compressors.low_rank(1),
)
SHAPES = ((7,), (20,), (24,), (4, 5))
STEPS = 3


def loss(params, batch):
    return sum((p.float() - batch).square().sum() for p in trees.leaves(params)) / 2


def mixing(dtype, places, n):
    """A start and a step of DeepSqueeze with these compressors, a bucket of another size each, in one graph."""
    draw = torch.Generator().manual_seed(0)
    steps, starts = [], []
    for place, compressor in enumerate(COMPRESSORS):
        if place not in places:
            continue
        # Scattered ones in two sizes: whether they were fused wrongly depended on it.
        for shape in SHAPES[place::2] if place < 2 else SHAPES[place % 4 :][:1]:
            algorithm = df.deep_squeeze(
                loss, df.sgd(0.0), df.topology("static-ring", n), compressor=compressor, gamma=0.3
            )
            rows = [algorithm.init([torch.randn(shape, generator=draw).to(dtype)]) for _ in range(n)]
            starts.append(trees.map(lambda *leaves: torch.stack(leaves), *rows))
            steps.append(algorithm.step)

    def step(states, batch, t):
        return [step(state, batch, t)[0] for step, state in zip(steps, states, strict=True)], batch

    return starts, step


def run(step, states, workers):
    for t in range(STEPS):
        states, _ = step(states, torch.zeros(workers), t)
    return states


def assert_alike(got, expected, dtype):
    for mine, theirs in zip(trees.leaves(got), trees.leaves(expected), strict=True):
        # What is rounded to the next number may be chosen in another's place; zeros in place of a message change nearly all values.
        bound = 16 * torch.finfo(dtype).eps
        assert torch.isclose(mine, theirs, rtol=bound, atol=bound).double().mean() >= 0.9


SLOW = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32, torch.float64)]


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *SLOW], ids=str)
def test_messages_decode_to_what_they_say_in_compiled_code(dtype, first):
    starts, step = mixing(dtype, range(first, len(COMPRESSORS), 4), 3)
    eager = run(df.simulate(step, 3), starts, 3)
    compiled = run(df.compile(df.simulate(step, 3), donate=False), starts, 3)
    assert_alike(compiled, eager, dtype)


@pytest.mark.slow
def test_so_they_do_with_two_workers_a_process():
    dtype = torch.bfloat16
    starts, step = mixing(dtype, (0, 1, 2, 5), 4)
    eager = run(df.simulate(step, 4), starts, 4)
    packed = df.compile(df.simulate(step, 2), donate=False)

    def of(rank):
        return trees.map(lambda x: x[2 * rank : 2 * rank + 2].clone(), starts)

    with alone_as_rank_of(2):
        packed(of(0), torch.zeros(2), 0)
    halves = on_ranks(2, lambda rank: run(packed, of(rank), 2))
    assert_alike(trees.map(lambda *rows: torch.cat(rows), *halves), eager, dtype)


def test_odd_chunks_of_quantized_subnormals_and_large_values_decode_alike():
    draw = torch.Generator().manual_seed(1)
    rows = [
        [(torch.randn(23, generator=draw) * 10.0 ** (-7 if i else 3)).half(), torch.full((5,), 6e-8).half()]
        for i in range(3)
    ]
    algorithm = df.deep_squeeze(
        lambda params, batch: sum(0.0 * p.abs().float().sum() for p in trees.leaves(params)),
        df.sgd(0.0),
        df.topology("static-ring", 3),
        compressor=compressors.quantize(8, chunk=7),
        gamma=0.3,
    )
    start = trees.map(lambda *leaves: torch.stack(leaves), *[algorithm.init(row) for row in rows])
    step = df.simulate(algorithm.step, 3)
    eager, compiled = run(step, start, 3), run(df.compile(step, donate=False), start, 3)
    for mine, theirs in zip(trees.leaves(compiled), trees.leaves(eager), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02, equal_nan=True)
