"""Schedules made of schedules, certificates in particular cases, construction errors, and 4,096 workers."""

import copy
import dataclasses
import gc
import pickle

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn.comm import collectives
from decentfn.planning import Cluster, Link
from decentfn.planning.methods import of_schedule
from decentfn.topologies import (
    Edge,
    Round,
    alternate,
    alternating_exp_ring,
    certificate,
    complete,
    consensus_steps,
    every,
    from_draw,
    from_edges,
    from_groups,
    from_matrices,
    from_permutations,
    from_rounds,
    from_shifts,
    graph,
    hierarchical,
    later,
    mixing_matrix,
    nth_round,
    paused,
    pga,
    relabel,
    ring,
    spectral_gap,
    topology,
    topology_names,
)
from tests.topologies import is_doubly_stochastic

N = 8
PARTS = {
    "messages": lambda: ring(N),
    "groups": lambda: alternating_exp_ring(N, local_world_size=2),
    "draws": lambda: topology("random-matching", N, seed=5),
    "pairs of draws": lambda: alternate(topology("equitopo-od-dyn", N), complete(N)),
    "many slots": lambda: topology("hypercube", N),
}
parts = st.sampled_from(sorted(PARTS)).map(lambda name: PARTS[name]())
hours = st.integers(1, 5)
some_steps = st.integers(0, 200)


def same(made, t, want):
    w = mixing_matrix(made, t)
    torch.testing.assert_close(w, want, rtol=0, atol=1e-15)
    assert is_doubly_stochastic(w)
    if made.groups is not None:  # process groups are made for these
        assert (made.groups == made.round(t).groups).all(1).any()


