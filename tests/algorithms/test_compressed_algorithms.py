"""CHOCO-SGD, DeepSqueeze, PowerGossip and DeMo against float64 numpy loops written from their equations."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.fft import dctn, idctn
from torch._dynamo.testing import CompileCounter

import decentfn as df
from decentfn import compressors
from decentfn.algorithms.choco_sgd import choco_sgd
from decentfn.algorithms.deep_squeeze import deep_squeeze
from decentfn.algorithms.demo import demo
from decentfn.algorithms.power_gossip import power_gossip
from decentfn.comm import collectives, gossip
from decentfn.comm.gossip.compressed import all_to_all, as_messages, post_compressed
from decentfn.compressors import Key
from decentfn.core import trees
from decentfn.core.buckets import flatten
from tests.quadratics import STEPS, Sgd, random_column_stochastic, random_symmetric, static_ring

pytestmark = pytest.mark.thorough

N = 5
LR = 0.1
SHAPES = {"s": (3, 3), "v": (5,), "w": (4, 6)}
SIZE = 9 + 5 + 24
rng = np.random.default_rng(0)
CURVATURE = rng.uniform(0.2, 1.0, (N, SIZE))  # f_i(x) = ½ Σ a_i (x - b_i)²
MINIMUM = rng.normal(size=(N, SIZE))
START = rng.normal(size=(N, SIZE))
EQUAL = np.tile(START[:1], (N, 1))


def tree(x):
    pieces = np.split(x, [9, 14], axis=-1)
    return {
        name: torch.tensor(piece).reshape(*x.shape[:-1], *shape)
        for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)
    }


def loss(params, batch):
    a, b = batch
    x = torch.cat([params[name].reshape(-1) for name in SHAPES])
    return (a * (x - b) ** 2).sum() / 2


def gradients(x):
    return CURVATURE * (x - MINIMUM)


BATCH = torch.tensor(CURVATURE), torch.tensor(MINIMUM)


def stacked(algorithm, start=START):
    states = [algorithm.init(tree(x)) for x in start]
    return trees.map(lambda *leaves: torch.stack(leaves), *states)


def history(algorithm, steps=STEPS, start=START):
    step = df.simulate(algorithm.step, len(start))
    states = [stacked(algorithm, start)]
    for t in range(steps):
        states.append(step(states[-1], BATCH, t)[0])
    return states


def flat(buckets):
    return torch.cat(list(buckets), -1).numpy().copy()


def run(algorithm, steps=STEPS):
    return np.stack([flat(state.params) for state in history(algorithm, steps)])


def schedule(matrices):
    return df.topologies.from_matrices("given", matrices)


def top(x, k):
    """The k largest of x in magnitude, the others zero."""
    y = np.zeros_like(x)
    places = np.argsort(-np.abs(x))[:k]
    y[places] = x[places]
    return y


def library(compressor):
    """A compressor as a numpy function of (vector, t, worker)."""
    plan = flatten(tree(START[0])).plan.buckets[0]

    def both(x, t, i):
        message = compressor.compress(torch.tensor(x), plan, Key(torch.tensor(t), torch.tensor(i)))
        return compressor.decompress(message, plan).numpy()

    return both


TOP = compressors.top_k(k=6), lambda x, t, i: top(x, 6)
SIGN = compressors.sign(None), lambda x, t, i: np.abs(x).mean() * np.sign(x)
STATIC = {"ring": static_ring(N), "random": random_symmetric(N, 1, 3), "complete": np.full((1, N, N), 1 / N)}
VARYING = random_symmetric(N, 3, 1)
COMPRESSORS = [TOP, SIGN] + [
    (c, library(c))
    for c in (
        compressors.random_k(0.3),
        compressors.quantize(4, stochastic=True),
        compressors.qsgd(7, chunk=8),
        compressors.dct_top_k(2, chunk=3),
        compressors.cast(torch.float32),
    )
]
each_compressor = pytest.mark.parametrize(("compressor", "C"), COMPRESSORS, ids=lambda c: getattr(c, "name", ""))


# -- CHOCO-SGD ------------------------------------------------------------------------------------------------------


def numpy_choco(W, C, gamma):
    """Every worker holds every public copy, as in the paper."""
    x, public, path = START.copy(), np.zeros((N, SIZE)), [START]
    for t in range(STEPS):
        half = x - LR * gradients(x)
        q = np.stack([C(half[i] - public[i], t, i) for i in range(N)])
        public = public + q
        x = np.stack([half[i] + gamma * sum(W[i, j] * (public[j] - public[i]) for j in range(N)) for i in range(N)])
        path.append(x)
    return np.stack(path)


@each_compressor
def test_choco_sgd_is_its_equation(compressor, C):
    algorithm = choco_sgd(loss, Sgd(LR), schedule(STATIC["random"]), compressor=compressor, gamma=0.3)
    assert np.abs(run(algorithm) - numpy_choco(STATIC["random"][0], C, 0.3)).max() <= 1e-10


@pytest.mark.parametrize("topology", [df.topology("complete", N), schedule(STATIC["ring"])], ids=repr)
def test_choco_sgd_on_groups_and_rings(topology):
    algorithm = choco_sgd(loss, Sgd(LR), topology, compressor=TOP[0], gamma=0.4)
    W = df.mixing_matrix(topology, 0).numpy()
    assert np.abs(run(algorithm) - numpy_choco(W, TOP[1], 0.4)).max() <= 1e-10


def test_choco_sgd_uncompressed_is_adapt_then_combine():
    topology = schedule(STATIC["ring"])
    algorithm = choco_sgd(loss, Sgd(LR), topology, compressor=compressors.identity(), gamma=1.0)
    assert np.abs(run(algorithm) - run(df.adapt_then_combine(loss, Sgd(LR), topology))).max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_and_in_narrow_dtypes_to_their_rounding(dtype):
    ends = [narrow_run(algorithm, dtype, 60).params[0].double() for algorithm in choco_and_uncompressed()]
    torch.testing.assert_close(*ends, rtol=0, atol=4 * torch.finfo(dtype).eps * np.abs(START).max())


def choco_and_uncompressed():
    topology = schedule(STATIC["ring"])
    yield choco_sgd(loss, Sgd(LR), topology, compressor=compressors.identity(), gamma=1.0)
    yield df.adapt_then_combine(loss, Sgd(LR), topology)


def narrow_run(algorithm, dtype, steps):
    """Return the state after training in `dtype`."""
    states = [algorithm.init(trees.map(lambda leaf: leaf.to(dtype), tree(x))) for x in START]
    state, step = trees.map(lambda *leaves: torch.stack(leaves), *states), df.simulate(algorithm.step, N)
    for t in range(steps):
        state, _ = step(state, BATCH, t)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressor", [TOP[0], compressors.quantize(8), compressors.identity()], ids=str)
def test_running_sums_are_what_mixing_adds_to_the_public_copies(compressor, dtype):
    options = {"compressor": compressor, "gamma": 0.3}
    choco, beer = (
        narrow_run(make(loss, Sgd(LR), schedule(STATIC["ring"]), **options), dtype, 40).memory
        for make in (choco_sgd, df.beer)
    )
    W = torch.tensor(STATIC["ring"][0])
    for public, pull in ((choco.public, choco.pull), (beer.h, beer.pull_x), (beer.s, beer.pull_v)):
        (public,), (pull,) = public, pull
        public = public.double()
        torch.testing.assert_close(pull, W @ public - public, rtol=0, atol=4e-6)


@pytest.mark.parametrize("compressor", [compressors.top_k(0.2), compressors.sign(8), compressors.quantize(4)], ids=str)
def test_choco_gossip_reaches_consensus_at_the_mean(compressor):
    algorithm = choco_sgd(loss, Sgd(0.0), schedule(STATIC["ring"]), compressor=compressor, gamma=0.2)
    x = flat(history(algorithm, 300)[-1].params)
    np.testing.assert_allclose(x, np.tile(START.mean(0), (N, 1)), atol=1e-3)


# -- DeepSqueeze ----------------------------------------------------------------------------------------------------


def numpy_deep_squeeze(matrices, C, gamma):
    x, delta, path = START.copy(), np.zeros((N, SIZE)), [START]
    for t in range(STEPS):
        W = matrices[t % len(matrices)]
        half = x - LR * gradients(x)
        v = half + delta
        said = np.stack([C(v[i], t, i) for i in range(N)])
        delta = v - said
        x = half + gamma * (W @ said - said)
        path.append(x)
    return np.stack(path)


@each_compressor
@pytest.mark.parametrize("matrices", [STATIC["random"], VARYING], ids=["static", "varying"])
def test_deep_squeeze_is_its_equation(compressor, C, matrices):
    algorithm = deep_squeeze(loss, Sgd(LR), schedule(matrices), compressor=compressor, gamma=0.2)
    assert np.abs(run(algorithm) - numpy_deep_squeeze(matrices, C, 0.2)).max() <= 1e-10


def test_deep_squeeze_uncompressed_is_adapt_then_combine():
    topology = schedule(VARYING)
    algorithm = deep_squeeze(loss, Sgd(LR), topology, compressor=compressors.identity(), gamma=1.0)
    assert np.abs(run(algorithm) - run(df.adapt_then_combine(loss, Sgd(LR), topology))).max() <= 1e-12


def test_deep_squeeze_feeds_back_what_it_left_unsaid():
    # δ⁺ + C(v) = v = x½ + δ
    algorithm = deep_squeeze(loss, Sgd(LR), schedule(VARYING), compressor=TOP[0], gamma=0.2)
    states = history(algorithm, 5)
    for before, after in zip(states, states[1:], strict=False):
        x, delta = flat(before.params), flat(before.memory.error)
        v = x - LR * gradients(x) + delta
        said = np.stack([top(row, 6) for row in v])
        np.testing.assert_allclose(flat(after.memory.error) + said, v, atol=1e-14)


# -- PowerGossip ----------------------------------------------------------------------------------------------------


def numpy_power_gossip(matrices, topology, rank, iterations):
    """Edge by edge; an edge without a direction draws it by the step and the slot."""
    leaves = {"s": slice(0, 9), "v": slice(9, 14), "w": slice(14, 38)}
    offsets, start = {}, 0
    for name in ("s", "w"):
        m, n = SHAPES[name]
        offsets[name] = (start, max(m, n), min(rank, m, n))
        start += max(m, n) * min(rank, m, n)
    remembered, path, x = {}, [START], START.copy()
    for t in range(STEPS):
        phase = t % len(matrices)
        W, g = matrices[phase], gradients(x)
        mixed = x.copy()
        first = 2 * df.draws.uniform(0, t, 0, (topology.slots, start)).numpy() - 1
        for i in range(iterations):
            transposed = (t // len(matrices) * iterations + i) % 2 == 1
            moved = mixed.copy()
            for slot in range(topology.sources.shape[2]):
                for a in range(N):
                    b = int(topology.sources[phase, a, slot])
                    if a <= b:  # a > b, once for each edge
                        continue
                    for name, (begin, long, r) in offsets.items():
                        m, n = SHAPES[name]
                        X_a, X_b = (mixed[w, leaves[name]].reshape(m, n) for w in (a, b))
                        if transposed:
                            X_a, X_b = X_a.T, X_b.T
                        drawn = first[slot, begin : begin + long * r].reshape(long, r)
                        p = remembered.get((phase, slot, a, name), drawn)[: X_a.shape[1]]
                        p, _ = np.linalg.qr(p)
                        q = X_a @ p - X_b @ p
                        move = q @ p.T
                        move = (move.T if transposed else move).reshape(-1)
                        moved[a, leaves[name]] -= W[a, b] * move
                        moved[b, leaves[name]] += W[a, b] * move
                        remembered[phase, slot, a, name] = q
            if i == iterations - 1:
                moved[:, leaves["v"]] = W @ mixed[:, leaves["v"]]
            mixed = moved
        x = mixed - LR * g
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize(("rank", "iterations"), [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("matrices", [STATIC["random"], VARYING], ids=["static", "varying"])
def test_power_gossip_is_its_equation(rank, iterations, matrices):
    topology = schedule(matrices)
    algorithm = power_gossip(loss, Sgd(LR), topology, rank=rank, iterations=iterations)
    expected = numpy_power_gossip(matrices, topology, rank, iterations)
    # Nearly dependent columns amplify rounding: the loop itself, started 1e-15 away, differs by 1e-5 after 90 rounds.
    steps = 30 // iterations
    assert np.abs(run(algorithm, steps) - expected[: steps + 1]).max() <= 1e-10


def test_power_gossip_does_not_stay_silent_after_neighbors_have_agreed():
    # Equal starts leave no direction to remember; the first unit vector, which orth(0) would give, sees no difference
    # here, for the first row and column never change.
    algorithm = power_gossip(lambda s, target: ((s[1:, 1:] - target) ** 2).sum() / 2, Sgd(LR), schedule(STATIC["ring"]))
    target = torch.tensor(MINIMUM[:, :4]).reshape(N, 2, 2)
    state = df.stack(algorithm.init(torch.zeros(3, 3, dtype=torch.float64)), N)
    step = df.simulate(algorithm.step, N)
    for t in range(60):
        state, _ = step(state, target, t)
    x = flat(state.params).reshape(N, 3, 3)[:, 1:, 1:]
    alone = MINIMUM[:, :4].reshape(N, 2, 2) * (1 - (1 - LR) ** 60)
    assert np.linalg.norm(x - x.mean(0)) < 0.5 * np.linalg.norm(alone - alone.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["static-ring", "one-peer-exp"])
@pytest.mark.parametrize("sizes", [(33, 17), (64, 10), (20, 300)], ids=str)
def test_the_rounding_of_equal_workers_is_no_direction(sizes, name, dtype):
    """A batched kernel may add another worker's products in another order."""
    start = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
    algorithm = power_gossip(lambda x, b: (x * b).float().sum(), Sgd(LR), df.topology(name, 4), rank=2)
    state, step = df.stack(algorithm.init(start), 4), df.simulate(algorithm.step, 4)
    for t in range(4):
        state, _ = step(state, torch.ones(4, *sizes, dtype=dtype), t)
        assert not any(p.any() for p in state.memory.directions)


