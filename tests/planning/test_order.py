"""Orders of workers: the best that brute force finds, told as a call that takes the predicted time."""

import json
import re
from itertools import permutations

import numpy as np
import pytest

import decentfn as df
from decentfn.planning import Cluster, Link, order
from decentfn.timing import Links

MB = 40
"""Of a payload: 10 million parameters."""


def random_links(n, seed):
    """Fast links, of which about a third are slow, and a latency of each."""
    draws = np.random.default_rng(seed)
    gbit = np.where(draws.random((n, n)) < 0.35, 0.1, draws.uniform(0.8, 1.2, (n, n)))
    return np.minimum(gbit, gbit.T), np.full((n, n), draws.uniform(0.1, 20))


def milliseconds(made, gbit, latency, workers):
    """A step of a schedule in which each sends and hears one message, worker `workers[k]` in the place of k."""
    rounds = []
    for t in made.cycle:
        sources = made.round(t).sources[:, 0].tolist()
        ends = [(workers[j], workers[i]) for i, j in enumerate(sources) if j >= 0]
        rounds.append(max(8 * MB / (0.93 * gbit[i, j]) + 2 * latency[i, j] for i, j in ends))
    return sum(rounds) / len(rounds)


def planned(gbit, latency, made, **options):
    cluster = Cluster(len(gbit), Link(0.1), links=Links(gbit, latency))
    return df.plan(cluster, MB * 10**6 // 4, compute_seconds=1e-3, topologies=[made], **options)


@pytest.mark.parametrize(("name", "n"), [("ring", 4), ("one-peer-exp-directed", 4), ("shift-one", 6), ("ring", 6)])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_the_best_of_all_and_its_call_takes_the_predicted_time(name, n, seed):
    gbit, latency = random_links(n, seed)
    made = df.topology(name, n)
    found, best = (
        planned(gbit, latency, made),
        min(milliseconds(made, gbit, latency, workers) for workers in permutations(range(n))),
    )
    as_it_is = milliseconds(made, gbit, latency, range(n))
    row = next(p for p in found.predictions if p.method == "adapt_while_communicate")
    assert row.seconds * 1e3 == pytest.approx(as_it_is)
    if found.recommended.topology != name:
        return  # an all-reduce is faster
    if best > 0.95 * as_it_is:
        assert found.reordered is None and "relabel" not in found.links
        return
    assert found.reordered.seconds * 1e3 == pytest.approx(best)
    call = re.search(r"`(.*)`", found.links)[1]
    told = planned(gbit, latency, eval(call, {"df": df}))
    assert told.recommended.seconds == found.reordered.seconds and told.reordered is None
    workers = json.loads(call.partition("), ")[2][:-1])
    assert planned(gbit[np.ix_(workers, workers)], latency, made).recommended.seconds == found.reordered.seconds


@pytest.mark.parametrize("seed", range(3))
def test_swaps_find_nearly_the_best_of_all_orders(seed, monkeypatch):
    gbit, latency = random_links(7, seed)
    cluster, made = Cluster(7, Link(0.1), links=Links(gbit, latency)), df.topology("static-ring", 7)
    best, _ = order._best_order(cluster, made, 4e7, False)
    monkeypatch.setattr(order, "_ALL_OF", 2)
    swapped, workers = order._best_order(cluster, made, 4e7, False)
    assert best <= swapped <= 1.2 * best and sorted(workers) == list(range(7))


def test_workers_of_a_node_stay_together():
    """Nodes 0 and 1 are far apart, and neighbors on the ring of nodes."""
    gbit = np.ones((4, 4))
    gbit[0, 1] = gbit[1, 0] = 0.05
    cluster = Cluster(8, Link(0.1), Link(100), 2, links=Links(gbit, 0.1))
    made = df.topology("hierarchical", 8, local_world_size=2, outer="static-ring")
    found = df.plan(cluster, 10**7, compute_seconds=1e-3, topologies=[made])
    assert found.reordered.seconds < 0.5 * found.recommended.seconds


@pytest.mark.thorough
def test_equal_links_and_hidden_messages_have_no_order():
    equal = planned(np.full((4, 4), 1.0), 0.1, df.topology("ring", 4))
    assert equal.reordered is None and equal.links.startswith("The slowest link that it uses leads from node 0")
    gbit, latency = random_links(4, 0)
    cluster = Cluster(4, Link(0.1), links=Links(gbit, latency))
    assert df.plan(cluster, 1000, compute_seconds=1.0).reordered is None
    assert df.plan(Cluster(4, Link(0.1)), 10**7, compute_seconds=0.1).links == ""


@pytest.mark.parametrize("seed", range(6))
def test_an_all_reduce_is_a_ring_of_ranks_and_a_better_order_of_nodes_is_told(seed):
    """The order is the best of all, and nodes that are started in it take the predicted time."""
    gbit, latency = random_links(5, seed)
    gbit[0, 1:3] = 0.05  # one direction

    def ring(order):
        rates = [gbit[j, i] for i, j in zip(order, [*order[1:], order[0]], strict=True)]  # each sends to the one before
        first, all_ = (1.6 * 8 * mb / (0.93 * min(rates)) for mb in (2**20 / 1e6, MB))
        # The first bucket's bytes hide latencies of the rest.
        return all_ + 9 * latency[0, 1] - min(first, 8 * latency[0, 1])

    def of_ddp(rates):
        found = df.plan(
            Cluster(5, Link(0.1), links=Links(rates, latency)), MB * 10**6 // 4, compute_seconds=1e-9, topologies=[made]
        )
        return found, next(p.seconds for p in found.predictions if p.method == "DDP")

    made = df.topology("static-ring", 5)
    found, now = of_ddp(gbit)
    assert now * 1e3 == pytest.approx(ring(range(5)))
    best = min(map(ring, permutations(range(5))))
    told = re.search(r"in the order ([\d, ]+) DDP takes (\d+) ms", found.links)
    assert (told is not None) == (best < 0.95 * now * 1e3)
    if told:
        order = [int(i) for i in told[1].split(", ")]
        again, then = of_ddp(gbit[np.ix_(order, order)])
        assert float(told[2]) == pytest.approx(best, abs=1) and then * 1e3 == pytest.approx(best)
        assert "DDP takes" not in again.links