@given(part=parts, H=hours, t=some_steps)
def test_every_mixes_when_H_divides_t_and_goes_through_all_rounds(part, H, t):
    made = every(H, part)
    same(made, t, torch.eye(N).double() if t % H else mixing_matrix(part, t // H))
    assert made.period == (None if part.period is None else H * part.period)


@given(chosen=st.lists(parts, min_size=1, max_size=3), t=some_steps)
def test_alternate_takes_turns(chosen, t):
    same(alternate(*chosen), t, mixing_matrix(chosen[t % len(chosen)], t // len(chosen)))


@given(part=parts, H=hours, t=some_steps)
def test_pga_averages_globally_when_H_divides_t(part, H, t):
    same(pga(H, part), t, mixing_matrix(part, t) if t % H else torch.full((N, N), 1 / N).double())


@given(part=parts, t=some_steps, seed=st.integers(0, 1000))
def test_relabel_works_for_every_kind_of_round(part, t, seed):
    order = np.random.RandomState(seed).permutation(N).tolist()
    v = mixing_matrix(relabel(part, order), t)
    torch.testing.assert_close(v[order][:, order], mixing_matrix(part, t), rtol=0, atol=0)


@given(part=parts, keep=st.sampled_from([0.0, 0.25, 0.5, 0.9]), t=some_steps)
def test_lazy_keeps_a_share_of_the_own_parameters(part, keep, t):
    made = df.topologies.lazy(part, keep)
    same(made, t, keep * torch.eye(N).double() + (1 - keep) * mixing_matrix(part, t))
    assert made.period == part.period


def test_half_lazy_matrices_have_no_negative_eigenvalue():
    assert torch.linalg.eigvalsh(mixing_matrix(topology("static-ring", N), 0)).min() < -0.1
    made = df.topologies.lazy(topology("static-ring", N))
    assert torch.linalg.eigvalsh(mixing_matrix(made, 0)).min() > -1e-12
    assert (
        df.topologies.lazy(topology("one-peer-exp-directed", N)).needs_push_sum
        == topology("one-peer-exp-directed", N).needs_push_sum
    )
    with pytest.raises(ValueError, match=r"lazy\(keep=1.0\)"):
        df.topologies.lazy(ring(N), 1.0)


def away(made, size):
    """Payloads that leave the busiest node of `size` workers in a step."""
    return of_schedule(made, Cluster(made.num_workers, Link(1), Link(1), size)).between


@pytest.mark.parametrize("name", ["one-peer-exp", "static-exp", "hypercube", "ring"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_leaves_a_node_are_the_weights_between_nodes(name, size):
    made = topology(name, N)
    node = torch.arange(N) // size
    rounds = [mixing_matrix(made, t) for t in range(made.period)]
    between = [int(((w > 0) & (node[:, None] != node)).sum()) / (N // size) for w in rounds]
    assert away(made, size) == pytest.approx(sum(between) / len(between))


def test_what_leaves_a_node_on_schedules_of_nodes():
    """Four replicas per node and step for 32 nodes of 8, where a worker that is a whole node sends one."""
    made = hierarchical(256, local_world_size=8, outer="one-peer-exp")
    assert away(made, 8) == 4 and away(topology("one-peer-exp", 32), 1) == 1
    assert away(complete(N), 4) == pytest.approx(2 * 7 / 8) and away(complete(N), 8) == 0


def test_draws_for_own_schedules_are_public_and_the_error_names_them():
    def pairs(t):
        order = df.draws.permutation(3, t, N)
        partner = torch.empty(N, dtype=torch.int64)
        partner[order] = order.view(-1, 2).flip(1).flatten()
        return partner[:, None], partner[:, None], torch.full((N, 2), 0.5, dtype=torch.float64)

    df.testing.check_topology(from_draw("pairs", N, pairs))
    generator = torch.Generator()
    with pytest.raises(ValueError, match=rf"df\.draws\.permutation\(seed, t, {N}\)"):
        from_draw("pairs", N, lambda t: pairs(torch.randint(100, (), generator=generator)))


@pytest.mark.parametrize("outer", ["base", "random-matching", "complete", "static-ring"])
@pytest.mark.parametrize("inner", ["complete", "ring", "random-matching"])
def test_hierarchical_alternates_the_two_levels(inner, outer):
    made = hierarchical(12, local_world_size=4, inner=inner, outer=outer)
    inside, between = topology(inner, 4), topology(outer, 3)
    for t in range(8):
        same(made, 2 * t, torch.kron(torch.eye(3).double(), mixing_matrix(inside, t)))
        same(made, 2 * t + 1, torch.kron(mixing_matrix(between, t), torch.eye(4).double()))


def test_two_steps_of_hierarchical_are_the_product_of_the_levels():
    made = hierarchical(12, local_world_size=4, outer="static-exp")
    product = mixing_matrix(made, 1) @ mixing_matrix(made, 0)
    want = torch.kron(mixing_matrix(topology("static-exp", 3), 0), torch.full((4, 4), 0.25).double())
    torch.testing.assert_close(product, want, rtol=0, atol=1e-15)
    made = hierarchical(16, local_world_size=4, outer="static-ring")
    assert spectral_gap(made) == pytest.approx(spectral_gap(topology("static-ring", 4)), abs=1e-12)


def test_schedules_too_long_for_tables_are_looked_up_when_a_step_runs():
    made = pga(5000, topology("one-peer-exp", N))
    assert made.draw is not None and made.period == 15000 and len(made.sources) == 1

    def weights(t):
        return torch.func.vmap(lambda x: collectives.look_up(x, made, t).weights)(torch.zeros(N, 1))

    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    for t in (0, 1, 2, 5000, 5001, 14999):
        want = complete(N) if t % 5000 == 0 else topology("one-peer-exp", N)
        same(made, t, mixing_matrix(want, t))
        assert torch.equal(compiled(torch.tensor(t)), made.round(t).weights)
    assert len(pga(10**6, ring(N)).groups) == 2


@given(part=parts, steps=hours, t=some_steps)
def test_later_is_the_same_schedule_begun_later(part, steps, t):
    made = later(steps, part)
    same(made, t, mixing_matrix(part, t - steps) if t >= steps else torch.eye(N).double())
    assert made.round(t).is_active == (t >= steps and part.round(t - steps).is_active)


@given(part=parts, rounds=st.integers(1, 3), k=st.integers(0, 2), t=some_steps)
def test_nth_round_is_round_k_of_a_step_that_mixes_several_times(part, rounds, k, t):
    if k < rounds:
        made = nth_round(k, rounds, part)
        same(made, t, mixing_matrix(part, rounds * t + k))
        assert made.period is None or np.allclose(mixing_matrix(made, t), mixing_matrix(made, t + made.period))


@given(part=parts, H=hours, t=some_steps)
def test_paused_rests_where_the_other_one_is_active(part, H, t):
    made = paused(part, every(H, complete(N)))
    same(made, t, mixing_matrix(part, t) if t % H else torch.eye(N).double())
    assert made.round(t).is_active == (t % H != 0 and part.round(t).is_active)


@given(part=parts, H=hours, steps=hours, t=some_steps)
def test_whether_a_step_is_idle_is_known_as_its_round_says_it(part, H, steps, t):
    for made in (
        later(steps, every(H, part)),
        alternate(every(H, part), later(steps, part)),
        paused(part, every(H, complete(N))),
        copy.copy(later(steps, every(H, part))),
    ):
        assert made.is_active(t) == made.round(t).is_active


@pytest.mark.parametrize("n", [1, 4])
def test_which_rounds_are_active_is_declared_and_not_seen_from_the_weights(n):
    """One worker alone mixes with nobody, but its outer updates take place all the same."""
    made = later(2, every(3, complete(n)))
    assert [made.round(t).is_active for t in range(8)] == [False, False, True, False, False, True, False, False]
    assert all(complete(n).round(t).is_active for t in range(3))


def test_push_sum_graphs_stay_declared():
    w = np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])
    w[:, 0] = [0.2, 0.8, 0]
    pushed = from_matrices("pushed", w, needs_push_sum=True)
    made = alternate(pushed, topology("static-ring", 3))
    assert made.needs_push_sum
    facts = certificate(pushed)
    assert facts.is_column_stochastic and not facts.is_doubly_stochastic and facts.is_connected


def test_mixed_schedules_train_in_one_graph():
    made = alternate(topology("random-matching", 4), complete(4), every(2, ring(4)))
    step = df.adapt_while_communicate(lambda x, batch: ((x - batch) ** 2).sum(), df.sgd(0.0), made)
    state = df.stack(step.init(torch.zeros(3)), 4)
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    bucket = state.params[0]
    bucket.copy_(torch.cat([start, bucket[:, 3:]], 1))
    simulated = df.simulate(step.step, 4)
    x = start.double()
    for t in range(7):
        state, _ = simulated(state, torch.zeros(4, 3), t)
        x = mixing_matrix(made, t) @ x
        torch.testing.assert_close(df.params(state).double(), x, rtol=0, atol=1e-6)


def test_certificates_of_combined_schedules():
    facts = certificate(every(4, complete(N)))
    assert (facts.steps_to_consensus, facts.period, facts.messages_per_step) == (1, 4, 0)
    assert facts.bytes_per_step(100) == pytest.approx(100 * 2 * 7 / 8 / 4)
    assert consensus_steps(every(3, topology("one-peer-exp", N))) == 7
    assert dataclasses.is_dataclass(facts) and facts.name == "every(4, complete)"


def test_a_graph_in_two_parts_is_not_connected():
    made = from_edges("parts", [([0, 2], [1, 3], [0.5, 0.5])], 4)
    assert not certificate(made).is_connected
    assert spectral_gap(made) == pytest.approx(0.0, abs=1e-12)


def test_sudden_and_gradual_consensus_are_told_apart():
    shifting = topology("static-exp", 16)
    assert consensus_steps(alternate(*[shifting] * 60)) is None
    assert consensus_steps(alternate(*[shifting] * 5, complete(16))) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topology("static-rings", 4), "nearest: static-ring"),
        (lambda: topology("ring", 0), "integer >= 1"),
        (lambda: topology("ring", 5), r"ring\(num_workers=5\): .* use 'static-ring' or 'base'"),
        (
            lambda: topology("one-peer-exp", 6),
            r"one_peer_exp\(num_workers=6\): pairs i, i XOR 2\^k need a power of two",
        ),
        (lambda: topology("hypercube", 6), r"hypercube\(num_workers=6\)"),
        (lambda: topology("star", 66), r"star\(num_workers=66\): the center would hold 65 messages"),
        (lambda: topology("torus", 12, rows=5), r"torus\(num_workers=12, rows=5\)"),
        (lambda: topology("shift-one", 7), r"shift_one\(num_workers=7\)"),
        (lambda: topology("base", 7, k=0), r"base\(k=0\)"),
        (lambda: topology("p-peer-exp", 7, p=0), r"p_peer_exp\(p=0\)"),
        (lambda: topology("equitopo-od-dyn", 7, eta=0), r"equitopo_od_dyn\(eta=0\)"),
        (lambda: topology("equitopo-d-static", 7, M=0), r"equitopo_d_static\(M=0\)"),
        (lambda: hierarchical(7, local_world_size=2), r"hierarchical\(num_workers=7, local_world_size=2\)"),
        (lambda: hierarchical(8, local_world_size=2, outer=ring(8)), "outer has 8 workers; that level has 4"),
        (lambda: graph(4, graph=nx.path_graph(5)), "the graph has 5 nodes"),
        (lambda: graph(4, graph=nx.DiGraph([(0, 1), (1, 2), (2, 3)])), "directed"),
        (lambda: graph(4, graph=nx.Graph([(0, 1), (2, 3)])), "not connected"),
        (lambda: graph(70, graph=nx.star_graph(69)), "69 messages at once"),
        (lambda: graph(2, graph=[[0, 1], [0, 0]]), "square and symmetric"),
        (lambda: every(0, ring(4)), r"every\(H=0"),
        (lambda: alternate(), "at least one topology"),
        (lambda: alternate(ring(4), ring(6)), r"\[4, 6\] workers"),
        (lambda: relabel(ring(4), [0, 1, 1, 2]), "each of 0..3 once"),
        (lambda: from_edges("mine", [([0], [1], [1.5])], 2), "worker 0's self-weight .* is -0.5"),
        (lambda: from_shifts("mine", [{1: 0.5}, {}], 2) and from_shifts("mine", [{}], 2), "receive no message"),
        (lambda: from_permutations("mine", [[[0], [0]]], [[[0.5, 0.5]] * 2]), "not a permutation"),
        (lambda: from_permutations("mine", [[[1], [2]]], [[[0.5, 0.5]] * 2]), "workers are 0..1"),
        (
            lambda: from_matrices("mine", [[0.5, 0.5], [0.4, 0.6]]),
            "column 0 of phase 0 sums to 0.9.*divide each column.*needs_push_sum=True",
        ),
        (
            lambda: from_matrices("mine", [[0.5, 0.5, 0], [0.5, 0.2, 0.25], [0, 0.25, 0.75]]),
            "column 1 of phase 0 sums to 0.95",
        ),
        (
            lambda: from_matrices("mine", [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.6, 0.5]]]),
            "column 0 of phase 1 sums to 1.1",
        ),
        (
            lambda: from_draw("mine", 2, lambda t: (torch.tensor([1, 0]),) * 2 + (torch.full((2, 2), 0.5),)),
            r"step 0 are \[2\]; sources are \[N, K\].*unsqueeze\(1\)",
        ),
        (
            lambda: from_matrices("mine", torch.full((3, 3), 1 / 3)),
            "sums to 1.00000002980232, .*compute the weights in float64",
        ),
        (lambda: from_matrices("mine", [[1.5, -0.5], [-0.5, 1.5]]), "gives to worker 1 in phase 0 is -0.5"),
        (lambda: from_groups("mine", [[Edge([0, 1])]], 3), "each of 0..2 must be in exactly one"),
        (
            lambda: from_draw(
                "mine", 2, lambda t: (torch.tensor([[2], [0]]),) * 2 + (torch.full((2, 2), 0.5).double(),)
            ),
            "sources and destinations are workers, 0 to 1, or -1 for nobody",
        ),
        (
            lambda: from_draw("mine", 2, lambda t: (torch.tensor([[0], [-1]]),) * 2 + (torch.eye(2)[[0, 0]].double(),)),
            r"workers \[0, 1\] receive no message in 1,000 rounds",
        ),
        (
            lambda: from_draw(
                "mine", 3, lambda t: (torch.tensor([[1], [0], [-1]]),) * 2 + (torch.full((3, 2), 0.5).double(),)
            ),
            r"workers \[2\] receive no message in 1,000 rounds",
        ),
        (
            lambda: from_draw(
                "mine", 2, lambda t: (torch.tensor([[1], [0]]),) * 2 + (torch.tensor([[0.5, 0.4]] * 2).double(),)
            ),
            "sums to",
        ),
        (
            lambda: from_draw(
                "mine", 3, lambda t: (torch.tensor([[1], [2], [0]]),) * 2 + (torch.full((3, 2), 0.5).double(),)
            ),
            "not the inverse of its sources: in each slot, a worker sends to one that names it",
        ),
    ],
)
def test_impossible_topologies_say_the_call_the_rule_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def pairs_of(order, dtype=torch.float64):
    partner = torch.empty_like(order).scatter_(0, order, order[torch.arange(len(order)) ^ 1])
    return partner[:, None], partner[:, None], torch.full((len(order), 2), 0.5, dtype=dtype)


def anew():
    generator = torch.Generator().manual_seed(0)
    return lambda t: pairs_of(torch.randperm(8, generator=generator))


def only_late():
    generator = torch.Generator().manual_seed(0)
    return lambda t: pairs_of(torch.randperm(8, generator=generator) if t >= 10_000 else torch.arange(8))


def by_count():
    calls = iter(range(10**6))
    return lambda t: pairs_of(torch.arange(8).roll(next(calls)))


@pytest.mark.parametrize("draw", [anew, by_count, only_late])
def test_a_draw_that_says_something_else_when_it_is_asked_again_is_refused(draw):
    with pytest.raises(
        ValueError, match=r"mine: the sources of step \d+ differ .* drawn twice.*draws.permutation\(seed, t"
    ):
        from_draw("mine", 8, draw())


def test_rounds_without_a_period_that_differ_when_asked_again_are_refused_too():
    with pytest.raises(ValueError, match="drawn twice"):
        from_rounds(
            "mine", 8, lambda t: Round(*anew()(t)) if t < 0 else Round(*pairs_of(torch.randperm(8))), period=None
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, d, w: (s.int(), d, w), r"sources .*\[8, 1\] torch.int32, not \[8, 1\] torch.int64"),
        (lambda s, d, w: (s, d.int(), w), "destinations .*torch.int32"),
        (lambda s, d, w: (s, d, w.float()), "weights .*torch.float32, not .*torch.float64"),
        (lambda s, d, w: (s, d, w[:, :1]), r"weights .*\[8, 1\].*, not \[8, 2\]"),
        (lambda s, d, w: (s, d.repeat(1, 2), w), r"destinations .*\[8, 2\].*, not \[8, 1\]"),
        (lambda s, d, w: (s[:4] % 4, d[:4] % 4, w[:4]), r"sources .*\[4, 1\].*, not \[8, 1\]"),
    ],
)
def test_draws_of_another_shape_or_dtype_are_refused(change, message):
    with pytest.raises(ValueError, match=f"mine: the {message}"):
        from_draw("mine", 8, lambda t: change(*pairs_of(torch.arange(8))))


