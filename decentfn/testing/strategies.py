"""Hypothesis strategies for trees of parameters, schedules and matrices: small by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentfn.core.buckets import Buckets, flatten
from decentfn.topologies import Topology, from_matrices, topology

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise ImportError("decentfn.testing.strategies needs hypothesis: pip install 'decentfn[testing]'.") from missing

_NAMES = (
    *("complete", "ring", "one-peer-exp", "one-peer-exp-directed"),
    *("static-exp", "static-ring", "base", "random-matching"),
)


def num_workers(min_value: int = 1, max_value: int = 9) -> st.SearchStrategy[int]:
    """Numbers of workers."""
    return st.integers(min_value, max_value)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of random numbers."""
    return st.integers(0, 2**31 - 1)


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> st.SearchStrategy[Tensor]:
    """Tensors of normal numbers, drawn by a seed: hypothesis shrinks the shape and the seed, not each float."""
    return seeds().map(lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


@st.composite
def param_trees(
    draw: Any, *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64), max_leaves: int = 5
) -> Any:
    """Dicts of one to five tensors with up to three axes of 1 to 4, including scalars."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=max_leaves))
    return {f"leaf{i}": draw(tensors(shape, draw(st.sampled_from(dtypes)))) for i, shape in enumerate(shapes)}


def buckets(*, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> st.SearchStrategy[Buckets]:
    """Parameters in buckets of all sizes, from one per leaf to one per dtype."""
    sizes = st.sampled_from([1e-9, 1e-4, 25.0])
    return st.builds(lambda tree, mb: flatten(tree, bucket_mb=mb), param_trees(dtypes=dtypes), sizes)


@st.composite
def mixing_matrices(draw: Any, workers: st.SearchStrategy[int] | None = None, *, doubly: bool = True) -> np.ndarray:
    """Matrices `[N, N]` float64 whose columns (and, if `doubly`, rows) sum to 1, made of permutations and a ring."""
    n = draw(num_workers(2) if workers is None else workers)
    rng = np.random.default_rng(draw(seeds()))
    terms = draw(st.integers(1, 3))
    shares = rng.dirichlet(np.ones(terms + 2))
    matrix = shares[0] * np.eye(n) + shares[1] * np.roll(np.eye(n), 1, 0)
    for share in shares[2:]:
        matrix += share * np.eye(n)[rng.permutation(n)]
    if not doubly:
        matrix *= rng.uniform(0.5, 1.5, (n, 1))
        matrix /= matrix.sum(0)
    return matrix


@st.composite
def topologies(draw: Any, workers: st.SearchStrategy[int] | None = None) -> Topology:
    """Doubly stochastic schedules: registered ones at valid sizes, or of random matrices."""
    n = draw(num_workers() if workers is None else workers)
    rounds = draw(st.integers(1, 3))
    own = st.lists(mixing_matrices(st.just(n)), min_size=rounds, max_size=rounds)
    matrices = own.map(lambda rows: from_matrices("drawn", np.stack(rows))) if n > 1 else st.nothing()
    return draw(
        st.sampled_from([name for name in _NAMES if _exists(name, n)]).map(lambda name: topology(name, n)) | matrices
    )


def _exists(name: str, n: int) -> bool:
    try:
        return topology(name, n) is not None
    except ValueError:
        return False