def test_power_gossip_of_full_rank_on_square_matrices_is_adapt_while_communicate():
    topology = schedule(VARYING)

    def square(params, batch):
        return ((params["s"] - batch) ** 2).sum() / 2

    results = []
    for algorithm in (
        power_gossip(square, Sgd(LR), topology, rank=3),
        df.adapt_while_communicate(square, Sgd(LR), topology),
    ):
        starts = [algorithm.init({"s": torch.tensor(x[:9]).reshape(3, 3)}) for x in START]
        state = trees.map(lambda *leaves: torch.stack(leaves), *starts)
        step = df.simulate(algorithm.step, N)
        for t in range(STEPS):
            state, _ = step(state, torch.tensor(MINIMUM[:, :9]).reshape(N, 3, 3), t)
        results.append(flat(state.params))
    assert np.abs(results[0] - results[1]).max() <= 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("period", [2, 3])
def test_power_gossip_reaches_consensus_at_the_mean(rank, period):
    """Whatever the period: an edge that speaks in every second step takes X and Xᵀ by turns all the same."""
    algorithm = power_gossip(loss, Sgd(0.0), schedule(random_symmetric(N, period, 1)), rank=rank)
    x = flat(history(algorithm, 400)[-1].params)
    np.testing.assert_allclose(x, np.tile(START.mean(0), (N, 1)), atol=1e-6)


