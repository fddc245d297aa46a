"""Schedules of workers that are left, or of more: laws over every registered name and every loss of up to half of the workers."""

import functools
import itertools
import pickle

import networkx as nx
import pytest
import torch

import decentfn as df
from decentfn import topologies
from decentfn.comm.gossip.compressed import all_to_all
from decentfn.topologies import certificate, mixing_matrix, registry, topology, topology_names
from decentfn.topologies.resized import enlarged, in_place
from decentfn.topologies.rounds import demanding
from tests.topologies import is_doubly_stochastic
from tests.topologies.test_topologies import make

NAMES = topology_names()


@functools.cache
def facts(name, n, case, num_workers, lost):
    made = make(name, n)
    return certificate((made.resized(num_workers) if lost is None else made.without(lost)).topology)


@functools.cache
def is_exact(made):
    return certificate(made).steps_to_consensus is not None


def assert_as_promised(made, result, found):
    assert found.num_workers == result.topology.num_workers
    assert found.is_connected and found.is_doubly_stochastic
    if result.case != "same family" and is_exact(made):
        assert found.steps_to_consensus is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "n", [2, 4, 5, pytest.param(6, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.slow)]
)
def test_whoever_is_lost_the_others_schedule_keeps_its_promises(name, n):
    made = make(name, n)
    if made is None:
        return
    for count in range(1, n // 2 + 1):
        for lost in itertools.combinations(range(n), count):
            result = made.without(lost)
            depends = lost if result.case == "own weights" else tuple(range(count))
            found = facts(name, n, result.case, n - count, depends)
            assert_as_promised(made, result, found)
            if result.case == "same family":
                break  # whoever is lost
            if result.case == "own weights":
                kept = [worker for worker in range(n) if worker not in lost]
                off_diagonal = 1 - torch.eye(n - count, dtype=torch.float64)
                for t in range(made.period):
                    before, after = mixing_matrix(made, t)[kept][:, kept], mixing_matrix(result.topology, t)
                    assert torch.allclose(before * off_diagonal, after * off_diagonal, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_workers", [1, 3, 5, *(pytest.param(n, marks=pytest.mark.thorough) for n in (6, 9))])
def test_the_schedule_of_another_number_keeps_its_promises(name, num_workers):
    made = make(name, 4)
    result = made.resized(num_workers)
    assert_as_promised(made, result, facts(name, 4, result.case, num_workers, None))


def test_a_family_keeps_its_options_and_a_copy_its_family():
    made = topology("base", 8, k=3)
    for one in (made, pickle.loads(pickle.dumps(made))):
        left, case, *_ = one.without([1, 7])
        expected = topology("base", 6, k=3)
        assert case == "same family" and torch.equal(left.weights, expected.weights)
    assert made.without([]).topology is made.resized(8).topology is made


def test_links_stay_where_the_schedule_is_the_users_own():
    star = df.topologies.graph(5, graph=nx.cycle_graph(5))
    left = star.without([0])
    assert left.case == "own weights" and is_doubly_stochastic(mixing_matrix(left.topology, 0))
    assert (mixing_matrix(left.topology, 0) != 0).sum() == 4 + 2 * 3  # a chain
    hub = df.topologies.graph(5, graph=nx.star_graph(4))
    assert hub.without([1]).case == "own weights" and hub.without([0]).case == "another family"


def test_of_a_schedule_for_push_sum_columns_still_sum_to_one():
    matrix = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    matrix = torch.block_diag(matrix, torch.ones(1, 1, dtype=torch.float64))
    matrix[3, 0], matrix[0, 0], matrix[0, 3], matrix[3, 3] = 0.25, 0.25, 0.5, 0.5
    made = df.topologies.from_matrices("own", matrix, needs_push_sum=True)
    left = made.without([3])
    after = mixing_matrix(left.topology, 0)
    assert left.case == "own weights" and left.topology.needs_push_sum
    assert torch.equal(after.sum(0), torch.ones(3, dtype=torch.float64)) and left.certificate.is_connected


def test_a_combination_is_combined_anew_of_its_parts():
    complete, path = topologies.complete(8), topologies.graph(8, graph=nx.path_graph(8))
    combinations = [
        (lambda a, b: topologies.every(4, a), "same family"),
        (lambda a, b: topologies.later(3, topologies.every(2, a)), "same family"),
        (lambda a, b: topologies.alternate(a, topologies.idle(a.num_workers)), "same family"),
        (topologies.alternate, "own weights"),
        (lambda a, b: topologies.until(5, b, a), "own weights"),
    ]
    for combine, case in combinations:
        made = combine(complete, path)
        left, grown = made.without([7]), made.resized(9)
        assert left.case == case and grown.case == case.replace("own weights", "another family")
        expected = combine(complete.without([7]).topology, path.without([7]).topology)
        larger = combine(topologies.complete(9), topology("base", 9))
        for t in range(12):
            assert torch.equal(mixing_matrix(left.topology, t), mixing_matrix(expected, t))
            assert torch.equal(mixing_matrix(grown.topology, t), mixing_matrix(larger, t))
    pair = topologies.lossy(topologies.complete(2), 0.5)
    assert pair.resized(3).topology.name == "base"  # a group average has no links to lose


@pytest.mark.parametrize(
    "call",
    [lambda x: x.without([4]), lambda x: x.without([1, 1]), lambda x: x.without(range(4)), lambda x: x.resized(0)],
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(ValueError, match=r"(without|resized)\("):
        call(topology("base", 4))


def test_an_option_given_by_position_stays(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @df.topologies.register_topology("shifted")
    def shifted(num_workers, shift=1):
        return df.topologies.from_shifts("shifted", [{shift: 0.5}], num_workers)

    for made in (shifted(5, 2), shifted(5, shift=2)):
        assert torch.equal(made.resized(7).topology.sources, shifted(7, 2).sources)


@pytest.mark.parametrize("returned", [topology("ring", 6), None])
def test_a_registered_function_returns_a_topology_of_the_size_it_was_asked_for(monkeypatch, returned):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    df.topologies.register_topology("mine")(lambda num_workers: returned)
    with pytest.raises(ValueError, match=r"topology\('mine', 5\): the function returned .*num_workers=5"):
        df.topology("mine", 5)


@pytest.mark.parametrize("name", [name for name in NAMES if "dyn" not in name])
def test_in_place_a_schedule_keeps_its_form(name):
    for n in (4, 5):
        if (made := make(name, n)) is None:
            continue
        for lost in ([0], [1, 2], range(1, n)):
            left = in_place(made, lost)
            assert (left.num_workers, left.slots, left.has_groups) == (n - len(lost), made.slots, made.has_groups)
            assert left.period == 1 or made.period != 1
            for t in range(min(left.period or 4, 4)):
                w = mixing_matrix(left, t)
                assert is_doubly_stochastic(w) or made.needs_push_sum
            assert left.num_workers == 1 or certificate(left).is_connected


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("one-peer-exp", "own of 4"),
        ("hypercube", "static-ring"),
        ("ring", "base"),
        ("ring", "lazy"),
        ("ring", "line"),
        ("complete", "complete"),
    ],
)
def test_in_place_the_first_schedule_that_the_algorithm_accepts_is_found(name, accepted):
    """Of someone's own schedule, which has no family."""
    n = 4 if name == "one-peer-exp" else 6 if name == "ring" else 8
    made = make(name, n)
    if accepted != "complete":
        made = topologies.from_matrices("own", [mixing_matrix(made, t) for t in range(made.period)])

    def suits(other):
        if not other.name.startswith(accepted):
            raise ValueError

    assert in_place(demanding(made, suits), [0]).name.startswith(accepted)


def test_in_place_a_combination_is_made_of_its_parts():
    mixes = topologies.every(3, df.topology("one-peer-exp", 4))
    late = topologies.later(1, mixes)
    left = in_place(late, [2])
    assert [left.round(t).is_active for t in range(5)] == [False, True, False, False, True]
    for t in range(9):
        expected = torch.eye(3, dtype=torch.float64)
        if t % 3 == 1:
            expected = mixing_matrix(in_place(df.topology("one-peer-exp", 4), [2]), t // 3)
        assert torch.equal(mixing_matrix(left, t), expected)
    assert pickle.loads(pickle.dumps(mixes)).made_from.args[0] == 3
    rests = in_place(topologies.alternate(topologies.ring(4), topologies.idle(4)), [2])
    assert [rests.round(t).is_active for t in range(4)] == [True, False] * 2


@pytest.mark.parametrize(
    "name", ["base", "static-ring", "one-peer-exp-directed", "complete", "static-exp", "random-matching"]
)
@pytest.mark.parametrize("n", [3, 6])
def test_enlarged_a_schedule_keeps_its_form(name, n):
    made = df.topology(name, n)
    grown = enlarged(made, n + 1)
    assert (grown.num_workers, grown.slots, grown.has_groups) == (n + 1, made.slots, made.has_groups)
    assert (grown.period == 1) >= (made.period == 1) and certificate(grown).is_connected
    rounds = [mixing_matrix(grown, t) for t in range(4)]
    assert all(is_doubly_stochastic(w) for w in rounds)
    if certificate(made).is_symmetric:
        assert all(torch.allclose(w, w.T, rtol=0, atol=1e-12) for w in rounds)
    half = enlarged(topologies.every(2, made), n + 1)
    for t in range(4):
        expected = torch.eye(n + 1).double() if t % 2 else mixing_matrix(grown, t // 2)
        assert torch.equal(mixing_matrix(half, t), expected)


def test_an_algorithms_own_mean_of_all_stays_one_or_cannot_grow():
    for mean in (all_to_all(4), topologies.every(3, all_to_all(4))):
        with pytest.raises(ValueError, match="mean of all .* no form for 5 workers"):
            enlarged(mean, 5)


def test_a_static_schedule_of_two_cannot_grow_in_its_form():
    with pytest.raises(ValueError, match="no schedule of 3 workers fits"):
        enlarged(df.topology("base", 2), 3)
