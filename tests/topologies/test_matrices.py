"""Facts about mixing matrices and their decomposition into weighted permutations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentfn.topologies import matrices

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


@given(left=st.integers(1, 9), right=st.integers(1, 9), density=st.floats(0, 1), seed=seeds)
def test_bipartite_graphs_take_as_many_colours_as_the_largest_degree(left, right, density, seed):
    u, v = np.nonzero(np.random.RandomState(seed).rand(left, right) < density)
    colours = matrices.edge_colours(u, v + left, left + right)
    degree = np.bincount(np.concatenate([u, v + left]), minlength=1).max(initial=0)
    assert colours.max(initial=-1) + 1 == degree
    for ends in (u, v):
        assert len(set(zip(ends.tolist(), colours.tolist(), strict=True))) == len(u)


def test_complete_graphs_are_coloured():
    for n in (4, 5, 8, 9, 21):
        u, v = np.triu_indices(n, 1)
        colours = matrices.edge_colours(u, v, n)
        pairs = [*zip(u.tolist(), colours.tolist(), strict=True), *zip(v.tolist(), colours.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)
        assert colours.max() + 1 <= 1.2 * n


def test_contraction_is_the_second_singular_value():
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]], dtype=torch.float64)
    assert matrices.contraction(matrix) == pytest.approx(np.linalg.svd(matrix.numpy())[1][1], abs=1e-15)
    assert matrices.spectral_gap(torch.full((4, 4), 0.25, dtype=torch.float64)) == pytest.approx(1.0, abs=1e-15)


def test_doubly_stochastic_means_rows_columns_and_signs():
    ring = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    assert matrices.is_doubly_stochastic(ring)
    assert not matrices.is_doubly_stochastic(torch.tensor([[1.5, -0.5], [-0.5, 1.5]], dtype=torch.float64))
    assert not matrices.is_doubly_stochastic(torch.tensor([[0.5, 0.5], [0.4, 0.6]], dtype=torch.float64))


def test_connection_follows_directions():
    u, v = np.array([0, 1, 2]), np.array([1, 2, 3])
    assert matrices.reaches_everyone(u, v, 4)
    assert not matrices.reaches_everyone(v, u, 4)
    assert matrices.is_connected(v, u, 4)
    assert not matrices.is_connected(u[:2], v[:2], 4)
