"""A heterogeneous problem, random schedules and a driver, shared by the tests of algorithms against numpy loops."""

from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch

import decentfn as df
from decentfn.core import trees

DIM = 5
STEPS = 30


class Sgd:
    """u = -lr g, spelled out here so that the tests lean on no transform."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def init(self, params):
        return ()

    def update(self, grads, opt_state, params):
        return trees.map(lambda g: -self.lr * g, grads), opt_state


class Problem(NamedTuple):
    """f_i(x) = ½‖A_i x - b_i‖², every worker with a start and a minimum of its own."""

    A: np.ndarray  # [N, 4, DIM]
    b: np.ndarray  # [N, 4]
    start: np.ndarray  # [N, DIM]

    def gradients(self, x: np.ndarray) -> np.ndarray:
        residual = np.einsum("nij,nj->ni", self.A, x) - self.b
        return np.einsum("nij,ni->nj", self.A, residual)


def problem(num_workers: int, seed: int = 0, *, starts_equal: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(num_workers, 4, DIM)) / 2
    b, start = rng.normal(size=(num_workers, 4)), rng.normal(size=(num_workers, DIM))
    return Problem(A, b, np.tile(start[:1], (num_workers, 1)) if starts_equal else start)


def loss(params, batch):
    A, b = batch
    x = torch.cat([params["head"].reshape(-1), params["tail"]])
    return ((A @ x - b) ** 2).sum() / 2


def start(algorithm: Any, given: Problem) -> Any:
    """The stacked state from every worker's own start."""
    states = [
        algorithm.init({"head": torch.tensor(x[:2]).view(2, 1), "tail": torch.tensor(x[2:])}) for x in given.start
    ]
    return trees.map(lambda *leaves: torch.stack(leaves), *states)


def batch(given: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(given.A), torch.tensor(given.b)


def flat(buckets: Any) -> np.ndarray:
    """Stacked buckets as `[N, DIM]`, in the order of the numpy loops."""
    tree = buckets.tree()
    return torch.cat([tree["head"].flatten(1), tree["tail"]], 1).numpy().copy()


def states(algorithm: Any, given: Problem, steps: int = STEPS) -> list[Any]:
    """The states before and after every step, simulated."""
    step = df.simulate(algorithm.step, len(given.start))
    history = [start(algorithm, given)]
    for t in range(steps):
        history.append(step(history[-1], batch(given), t)[0])
    return history


def run(algorithm: Any, given: Problem, steps: int = STEPS) -> np.ndarray:
    """The parameters before and after every step, `[steps + 1, N, DIM]`."""
    return np.stack([flat(state.params) for state in states(algorithm, given, steps)])


def build(function: Any, given: Problem, matrices: np.ndarray, lr: float = 0.1, **options: Any) -> Any:
    """The algorithm on a schedule given by its matrices; a bucket for each leaf."""
    column = not np.allclose(matrices.sum(-1), 1)
    topology = df.topologies.from_matrices("given", matrices, needs_push_sum=column)
    return function(loss, Sgd(lr), topology, bucket_mb=1e-9, **options)


# -- schedules, as [P, N, N] ------------------------------------------------------------------------------------------


def static_ring(n: int) -> np.ndarray:
    eye = np.eye(n)
    return ((eye + np.roll(eye, 1, 0) + np.roll(eye, -1, 0)) / 3)[None]


def metropolis_hastings(graph: nx.Graph) -> np.ndarray:
    n = graph.number_of_nodes()
    W = np.zeros((n, n))
    for i, j in graph.edges:
        W[i, j] = W[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    return W + np.diag(1 - W.sum(1))


def random_graph(n: int, seed: int) -> nx.Graph:
    """Connected, undirected: a random tree and a few links more."""
    rng = np.random.default_rng(seed)
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((i, int(rng.integers(i))) for i in range(1, n))
    graph.add_edges_from((i, j) for i in range(n) for j in range(i) if rng.random() < 0.2)
    return graph


def random_symmetric(n: int, period: int, seed: int) -> np.ndarray:
    return np.stack([metropolis_hastings(random_graph(n, seed + 1000 * p)) for p in range(period)])


def random_column_stochastic(n: int, period: int, seed: int) -> np.ndarray:
    """Every worker splits what it has unequally between itself, its right neighbor and some others."""
    rng = np.random.default_rng(seed)
    A = rng.random((period, n, n)) * (rng.random((period, n, n)) < 0.3)
    A += np.eye(n) * (0.2 + rng.random((period, 1, n))) + np.roll(np.eye(n), 1, 0) * 0.5
    return A / A.sum(1, keepdims=True)
