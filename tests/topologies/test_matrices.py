"""Facts about mixing matrices and their decomposition into weighted permutations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.testing import on_ranks
from decentfn.topologies import certificate, from_matrices, matrices

seeds = st.integers(0, 2**32 - 1)


def rebuilt(sources, weights):
    n = len(sources)
    matrix = np.diag(weights[:, 0])
    for k in range(sources.shape[1]):
        np.add.at(matrix, (np.arange(n), sources[:, k]), weights[:, 1 + k])
    return matrix


@given(n=st.integers(1, 12), density=st.floats(0, 1), is_symmetric=st.booleans(), seed=seeds)
def test_weighted_permutations_rebuild_the_matrix(n, density, is_symmetric, seed):
    random = np.random.RandomState(seed)
    matrix = random.rand(n, n) * (random.rand(n, n) < density)
    matrix = matrix + matrix.T if is_symmetric else matrix
    sources, weights = matrices.weighted_permutations(matrix)
    assert np.array_equal(rebuilt(sources, weights), matrix)
    assert np.array_equal(np.sort(sources, 0), np.tile(np.arange(n)[:, None], (1, sources.shape[1])))
    links = (matrix != 0) & ~np.eye(n, dtype=bool)
    degree = max(links.sum(0).max(initial=0), links.sum(1).max(initial=0))
    if is_symmetric:
        assert sources.shape[1] <= degree + 2
        for k in range(sources.shape[1]):
            assert np.array_equal(sources[sources[:, k], k], np.arange(n))
    else:
        assert sources.shape[1] <= degree or (links == links.T).all()


@given(n=st.integers(2, 9), density=st.floats(0, 1), seed=seeds)
def test_one_way_links_carry_as_many_messages_as_the_matrix_has_entries(n, density, seed):
    """The links that complete a slot's permutation have weight 0 and carry none."""
    links = (
        (np.random.RandomState(seed).rand(n, n) < density)
        | np.eye(n, k=1, dtype=bool)
        | np.eye(n, k=-(n - 1), dtype=bool)
    )
    np.fill_diagonal(links, True)
    made = from_matrices("one way", links / links.sum(0), needs_push_sum=True)
    others = links & ~np.eye(n, dtype=bool)
    assert made.degree == others.sum(0).max()
    assert certificate(made).messages_per_step * n == pytest.approx(others.sum())
    this = made.round(0)
    assert (this.sources >= 0).sum(1).tolist() == others.sum(1).tolist()
    assert (this.destinations >= 0).sum(1).tolist() == others.sum(0).tolist()


def test_ranks_send_on_one_way_links_in_one_direction():
    made = from_matrices("there and back", [[[0.5, 0], [0.5, 1]], [[1, 0.5], [0, 0.5]]], needs_push_sum=True)
    algorithm = df.stochastic_gradient_push(lambda x, batch: (x * batch).sum(), df.sgd(0.1), made)

    def train(step, state, batch):
        with df.profiling.communication() as counted:
            for t in range(2):
                state, _ = step(state, batch, t)
        return df.params(state).tolist(), counted.messages

    state, batches = algorithm.init(torch.zeros(2)), torch.tensor([[1.0] * 2, [2.0] * 2])
    together, _ = train(df.simulate(algorithm.step, 2), df.stack(state, 2), batches)
    ranks = on_ranks(2, lambda rank: train(algorithm.step, algorithm.init(torch.zeros(2)), batches[rank]))
    assert ranks == [(own, 1) for own in together]


@given(left=st.integers(1, 9), right=st.integers(1, 9), density=st.floats(0, 1), seed=seeds)
def test_bipartite_graphs_take_as_many_colors_as_the_largest_degree(left, right, density, seed):
    u, v = np.nonzero(np.random.RandomState(seed).rand(left, right) < density)
    colors = matrices.edge_colors(u, v + left, left + right)
    degree = np.bincount(np.concatenate([u, v + left]), minlength=1).max(initial=0)
    assert colors.max(initial=-1) + 1 == degree
    for ends in (u, v):
        assert len(set(zip(ends.tolist(), colors.tolist(), strict=True))) == len(u)


def test_complete_graphs_are_colored():
    for n in (4, 5, 8, 9, 21):
        u, v = np.triu_indices(n, 1)
        colors = matrices.edge_colors(u, v, n)
        pairs = [*zip(u.tolist(), colors.tolist(), strict=True), *zip(v.tolist(), colors.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)
        assert colors.max() + 1 <= 1.2 * n


def test_connection_follows_directions():
    u, v = np.array([0, 1, 2]), np.array([1, 2, 3])
    assert not matrices.is_connected(u, v, 4)
    assert matrices.is_connected(np.append(u, 3), np.append(v, 0), 4)
    assert matrices.is_connected(np.append(u, v), np.append(v, u), 4)
    assert not matrices.is_connected(np.append(u[:2], v[:2]), np.append(v[:2], u[:2]), 4)