# -- DeMo -----------------------------------------------------------------------------------------------------------


def tile_sides(shape, chunk):
    return tuple(max(d for d in range(1, min(side, chunk) + 1) if side % d == 0) for side in shape)


def numpy_dct_top(x, k, chunk):
    """Tile by tile: (what is kept after the inverse transform)."""
    y = np.zeros_like(x)
    for name, part in {"s": slice(0, 9), "v": slice(9, 14), "w": slice(14, 38)}.items():
        shape = SHAPES[name] if len(SHAPES[name]) == 2 else (1, *SHAPES[name])
        leaf, kept = x[part].reshape(shape), np.zeros(shape)
        h, w = tile_sides(shape, chunk)
        for i in range(0, shape[0], h):
            for j in range(0, shape[1], w):
                turned = dctn(leaf[i : i + h, j : j + w], norm="ortho")
                kept[i : i + h, j : j + w] = idctn(top(turned.reshape(-1), k).reshape(h, w), norm="ortho")
        y[part] = kept.reshape(-1)
    return y


@pytest.mark.parametrize("scheduled", [False, True])
def test_demo_is_its_equation(scheduled):
    def rate(t):
        return 0.02 / (1 + 0.1 * t)

    class Scheduled(Sgd):
        def init(self, params):
            return torch.zeros((), dtype=torch.float64)

        def update(self, grads, opt_state, params):
            return trees.map(lambda g: -rate(opt_state) * g, grads), opt_state + 1

    algorithm = demo(
        loss,
        Scheduled(0.0) if scheduled else Sgd(0.02),
        df.topology("complete", N),
        learning_rate=rate if scheduled else 1.0,
        decay=0.9,
        k=2,
        chunk=4,
    )
    theta, delta, path = EQUAL.copy(), np.zeros((N, SIZE)), [EQUAL]
    for t in range(STEPS):
        eta = rate(t) if scheduled else 0.02
        delta = 0.9 * delta + eta * gradients(theta)
        q = np.stack([numpy_dct_top(delta[i], 2, 4) for i in range(N)])
        delta = delta - q
        theta = theta - eta * np.sign(q.sum(0))
        path.append(theta)
    states = history(algorithm, STEPS, EQUAL)
    assert np.abs(np.stack([flat(s.params) for s in states]) - np.stack(path)).max() <= 1e-10
    assert all((flat(s.params) == flat(s.params)[0]).all() for s in states)


