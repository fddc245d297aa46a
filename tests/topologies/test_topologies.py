"""Laws that hold for every registered topology; adding a name adds the tests."""

import functools
import inspect
import itertools
import math
import re
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decentfn.comm import collectives
from decentfn.topologies import certificate, mixed, mixing_matrix, relabel, topology, topology_names
from tests.topologies import is_doubly_stochastic

NAMES = topology_names()
NEEDED = {
    "alternating-exp-ring": lambda n: {"local_world_size": 2 if n % 2 == 0 else 1},
    "graph": lambda n: {"graph": nx.star_graph(n - 1)},
    "hierarchical": lambda n: {"local_world_size": 3 if n % 3 == 0 else 1},
}
DIRECTED = {"ceca", "equitopo-d-static", "equitopo-od-dyn", "one-peer-exp-directed", "p-peer-exp", "static-exp"}
FINITE_TIME = {
    "alternating-exp-ring",
    "base",
    "complete",
    "hierarchical",
    "hyper-hypercube",
    "one-peer-exp",
    "one-peer-hypercube",
    "simple-base",
}
DEGREES = {
    "base": 1,
    "binary-tree": 3,
    "ceca": 1,
    "chain": 2,
    "complete": 1,  # a pair sends messages
    "double-binary-tree": 3,
    "equitopo-od-dyn": 1,
    "equitopo-ou-dyn": 1,
    "grid": 4,
    "hierarchical": 1,
    "hyper-hypercube": 1,
    "one-peer-exp": 1,
    "one-peer-exp-directed": 1,
    "one-peer-hypercube": 1,
    "p-peer-exp": 2,
    "random-matching": 1,
    "ring": 1,
    "shift-one": 1,
    "simple-base": 1,
    "static-ring": 2,
    "torus": 4,
}

DRAWN_ANEW = dict.fromkeys(["equitopo-od-dyn", "equitopo-ou-dyn", "random-matching"], [pytest.mark.thorough])
"""Each drawn round is another matrix, so they take as long as all others."""
TRIED = {1, 2, 3, 4, 5, 8, 13, 17, 24, 33}
"""Numbers of workers of those that are drawn anew."""
every_name = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"topology {name}"), *DRAWN_ANEW.get(name, [])])
        for name in NAMES
    ],
)
"""Cases of one name in one process, where its certificate is computed once."""
sizes = st.integers(1, 33)


@functools.cache
def make(name, n):
    """The topology of that name and size, or None where it does not exist or is not tried."""
    if name in DRAWN_ANEW and n not in TRIED:
        return None
    try:
        return topology(name, n, **NEEDED.get(name, lambda n: {})(n))
    except ValueError as error:
        function = name.replace("one-peer-hypercube", "one-peer-exp").replace("-", "_")
        assert str(error).startswith(f"{function}(num_workers={n}"), error
        return None


@functools.cache
def facts_of(made):
    return certificate(made)


def steps(made):
    return range(made.period if made.period is not None else 20)


def test_every_name_needs_a_number_of_workers_and_has_keyword_options():
    from decentfn.topologies import registry

    for name in NAMES:
        first, *options = inspect.signature(registry._registry[name]).parameters.values()
        assert first.name == "num_workers"
        assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)


@every_name
def test_one_worker_is_the_identity_of_period_one(name):
    alone = topology(name, 1, **NEEDED.get(name, lambda n: {})(1))
    assert (alone.period, alone.degree) == (1, 0)
    assert mixing_matrix(alone, 5).tolist() == [[1.0]]


@every_name
def test_names_exist_for_a_power_of_two(name):
    assert make(name, 8) is not None


@every_name
@given(n=sizes, t=st.integers(0, 10**6))
def test_every_round_is_doubly_stochastic(name, n, t):
    made = make(name, n)
    if made is None:
        return
    assert is_doubly_stochastic(mixing_matrix(made, t))


@every_name
@given(n=sizes)
def test_every_slot_is_a_permutation_and_undirected_ones_pair_up(name, n):
    made = make(name, n)
    if made is None:
        return
    for t in steps(made):
        sources, destinations, *_ = made.round(t)
        assert sources.shape == destinations.shape == (n, made.slots)
        for k in range(made.slots):
            me = torch.arange(n)
            heard, told = (torch.where(peers[:, k] < 0, me, peers[:, k]) for peers in (sources, destinations))
            assert torch.equal(heard[told], me) and torch.equal(told[heard], me)
            assert ((sources[:, k] < 0) == (destinations[:, k] < 0)).all()
            assert name in DIRECTED or torch.equal(heard, told)


@every_name
@given(n=sizes, seed=st.integers(0, 2**32 - 1))
def test_mixing_keeps_the_mean_and_consensus_and_contracts_disagreement(name, n, seed):
    made = make(name, n)
    if made is None:
        return
    start = x = np.random.RandomState(seed).standard_normal((n, 3))
    gap = facts_of(made).spectral_gap
    for t in steps(made):
        w = mixing_matrix(made, t).numpy()
        np.testing.assert_allclose(mixed(made, t, torch.from_numpy(x)), w @ x, rtol=0, atol=1e-12)
        assert np.abs(w @ np.ones(n) - 1).max() <= 1e-14 * n
        assert np.linalg.norm(w @ x - x.mean(0)) <= np.linalg.norm(x - x.mean(0)) * (1 + 1e-12)
        x = w @ x
    np.testing.assert_allclose(x.mean(0), start.mean(0), rtol=0, atol=1e-13)
    bound = 1.0 if gap is None else 1 - gap
    assert np.linalg.norm(x - x.mean(0)) <= (bound + 1e-12) * np.linalg.norm(start - start.mean(0))