def test_a_draw_whose_slots_change_from_step_to_step_is_refused():
    def draw(t):
        sources, destinations, weights = pairs_of(torch.arange(8))
        return (
            (sources[:, :0], sources[:, :0], torch.ones(8, 1).double()) if t == 3 else (sources, destinations, weights)
        )

    with pytest.raises(ValueError, match=r"mine: the sources of step 3 are \[8, 0\]"):
        from_draw("mine", 8, draw)


@pytest.mark.parametrize("at", [3, 10**6])
def test_every_round_that_is_tried_is_checked_as_a_table_would_be(at):
    def draw(t):
        sources, destinations, weights = pairs_of(torch.arange(8))
        return sources, destinations, weights * (0.9 if t == at else 1.0)

    with pytest.raises(ValueError, match="sums to 0.9"):
        from_draw("mine", 8, draw)


@pytest.mark.parametrize("nobody", [-1, None])
def test_a_worker_may_send_in_a_slot_in_which_it_receives_nothing(nobody):
    """A directed ring in a random order, in which each slot has one message; nobody is -1, or the worker itself."""

    def draw(t):
        order = df.draws.permutation(0, t, 4)
        sources = torch.full((4, 4), -1) if nobody else torch.arange(4)[:, None].repeat(1, 4)
        destinations, slots = sources.clone(), torch.arange(4)
        sources[order, slots], destinations[order.roll(1), slots] = order.roll(1), order
        weights = torch.zeros(4, 5, dtype=torch.float64)
        weights[:, 0], weights[order, 1 + slots] = 0.6, 0.4
        return sources, destinations, weights

    made = from_draw("one way", 4, draw)
    df.testing.check_topology(made)
    order = df.draws.permutation(0, torch.tensor(5), 4)
    expected = 0.6 * torch.eye(4, dtype=torch.float64)
    expected[order, order.roll(1)] = 0.4
    torch.testing.assert_close(mixing_matrix(made, 5), expected)


