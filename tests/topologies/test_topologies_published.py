"""Figures that others published, and closed forms."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
import torch

from decentfn.core import draws
from decentfn.topologies import (
    alternating_exp_ring,
    certificate,
    consensus_steps,
    from_draw,
    graph,
    mixing_matrix,
    spectral_gap,
    topology,
)
from decentfn.topologies.matching import pair_weights

pytestmark = pytest.mark.thorough


def ring_gap(n):
    return 1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3


@pytest.mark.parametrize("n", [3, 4, 5, 16, 33, 100])
def test_gaps_of_ring_chain_star_and_static_exponential(n):
    assert spectral_gap(topology("static-ring", n)) == pytest.approx(1.0 if n == 3 else ring_gap(n), abs=1e-13)
    assert spectral_gap(topology("chain", n)) == pytest.approx(ring_gap(2 * n), abs=1e-13)
    if n <= 65:
        assert spectral_gap(topology("star", n)) == pytest.approx(1 / n, abs=1e-13)
    if n % 2 == 0:
        tau = math.ceil(math.log2(n))
        assert spectral_gap(topology("static-exp", n)) == pytest.approx(2 / (1 + tau), abs=1e-13)


def test_gaps_of_torus_and_hypercube():
    assert spectral_gap(topology("torus", 25)) == pytest.approx(0.2764, abs=5e-5)
    assert spectral_gap(topology("torus", 21, rows=3)) == pytest.approx(
        (2 - 2 * math.cos(2 * math.pi / 7)) / 5, abs=1e-13
    )
    for bits in range(1, 8):
        assert spectral_gap(topology("hypercube", 2**bits)) == pytest.approx(2 / (1 + bits), abs=1e-13)


def one_peer_residual(n):
    tau = math.ceil(math.log2(n))
    return max(abs(math.sin(math.pi * m * 2**tau / n) / math.sin(math.pi * m / n)) / 2**tau for m in range(1, n))


def test_large_gaps_by_iteration_match_their_closed_forms():
    assert spectral_gap(topology("chain", 1000)) == pytest.approx(ring_gap(2000), rel=1e-6)
    assert spectral_gap(topology("hypercube", 1024)) == pytest.approx(2 / 11, abs=1e-9)
    assert spectral_gap(topology("torus", 900)) == pytest.approx((2 - 2 * math.cos(2 * math.pi / 30)) / 5, abs=1e-9)
    assert spectral_gap(topology("static-ring", 4096)) == pytest.approx(ring_gap(4096), rel=1e-9)
    half_shifts = 1 - math.cos(2 * math.pi / 600) ** 299
    assert spectral_gap(topology("shift-one", 600)) == pytest.approx(half_shifts, abs=1e-12)
    assert 1 - spectral_gap(topology("one-peer-exp-directed", 600)) == pytest.approx(one_peer_residual(600), abs=1e-12)
    assert spectral_gap(topology("one-peer-exp", 1024)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "residual"), [(3, 0.25), (5, 0.2023), (6, 0.2165), (7, 0.125), (12, 0.2091), (17, 0.0614), (33, 0.0311)]
)
def test_residuals_of_the_directed_one_peer_exponential_graph(n, residual):
    tau = math.ceil(math.log2(n))
    closed = one_peer_residual(n)
    made = topology("one-peer-exp-directed", n)
    assert made.period == tau
    assert 1 - spectral_gap(made) == pytest.approx(closed, abs=1e-13) == pytest.approx(residual, abs=5.1e-5)
    assert made.sources[:, 0, 0].tolist() == [(-(2**k)) % n for k in range(tau)]


@pytest.mark.parametrize(("n", "p", "period"), [(9, 2, 2), (27, 2, 3), (16, 3, 2), (25, 4, 2), (8, 1, 3)])
def test_p_peer_exponential_graphs_are_exact_for_powers(n, p, period):
    assert consensus_steps(topology("p-peer-exp", n, p=p)) == period


BASE_LENGTHS = dict(zip(range(2, 18), [1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9], strict=True))


def test_base_graphs_have_the_published_lengths():
    lengths = BASE_LENGTHS | {24: 6, 25: 9, 33: 11, 48: 7, 100: 11}
    assert {n: topology("base", n).period for n in lengths} == lengths


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_graphs_are_exact_within_the_bound_with_at_most_k_peers(k):
    for n in range(2, 101):
        for name in ("base", "simple-base"):
            made = topology(name, n, k=k)
            exact_after = consensus_steps(made)
            assert exact_after == made.period or (k > 1 and exact_after == made.period - 1), (name, n)
            assert made.degree <= k
        if (k, n) not in {(4, 11), (4, 53)}:
            assert topology("base", n, k=k).period <= 2 * math.log(n, k + 1) + 2 + 1e-9, n


def test_base_rounds_of_three_and_six_workers():
    def edges(made):
        found = []
        for t in range(made.period):
            w = mixing_matrix(made, t)
            found.append({(i, j): round(w[i, j].item(), 12) for i in range(len(w)) for j in range(i) if w[i, j]})
        return [{tuple(sorted(pair)): weight for pair, weight in round_.items()} for round_ in found]

    third = round(2 / 3, 12)
    assert edges(topology("base", 3)) == [{(0, 1): 0.5}, {(1, 2): third}, {(0, 1): 0.5}]
    half = {(0, 1): 0.5, (3, 4): 0.5}
    across = {(0, 3): 0.5, (1, 4): 0.5, (2, 5): 0.5}
    assert edges(topology("base", 6)) == [half, {(1, 2): third, (4, 5): third}, half, across]


def test_hyper_hypercubes_average_groups_at_growing_strides():
    made = topology("hyper-hypercube", 12, k=2)
    assert consensus_steps(made) == made.period == 3
    assert made.degree == 2
    w = mixing_matrix(made, 0)
    assert w[0, :3].tolist() == pytest.approx([1 / 3] * 3)
    with pytest.raises(ValueError, match=r"hyper_hypercube\(num_workers=10, k=2\): 10 has a prime factor above k \+ 1"):
        topology("hyper-hypercube", 10, k=2)


def ceca_consensus(sources, x):
    """a: the mean over the e + 1 workers up to me, b: over the e before me; bit 1: a travels, bit 0: b does."""
    n, e, a, b = len(x), 0, x, np.zeros_like(x)
    for bit, source in zip(map(int, f"{n - 1:b}"), sources, strict=True):
        whole = 2 * e + 1
        if bit:
            a, b = (a + a[source]) / 2, (e * b + (e + 1) * a[source]) / whole
        else:
            a, b = ((e + 1) * a + e * b[source]) / whole, (b + b[source]) / 2
        e = 2 * e + bit
    return a


@pytest.mark.parametrize("n", range(2, 101))
def test_two_buffers_on_ceca_are_exact_for_any_number_of_workers(n):
    sources = topology("ceca", n).sources[..., 0].numpy()
    assert len(sources) == math.ceil(math.log2(n))
    x = np.random.RandomState(n).standard_normal((n, 2))
    np.testing.assert_allclose(ceca_consensus(sources, x), np.tile(x.mean(0), (n, 1)), rtol=0, atol=1e-13)


def test_ceca_takes_three_rounds_for_five_workers():
    assert topology("ceca", 5).period == 3 < topology("base", 5).period


def curve(name, n=300, **options):
    """Mean of `‖x - x̄‖` after 20, 50 and 100 rounds over starts from seeds 0, 100, ..., 900."""
    made = topology(name, n, **options)
    x = torch.from_numpy(np.stack([np.random.RandomState(seed).randn(n) for seed in range(0, 1000, 100)], axis=1))
    found = []
    for t in range(100):
        sources, _, weights, *_ = made.round(t)
        heard = torch.where(sources < 0, torch.arange(n)[:, None], sources)
        x = weights[:, :1] * x + sum(weights[:, 1 + k, None] * x[heard[:, k]] for k in range(made.slots))
        if t + 1 in (20, 50, 100):
            found.append((x - x.mean(0)).norm(dim=0).mean().item())
    return found


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("static-exp", (7.447e-3, 8.770e-6, 1.252e-10)),
        ("one-peer-exp-directed", (3.345e-2, 9.451e-5, 1.027e-9)),
        ("static-ring", (4.792, 3.878, 3.301)),
    ],
)
def test_consensus_curves_of_deterministic_graphs_match_every_digit(name, published):
    assert curve(name) == pytest.approx(published, rel=6e-4)


def test_consensus_curve_of_ou_equidyn_has_the_published_order():
    for found, published in zip(curve("equitopo-ou-dyn"), (2.900e-2, 5.882e-6, 1.415e-12), strict=True):
        assert -1 < math.log10(found / published) < 1.5


def ou_contraction(n, eta=0.5):
    """E[(W - J)²] over all distances and starts, each round built as the paper tells it: greedily, worker by worker."""
    total = np.zeros((n, n))
    for a, start in itertools.product(range(1, n), range(n)):
        w = np.eye(n)
        for i in (np.arange(n) + start) % n:
            j = (i + a) % n
            if w[i, i] == w[j, j] == 1:
                w[i, i] = w[j, j] = 1 - eta * (n - 1) / n
                w[i, j] = w[j, i] = eta * (n - 1) / n
        total += (w - 1 / n) @ (w - 1 / n)
    return np.linalg.eigvalsh(total)[-1] / n / (n - 1)


def od_contraction(n, eta=0.5):
    w = eta * (n - 1) / n
    return (1 - w) ** 2 + w**2 - 2 * w * (1 - w) / (n - 1)


def one_of_two_rings(n):
    """Pairs (0 1)(2 3)... or (1 2)(3 4)..., each half of the time: E[WᵀW] = E[W] is the lazy ring I/2 + (R + Rᵀ)/4."""
    worker = torch.arange(n)

    def draw(t):
        shift = draws.integers(0, t, 0, (), 2)
        return pair_weights((((worker - shift) % n ^ 1) + shift) % n, 0.5)

    return from_draw("one of two", n, draw)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("made", "closed"),
    [
        *((topology("random-matching", n), 1 / 2 - 1 / (2 * (n - 1))) for n in (2, 4, 16, 50, 600)),
        *((topology("random-matching", n), 1 / 2) for n in (3, 15, 601)),  # one rests: each pair meets with 1/N
        *((topology("equitopo-od-dyn", n), od_contraction(n)) for n in (2, 16, 51, 600)),
        *((topology("equitopo-od-dyn", n, eta=0.9), od_contraction(n, 0.9)) for n in (5, 16)),
        *((topology("equitopo-ou-dyn", n), ou_contraction(n)) for n in (4, 9, 16)),
        *((one_of_two_rings(n), (1 + np.cos(2 * np.pi / n)) / 2) for n in (4, 8, 32)),
    ],
    ids=lambda value: f"{value.name}-{value.num_workers}" if hasattr(value, "name") else "",
)
def test_the_expected_contraction_of_a_random_schedule_is_that_of_its_closed_form(made, closed):
    # The standard error is at most 1/32, where a round takes all or nothing: for few workers.
    assert certificate(made).expected_contraction == pytest.approx(closed, abs=0.05 if made.num_workers <= 4 else 0.02)


def test_equitopo_static_gaps_have_the_published_size():
    directed = [1 - spectral_gap(topology("equitopo-d-static", 300, M=9, seed=seed)) for seed in range(5)]
    undirected = [1 - spectral_gap(topology("equitopo-u-static", 300, M=9, seed=seed)) for seed in range(5)]
    assert min(directed) - 0.02 < 0.7089 < max(directed) + 0.02
    assert min(undirected) - 0.02 < 0.6345 < max(undirected) + 0.02
    assert np.mean(undirected) < np.mean(directed) < 1 - spectral_gap(topology("static-exp", 300)) + 0.02
    assert spectral_gap(topology("static-exp", 300)) == pytest.approx(0.2)


def test_undirected_equitopo_is_the_directed_one_symmetrised():
    for n, seed in [(8, 3), (9, 1), (30, 0)]:
        w = mixing_matrix(topology("equitopo-d-static", n, M=5, seed=seed), 0)
        v = mixing_matrix(topology("equitopo-u-static", n, M=5, seed=seed), 0)
        torch.testing.assert_close(v, (w + w.T) / 2, rtol=0, atol=1e-14)


def groups_of(made, t):
    row = made.round(t).groups.tolist()
    found = {}
    for worker, group in enumerate(row):
        found.setdefault(group, []).append(worker)
    return sorted(found.values())


def test_groups_of_the_alternating_exponential_ring():
    made = alternating_exp_ring(4, local_world_size=2)
    assert [groups_of(made, t) for t in range(2)] == [[[0, 1], [2, 3]], [[0, 1, 2, 3]]]
    made = alternating_exp_ring(8, local_world_size=4)
    assert [groups_of(made, t) for t in range(2)] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [list(range(8))]]
    made = alternating_exp_ring(8, local_world_size=2)
    assert [groups_of(made, t) for t in range(4)] == [
        [[0, 1], [2, 3], [4, 5, 6, 7]],
        [[0, 1, 2, 3], [4, 5], [6, 7]],
        [[0, 1], [2, 3, 6, 7], [4, 5]],
        [[0, 1, 4, 5], [2, 3], [6, 7]],
    ]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("torus", lambda: nx.grid_2d_graph(4, 5, periodic=True)),
        ("grid", lambda: nx.grid_2d_graph(4, 5)),
        ("static-ring", lambda: nx.cycle_graph(20)),
        ("chain", lambda: nx.path_graph(20)),
        ("star", lambda: nx.star_graph(19)),
    ],
)
def test_families_are_the_graphs_of_networkx_with_metropolis_hastings_weights(name, made):
    reference = made()
    nodes = list(reference.nodes)
    want = np.zeros((20, 20))
    for a, b in reference.edges:
        i, j = nodes.index(a), nodes.index(b)
        want[i, j] = want[j, i] = 1 / (1 + max(reference.degree(a), reference.degree(b)))
    want += np.diag(1 - want.sum(1))
    np.testing.assert_allclose(mixing_matrix(topology(name, 20), 0), want, rtol=0, atol=1e-15)
    np.testing.assert_allclose(mixing_matrix(graph(20, graph=reference), 0), want, rtol=0, atol=1e-15)
    np.testing.assert_allclose(
        mixing_matrix(graph(20, graph=nx.to_numpy_array(reference)), 0), want, rtol=0, atol=1e-15
    )


@pytest.mark.parametrize(("n", "rows", "degree"), [(8, 2, 3), (10, 5, 3), (4, 2, 2), (7, 1, 2), (2, 1, 1)])
def test_short_sides_of_a_torus_are_single_edges(n, rows, degree):
    made = topology("torus", n, rows=rows)
    w = mixing_matrix(made, 0)
    assert ((w != 0).sum(1) == degree + 1).all() and made.degree == degree
    torch.testing.assert_close(w[w != 0], torch.full((n * (degree + 1),), 1 / (degree + 1)).double())


def test_binary_tree_joins_each_worker_to_its_half():
    w = mixing_matrix(topology("binary-tree", 8), 0)
    edges = {(j, i) for i in range(8) for j in range(i) if w[i, j]}
    assert edges == {(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)}
    assert w[0, 1] == 1 / 4 and w[2, 4] == 1 / 4
    mirror = mixing_matrix(topology("double-binary-tree", 8), 1)
    torch.testing.assert_close(mirror.flip(0, 1), w, rtol=0, atol=0)


def test_shift_one_shifts_the_upper_half():
    made = topology("shift-one", 6)
    assert [made.round(t).sources[:3, 0].tolist() for t in range(3)] == [[3, 4, 5], [4, 5, 3], [5, 3, 4]]
    assert [made.round(t).sources[3:, 0].tolist() for t in range(3)] == [[0, 1, 2], [2, 0, 1], [1, 2, 0]]


def test_random_matchings_pair_everyone_alike():
    made = topology("random-matching", 5, seed=3)
    counts = torch.zeros(5, 6)
    for t in range(2000):
        counts[torch.arange(5), made.round(t).sources[:, 0]] += 1
    assert ((counts[:, [0, 1, 2, 3, 4]] + torch.diag(counts[:, 5]) - 400).abs() < 5 * 18).all()