@every_name
@given(n=sizes)
def test_certificates_say_what_the_matrices_say(name, n):
    made = make(name, n)
    if made is None:
        return
    facts = facts_of(made)
    matrices = [mixing_matrix(made, t).numpy() for t in steps(made)]
    assert facts.is_doubly_stochastic and facts.is_column_stochastic and facts.is_connected
    assert facts.is_symmetric == all(np.allclose(w, w.T, rtol=0, atol=1e-12) for w in matrices) or made.period is None
    assert (name in DIRECTED) or facts.is_symmetric
    if made.period is None:
        assert facts.steps_to_consensus is None and facts.spectral_gap is None
        assert facts.expected_contraction is not None and -1e-12 <= facts.expected_contraction < 1
        return
    assert facts.expected_contraction is None
    product, exact_after = np.eye(n), 0 if n == 1 else None
    for t, w in enumerate(matrices):
        product = w @ product
        if exact_after is None and np.abs(product - 1 / n).max() < 1e-13:
            exact_after = t + 1
    assert facts.spectral_gap == pytest.approx(1 - np.linalg.svd(product - 1 / n)[1][0], abs=1e-12)
    assert facts.steps_to_consensus == exact_after
    assert (exact_after is not None) or name not in FINITE_TIME


@every_name
@given(n=st.integers(2, 33))
def test_planned_degrees_and_bytes_are_what_travels(name, n):
    made = make(name, n)
    if made is None:
        return
    facts = facts_of(made)
    assert made.degree <= DEGREES.get(name, made.slots)
    rounds = [made.round(t) for t in (steps(made) if made.period else range(64))]
    messages = np.mean([(this.destinations >= 0).sum().item() / n for this in rounds])
    most = max((this.destinations >= 0).sum(1).max().item() for this in rounds)
    assert most == made.degree or (made.period is None and most <= made.degree)
    payloads = messages
    for this in rounds:
        if this.groups is not None:
            sizes_of = this.groups.bincount()
            payloads += sum(2 * (r - 1) / r * r for r in sizes_of.tolist() if r) / n / len(rounds)
    assert facts.messages_per_step == pytest.approx(messages, rel=1e-12)
    assert facts.bytes_per_step(1000) == pytest.approx(1000 * payloads, rel=1e-12)


@every_name
@given(n=st.integers(1, 17), seed=st.integers(0, 2**32 - 1), t=st.integers(0, 40))
def test_relabeling_moves_rows_and_columns(name, n, seed, t):
    made = make(name, n)
    if made is None:
        return
    order = np.random.RandomState(seed).permutation(n)
    moved = relabel(made, order.tolist())
    assert moved.period == made.period
    w, v = mixing_matrix(made, t), mixing_matrix(moved, t)
    torch.testing.assert_close(v[order][:, order], w, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["random-matching", "equitopo-od-dyn", "equitopo-ou-dyn"])
@example(n=2, seed=0)
@settings(max_examples=8)
@given(n=st.integers(2, 33), seed=st.integers(0, 2**32))
def test_random_rounds_are_functions_of_seed_and_step(name, n, seed):
    made, again, other = topology(name, n, seed=seed), topology(name, n, seed=seed), topology(name, n, seed=seed + 1)
    drawn = [made.round(t).sources for t in range(30)]
    assert all(torch.equal(made.round(t).sources, again.round(torch.tensor(t)).sources) for t in (29, 7, 0))
    if n > 4:
        assert any(not torch.equal(drawn[0], round_) for round_ in drawn)
        assert any(not torch.equal(drawn[t], other.round(t).sources) for t in range(30))


@pytest.mark.parametrize("name", ["random-matching", "equitopo-od-dyn", "equitopo-ou-dyn", "shift-one", "base"])
def test_compiled_code_looks_up_the_rounds_that_are_drawn(name):
    made = topology(name, 10)

    def row(x, t):
        row = collectives.look_up(x, made, t)
        return row.sources, row.weights

    compiled = torch.compile(torch.func.vmap(row, in_dims=(0, None)), fullgraph=True, backend="aot_eager")
    for t in (0, 1, 12345):
        sources, weights = compiled(torch.zeros(10, 1), torch.tensor(t))
        assert torch.equal(sources, made.round(t).sources)
        assert torch.equal(weights, made.round(t).weights)


TEMPLATES = [
    "README.md",
    "docs/getting_started.md",
    "docs/training_loop.md",
    "docs/checkpoints.md",
    "docs/large_models.md",
    "examples/digits.py",
    "examples/from_ddp/decent.py",
    "examples/resume_and_resize.py",
    "examples/train_lm.py",
    "examples/transformers_model.py",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_default_of_a_template_serves_a_run_that_lost_any_of_its_workers(template):
    root = Path(__file__).parents[2]
    [name] = set(re.findall(r'topology(?:\("|: str = ")([\w-]+)"', (root / template).read_text())) - {"complete"}
    for n in range(1, 18):
        assert certificate(topology(name, n)).steps_to_consensus is not None, n


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_base_of_a_power_of_two_is_one_peer_exp(n):
    base, pairs = topology("base", n), topology("one-peer-exp", n)
    assert torch.equal(base.sources, pairs.sources) and torch.equal(base.weights, pairs.weights)


@pytest.mark.parametrize(("n", "k"), [(12, 2), (12, 5), (24, 3), (36, 5), (48, 7), (64, 3)])
def test_a_hyper_hypercube_takes_the_fewest_rounds(n, k):
    lengths = itertools.count(1)
    several = (itertools.combinations_with_replacement(range(2, k + 2), rounds) for rounds in lengths)
    fewest = next(len(factors) for products in several for factors in products if math.prod(factors) == n)
    assert topology("hyper-hypercube", n, k=k).period == fewest