def test_demo_uncompressed_is_sign_sgd_of_the_summed_gradients():
    algorithm = demo(loss, Sgd(0.02), df.topology("complete", N), compressor=compressors.identity())
    states = history(algorithm, 10, EQUAL)
    x = START[0].copy()
    for state in states:
        np.testing.assert_allclose(flat(state.params), np.tile(x, (N, 1)), atol=1e-12)
        assert all((bucket == 0).all() for bucket in state.memory.momentum)
        x = x - 0.02 * np.sign(gradients(np.tile(x, (N, 1))).sum(0))


# -- all of them ----------------------------------------------------------------------------------------------------

MAKERS = {
    "choco_sgd": lambda topology, lr=LR: choco_sgd(loss, Sgd(lr), topology, compressor=TOP[0], gamma=0.3),
    "deep_squeeze": lambda topology, lr=LR: deep_squeeze(loss, Sgd(lr), topology, compressor=TOP[0], gamma=0.3),
    "power_gossip": lambda topology, lr=LR: power_gossip(loss, Sgd(lr), topology, rank=2, iterations=2),
}


@pytest.mark.parametrize("name", MAKERS)
@given(seed=st.integers(0, 1000))
def test_gossip_alone_keeps_the_mean(name, seed):
    x = run(MAKERS[name](schedule(random_symmetric(N, 1, seed)), lr=0.0), 8)
    np.testing.assert_allclose(x.mean(1), np.tile(START.mean(0), (9, 1)), atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*MAKERS, "demo"])