def test_given_weights_of_a_graph_are_kept():
    made = nx.Graph()
    made.add_weighted_edges_from([("a", "b", 0.3), ("b", "c", 0.2), ("a", "a", 9.0)])
    want = torch.tensor([[0.7, 0.3, 0.0], [0.3, 0.5, 0.2], [0.0, 0.2, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(mixing_matrix(graph(3, graph=made, has_weights=True), 0), want, rtol=0, atol=1e-15)
    torch.testing.assert_close(mixing_matrix(graph(3, graph=want.numpy(), has_weights=True), 0), want)


def test_a_drawn_weight_for_oneself_is_kept():
    sources = torch.tensor([[1, 0], [0, 1]])
    weights = torch.tensor([[0.2, 0.5, 0.3]] * 2, dtype=torch.float64)
    made = from_draw("mine", 2, lambda t: (sources, sources, weights))
    torch.testing.assert_close(mixing_matrix(made, 0), torch.full((2, 2), 0.5).double())
    assert made.round(0).weights[:, 2].tolist() == [0.0, 0.0]


MESSAGES_4096 = {
    "base": 1,
    "ceca": 1,
    "complete": 0,
    "equitopo-d-static": 12,
    "hypercube": 12,
    "one-peer-exp": 1,
    "random-matching": 1,
    "shift-one": 1,
    "static-exp": 12,
    "static-ring": 2,
    "torus": 4,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in topology_names() if name not in {"graph", "star"}])
def test_names_build_for_4096_workers(name):
    needs_nodes = name in {"alternating-exp-ring", "hierarchical"}
    made = topology(name, 4096, **({"local_world_size": 8} if needs_nodes else {}))
    assert made.num_workers == 4096 and made.slots <= 25
    assert made.sources.numel() <= 2**23
    for t in (0, 1, 4095):
        this = made.round(t)
        totals = this.weights.sum(1) + (0 if this.mean_weights is None else this.mean_weights)
        assert (totals - 1).abs().max() < 1e-12
        assert (this.destinations >= 0).sum() <= 4096 * MESSAGES_4096.get(name, made.degree)


def test_graphs_of_4096_workers_build_from_their_edges():
    made = graph(4096, graph=nx.random_regular_graph(6, 4096, seed=1))
    assert made.degree == 6 and made.slots <= 8


def test_a_copy_of_a_topology_is_looked_up_by_itself():
    for made in (ring(N), later(3, every(2, ring(N)))):
        copies = [copy.deepcopy(made), *([pickle.loads(pickle.dumps(made))] if made.draw is None else [])]
        wanted, t = made.round(5), torch.tensor(5)
        del made
        gc.collect()
        for one in copies:
            weights = torch.func.vmap(lambda x, one=one, t=t: collectives.look_up(x, one, t).weights)(torch.zeros(N, 1))
            assert torch.equal(weights, wanted.weights)
