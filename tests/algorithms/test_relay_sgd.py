"""RelaySGD against a loop that passes messages along the edges of a tree, counts included."""

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.algorithms.all_reduce import all_reduce
from decentfn.algorithms.relay_sgd import relay_counts, relay_sgd
from tests.quadratics import (
    STEPS,
    Sgd,
    build,
    loss,
    metropolis_hastings,
    problem,
    random_graph,
    run,
    static_ring,
)

LR = 0.1


def random_tree(n, seed):
    rng = np.random.default_rng(seed)
    tree = nx.Graph()
    tree.add_nodes_from(range(n))
    tree.add_edges_from((i, int(rng.integers(i))) for i in range(1, n))
    return tree


def matrices_of(tree):
    return metropolis_hastings(tree)[None]


def relay_loop(p, tree, relay):
    """Messages and counts in dictionaries keyed by (from, to)."""
    n = len(p.start)
    links = [(i, j) for i, j in tree.edges] + [(j, i) for i, j in tree.edges]
    message, count = {link: np.zeros(p.start.shape[1]) for link in links}, dict.fromkeys(links, 0)
    x, xs, counts = p.start, [p.start], []
    for _ in range(STEPS):
        g = p.gradients(x)
        own = x - LR * g if relay == "models" else g
        message = {
            (i, j): own[i] + sum((message[k, i] for k in tree[i] if k != j), np.zeros(p.start.shape[1]))
            for i, j in links
        }
        count = {(i, j): 1 + sum(count[k, i] for k in tree[i] if k != j) for i, j in links}
        heard = np.stack([sum((message[j, i] for j in tree[i]), np.zeros(p.start.shape[1])) for i in range(n)])
        reached = np.array([sum(count[j, i] for j in tree[i]) for i in range(n)])
        relayed = (own + heard + (n - 1 - reached)[:, None] * p.start) / n
        x = relayed if relay == "models" else x - LR * (g + heard) / n
        xs.append(x)
        counts.append(reached)
    return np.stack(xs), np.stack(counts)


@pytest.mark.parametrize("relay", ["models", "gradients"])
@pytest.mark.parametrize(
    "tree",
    [nx.path_graph(6), nx.star_graph(4), nx.balanced_tree(2, 2), random_tree(7, 3)],
    ids=["chain", "star", "binary", "random"],
)
def test_relay_sgd_follows_its_equation(tree, relay):
    p = problem(tree.number_of_nodes(), starts_equal=relay == "gradients")
    simulated = run(build(relay_sgd, p, matrices_of(tree), LR, relay=relay), p)
    np.testing.assert_allclose(simulated, relay_loop(p, tree, relay)[0], rtol=0, atol=1e-10)


@given(n=st.integers(1, 12), seed=st.integers(0, 999))
def test_relay_counts_are_those_that_would_travel_and_reach_everyone(n, seed):
    tree = random_tree(n, seed)
    counts = relay_counts(df.topologies.from_matrices("tree", matrices_of(tree)))
    assert counts.shape[0] == max(1, nx.diameter(tree))
    assert (counts[-1] + 1 == n).all()
    expected = relay_loop(problem(n), tree, "models")[1]
    for t in range(STEPS):
        np.testing.assert_array_equal(counts[min(t, len(counts) - 1)], expected[t])


@given(n=st.integers(2, 8), seed=st.integers(0, 999))
def test_without_gradients_relaying_averages_exactly_after_the_diameter(n, seed):
    """With η = 0 each worker repeats its start; once all have been heard, everyone holds the mean of what they sent."""
    p, tree = problem(n, seed), random_tree(n, seed)
    relayed = run(build(relay_sgd, p, matrices_of(tree), 0.0), p, steps=1)
    one_hop = [
        (p.start[i] + sum(p.start[j] for j in tree[i]) + (n - 1 - len(tree[i])) * p.start[i]) / n for i in range(n)
    ]
    np.testing.assert_allclose(relayed[1], one_hop, rtol=0, atol=1e-13)


def test_on_two_workers_relayed_gradients_are_all_reduce():
    p = problem(2, starts_equal=True)
    pair = np.full((1, 2, 2), 0.5)
    np.testing.assert_allclose(
        run(build(relay_sgd, p, pair, LR, relay="gradients"), p),
        run(build(all_reduce, p, pair, LR), p),
        rtol=0,
        atol=1e-13,
    )


def test_the_weights_of_the_tree_do_not_matter():
    p, tree = problem(5), nx.path_graph(5)
    other = (np.eye(5) + matrices_of(tree)) / 2
    assert np.array_equal(run(build(relay_sgd, p, matrices_of(tree), LR), p), run(build(relay_sgd, p, other, LR), p))


def test_the_start_of_the_run_is_counted_in_the_state_not_by_t():
    p, matrices = problem(5), matrices_of(nx.path_graph(5))
    algorithm = build(relay_sgd, p, matrices, LR)
    late = algorithm._replace(step=lambda state, batch, t: algorithm.step(state, batch, t + 1000))
    assert np.array_equal(run(algorithm, p), run(late, p))


def test_sixteen_bit_models_are_relayed_in_float32_and_gradients_as_narrow_as_asked():
    chain = df.topologies.from_matrices("chain", matrices_of(nx.path_graph(3)))
    state = relay_sgd(loss, Sgd(LR), chain).init({"a": torch.ones(3, dtype=torch.bfloat16)})
    assert state.memory.messages[0].dtype == torch.float32 and state.params[0].dtype == torch.bfloat16
    p = problem(3, starts_equal=True)
    matrices = matrices_of(nx.path_graph(3))
    exact = run(build(relay_sgd, p, matrices, LR, relay="gradients"), p)
    rounded = run(build(relay_sgd, p, matrices, LR, relay="gradients", wire_dtype=torch.bfloat16), p)
    assert 0 < np.abs(exact - rounded).max() < 0.05


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrices", "rule"),
    [
        (static_ring(5), "5 workers by 5 links, but a tree has 4"),
        (np.stack([metropolis_hastings(random_graph(4, s)) for s in (0, 1)]), "not one static graph"),
        ((np.eye(4) + np.roll(np.eye(4), 1, 0))[None] / 2, "directed links"),
        (metropolis_hastings(nx.Graph([(0, 1), (1, 2), (2, 0), (3, 4)]))[None], "has a cycle and is not connected"),
    ],
)
def test_what_is_no_tree_is_refused(matrices, rule):
    with pytest.raises(ValueError, match=f"relay_sgd: .*{rule}.*chain"):
        build(relay_sgd, problem(matrices.shape[-1]), matrices)


def test_averages_in_groups_are_no_tree():
    with pytest.raises(ValueError, match="not one static graph of messages"):
        relay_sgd(loss, Sgd(LR), df.topology("complete", 4))


def test_unknown_relays_and_narrow_models_are_refused():
    p, chain = problem(3), matrices_of(nx.path_graph(3))
    with pytest.raises(ValueError, match="choose 'models' or 'gradients'"):
        build(relay_sgd, p, chain, relay="x")
    with pytest.raises(ValueError, match="relay='gradients'"):
        build(relay_sgd, p, chain, wire_dtype=torch.bfloat16)