def test_one_graph_serves_a_run_and_says_the_same(name):
    topology = schedule(STATIC["ring"] if name == "choco_sgd" else VARYING)
    algorithm = demo(loss, Sgd(LR), topology, k=2, chunk=4) if name == "demo" else MAKERS[name](topology)
    torch._dynamo.reset()
    counter = CompileCounter()
    step = df.compile(df.simulate(algorithm.step, N), backend=counter, donate=False)
    states = history(algorithm, 6, EQUAL if name == "demo" else START)
    state = states[0]
    for t in range(6):
        state, _ = step(state, BATCH, t)
    assert counter.frame_count == 1
    for left, right in zip(trees.leaves(state), trees.leaves(states[-1]), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", [*MAKERS, "demo"])
def test_a_single_worker_trains_alone(name):
    topology = df.topology("complete", 1)
    algorithm = demo(loss, Sgd(LR), topology) if name == "demo" else MAKERS[name](topology)
    state = algorithm.init(tree(START[0]))
    x = START[0]
    for t in range(4):
        state, _ = algorithm.step(state, (BATCH[0][0], BATCH[1][0]), t)
        g = CURVATURE[0] * (x - MINIMUM[0])
        x = x - LR * (np.sign(g) if name == "demo" else g)
    if name == "demo":  # the momentum that is not told is kept
        return
    np.testing.assert_allclose(flat(state.params), x, atol=1e-12)


@pytest.mark.parametrize("name", ["choco_sgd", "deep_squeeze", "demo", "power_gossip"])
def test_what_is_sent_is_the_compressed_message(name, monkeypatch):
    sent = []

    def listen(x, row, original=collectives.exchange, **options):
        sent.append((tuple(x.shape), x.dtype))
        return original(x, row, **options)

    monkeypatch.setattr(collectives, "exchange", listen)
    topology = schedule(STATIC["ring"])
    compressor = compressors.quantize(4)
    made = {
        "choco_sgd": lambda: choco_sgd(loss, Sgd(LR), topology, compressor=compressor, gamma=0.3),
        "deep_squeeze": lambda: deep_squeeze(loss, Sgd(LR), topology, compressor=compressor, gamma=0.3),
        "demo": lambda: demo(loss, Sgd(LR), topology, compressor=compressor),
        "power_gossip": lambda: power_gossip(loss, Sgd(LR), topology),
    }[name]()
    history(made, 1, EQUAL if name == "demo" else START)
    plan = flatten(tree(START[0])).plan.buckets[0]
    if name == "power_gossip":
        assert sent == [
            ((topology.sources.shape[2], 3 + 6 + 5), torch.float64)
        ]  # max(m, n) of both matrices, and the vector
    else:
        assert sent == [((compressor.nbytes(plan),), torch.uint8)]


def test_averages_within_groups_become_messages_with_the_same_matrices():
    for topology in (
        df.topology("complete", 5),
        df.topology("alternating-exp-ring", 8, local_world_size=4),
        df.topology("one-peer-exp", 4),
    ):
        messages = as_messages(topology)
        assert messages.groups is None and messages.period == topology.period
        for t in range(topology.period):
            torch.testing.assert_close(df.mixing_matrix(messages, t), df.mixing_matrix(topology, t), rtol=0, atol=1e-15)
    assert torch.equal(df.mixing_matrix(all_to_all(4), 0), df.mixing_matrix(df.topology("complete", 4), 0))


RING, CHANGING = schedule(STATIC["ring"]), schedule(VARYING)
DIRECTED = df.topologies.from_matrices("directed", (np.eye(N) + np.roll(np.eye(N), 1, 0)) / 2)
PUSH = df.topologies.from_matrices("push", random_column_stochastic(N, 1, 0), needs_push_sum=True)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: choco_sgd(loss, Sgd(LR), CHANGING, compressor=TOP[0], gamma=0.3), "period 3"),
        (lambda: choco_sgd(loss, Sgd(LR), RING, compressor=TOP[0], gamma=0.0), "gamma=0.0"),
        (lambda: choco_sgd(loss, Sgd(LR), RING, compressor="top_k", gamma=0.3), "compressor='top_k'"),
        (lambda: choco_sgd(loss, Sgd(LR), RING, compressor=TOP[0], gamma=1, wire_dtype=torch.bfloat16), "cast"),
        (
            lambda: choco_sgd(loss, Sgd(LR), RING, compressor=compressors.qsgd(1), gamma=1.0).init(tree(START[0])),
            "variance is not below 1",
        ),
        (lambda: deep_squeeze(loss, Sgd(LR), RING, compressor=TOP[0], gamma=1.5), "gamma=1.5"),
        (lambda: deep_squeeze(loss, Sgd(LR), PUSH, compressor=TOP[0], gamma=0.3), "column-stochastic"),
        (lambda: power_gossip(loss, Sgd(LR), DIRECTED), "transpose"),
        (lambda: power_gossip(loss, Sgd(LR), df.topology("random-matching", N)), "random"),
        (lambda: power_gossip(loss, Sgd(LR), RING, rank=0), "rank=0"),
        (lambda: power_gossip(loss, Sgd(LR), RING, iterations=0), "iterations=0"),
        (lambda: power_gossip(loss, Sgd(LR), RING, wire_dtype=torch.bfloat16), "wire_dtype"),
        (lambda: demo(loss, Sgd(LR), RING, decay=1.0), "decay=1.0"),
        (lambda: demo(loss, Sgd(LR), RING, k=0), "k=0"),
    ],
)
def test_preconditions_are_checked_and_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("compressor", [compressors.top_k(0.5), compressors.quantize(4), compressors.sign()], ids=str)
def test_one_simulated_worker_reads_its_own_message(compressor):
    """Ten values make a message whose length is no multiple of a field's size."""
    init, step = choco_sgd(
        lambda x, b: ((x - b) ** 2).sum(), Sgd(LR), df.topology("complete", 1), compressor=compressor, gamma=0.3
    )
    state = init(torch.zeros(10))
    alone, _ = step(state, torch.ones(10), 0)
    simulated, _ = df.simulate(step, 1)(df.stack(state, 1), torch.ones(1, 10), 0)
    torch.testing.assert_close(df.params(simulated)[0], df.params(alone), rtol=0, atol=0)


@pytest.mark.parametrize("compressor", [compressors.random_k(0.5), compressors.qsgd(3)], ids=lambda one: one.name)
def test_buckets_of_equal_size_have_random_numbers_of_their_own(compressor):
    x = flatten([torch.ones(64), torch.ones(64)], bucket_mb=1e-9)
    one, other = post_compressed(x, compressor, df.topology("complete", 1), torch.tensor(0)).sent
    assert not torch.equal(one, other)


def test_a_guarded_message_is_bad_if_its_values_or_what_is_decoded_of_them_are():
    """A NaN that the compressor leaves out, and a large value that its message cannot hold."""

    def posted(values, compressor):
        with gossip.guarded() as noted:
            sent = post_compressed(flatten([values]), compressor, df.topology("complete", 1), torch.tensor(0)).sent
        return bool(noted.messages[0]), sent[0]

    few = compressors.random_k(0.1)
    is_good, sent = posted(torch.ones(64), few)
    with_nan = torch.where(sent == 0, torch.nan, 1.0)
    assert is_good and not posted(with_nan, few)[0]
    assert not posted(torch.full((4,), 1e6), compressors.cast(torch.float16))[0]
