"""The clock: closed forms, laws over random workers and links, the recorded clock of asynchronous local SGD."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.comm.collectives.arrivals import _at_once
from decentfn.planning import Cluster, Link
from decentfn.timing import Exchange, Links
from tests.timing.traces import RECORDED, merges


def test_the_recorded_clock_of_asynchronous_local_sgd():
    recorded = RECORDED["clock"]
    clock, inner = df.clock(recorded["seconds_per_step"], Links([1] * 4)), recorded["H"]
    found = merges(clock, inner, 400, wait=recorded["wait"])
    rows = list(zip(found.seconds.round(9).tolist(), found.worker.tolist(), found.staleness.tolist(), strict=True))
    assert [list(row) for row in rows[:60]] == recorded["merges"]
    assert np.bincount(found.worker).tolist() == recorded["merges_per_worker"]
    assert found.staleness.max() == recorded["largest_staleness"]
    for steps, seconds in recorded["steps_and_seconds"][1:]:
        assert round(float(found.seconds[steps // inner - 1]), 9) == seconds
    all_wait = merges(clock, inner, 20, wait=RECORDED["all_wait"]["wait"])
    for steps, seconds in RECORDED["all_wait"]["steps_and_seconds"][1:]:
        assert all_wait.seconds[steps // inner - 1] == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["vanilla_constant", "vanilla_polynomial", "delayed_sgd", "delayed_sgd_infinite"])
def test_the_recorded_outer_parameters_follow_from_the_clock(name):
    """Whoever is merged began `staleness` merges before; torch's optimizer takes the outer steps."""
    recorded = RECORDED["quadratics"]
    run, n, gamma = recorded["runs"][name], len(recorded["optima"]), recorded["gamma"]
    clock = df.clock(recorded["seconds_per_step"], Links([1] * n))
    found = merges(clock, recorded["H"], len(run["merges"]), wait=run["wait"])
    optima = torch.tensor(recorded["optima"], dtype=torch.float64)
    x = torch.nn.Parameter(torch.tensor(recorded["start"], dtype=torch.float64))
    outer = torch.optim.SGD([x], lr=recorded["eta"], momentum=recorded["beta"], nesterov=True)
    versions, total = [x.detach().clone()], torch.zeros_like(x)
    for m, (seconds, worker, stale) in enumerate(zip(*found, strict=True)):
        began = versions[m - stale]
        own = optima[worker] + (1 - gamma) ** recorded["H"] * (began - optima[worker])
        delta = began - own
        if name.startswith("vanilla"):
            x.grad = n**-0.5 * delta * ((1 + stale) ** -0.5 if name == "vanilla_polynomial" else 1)
            outer.step()
        else:
            total += delta.detach() / n
            if (m + 1) % n == 0:
                x.grad, total = total, torch.zeros_like(total)
                outer.step()
        versions.append(x.detach().clone())
        at, who, expected = run["merges"][m]
        assert seconds == pytest.approx(at) and worker == who
        np.testing.assert_allclose(x.detach().numpy(), expected, atol=1e-12)


def test_one_slow_worker_sets_the_pace_of_all_but_of_those_that_wait_for_nobody():
    clock = df.clock([0.1, 0.1, 0.1, 0.3], Cluster(4, Link(10)))
    for begins, name in ((0.0, "ring"), (1.0, "ring"), (2 / 3, "complete")):
        line = clock.timeline(Exchange(df.topology(name, 4), 1e3, begins), 60)
        assert 60 / line.end[-1].max() == pytest.approx(10 / 3, rel=0.01)
    trace = clock.timeline(Exchange(df.topology("one-peer-exp", 4), 1e3, is_awaited=False), 60).trace
    assert trace is not None and trace.num_steps[:3] == (60,) * 3 and trace.num_steps[3] in (19, 20)
    assert max(its[-1] for its in trace.ended) == pytest.approx(6.0)
    assert len(trace.levels) <= 61


def arrivals(line):
    """Of each message that was taken: sender, receiver, seconds from the end of its step until it was taken."""
    for i, steps in enumerate(line.trace.sent):
        for k in range(len(steps)):
            first = len(line.trace.taken[i][k]) - line.trace.late[i][k]
            for place, (j, s) in enumerate(line.trace.taken[i][k]):
                yield j, i, (line.start if place < first else line.end)[k, i] - line.end[s, j]


def test_a_slow_link_delays_only_its_own_messages():
    """0.086 s of a fast interface and 0.86 s of worker 3's: what goes between fast workers arrives in their next step."""
    sends = Exchange(df.topology("one-peer-exp", 4), 1e8, is_awaited=False)
    took = {}
    for j, i, seconds in arrivals(df.clock(0.1, Links([10, 10, 10, 1])).timeline(sends, 300)):
        took.setdefault(3 in (j, i), []).append(seconds)
    assert max(took[False]) < 0.31 and np.mean(took[False]) < 0.15, (max(took[False]), np.mean(took[False]))
    assert min(took[True]) > 0.86


@pytest.mark.parametrize("seed", range(4))
def test_no_interface_carries_more_than_its_rate(seed):
    draw = random.Random(seed)
    rates = [draw.choice([0.1, 0.3, 1, 10]) for _ in range(4)]
    sends = Exchange(df.topology("static-exp", 4), 4e6, is_awaited=False)
    line = df.clock(0.05, Links(rates)).timeline(sends, 400)
    found = list(arrivals(line))
    for i, rate in enumerate(rates):
        for end in (0, 1):
            seconds = 4e6 * 8 / (rate * 0.93e9) * sum(one[end] == i for one in found)
            assert seconds <= line.end.max() + 1e-9, (i, end, seconds)


@pytest.mark.parametrize("begins", [0.0, 2 / 3, 1.0])
def test_equal_workers_follow_the_closed_form(begins):
    n, nbytes, link = 6, 4e7, Link(1, latency_ms=2)
    clock = df.clock(0.1, Cluster(n, link))
    for name, payloads, rounds in (("ring", 1, 2), ("static-ring", 2, 2), ("complete", 2 * (n - 1) / n, 2 * n - 1)):
        messages = payloads * nbytes * 8 / 0.93e9 + rounds * 2e-3
        step = 0.1 * begins + max(0.1 * (1 - begins), messages)
        line = clock.timeline(Exchange(df.topology(name, n), nbytes, begins), 10)
        assert line.end == pytest.approx(step * np.arange(1, 11)[:, None].repeat(n, 1))


@pytest.mark.parametrize("nbytes", [1e5, 4e6, 4e7])
def test_the_last_bucket_leaves_after_the_computation_and_the_first_before(nbytes):
    n, parts = 4, 4.0
    begins = 1 / 3 + 2 / 3 / parts
    sends = Exchange(df.topology("complete", n), nbytes, begins, parts=parts)
    step = df.clock(0.1, Cluster(n, Link(1, latency_ms=0))).timeline(sends, 5).end[-1, 0] / 5
    messages = 1.5 * nbytes * 8 / 0.93e9
    assert step == pytest.approx(max(0.1 * begins + messages, 0.1 + messages / parts))


def test_outages_delays_and_one_worker():
    alone = df.clock(0.1, Cluster(1, Link(1)), outages=[(0, 0.25, 1.25)])
    line = alone.timeline(Exchange(df.topology("complete", 1), 1e6), 4)
    assert line.end[:, 0] == pytest.approx([0.1, 0.2, 1.3, 1.4]) and not line.waited.any()
    one = Exchange(df.topology("one-peer-exp", 4), 1e7, begins=1.0)
    slow = df.clock(0.1, Cluster(4, Link(1, latency_ms=0, efficiency=1)))
    assert slow.timeline(one, 8).end[-1, 0] == pytest.approx(8 * 0.18)
    late = Exchange(one.topology, 1e7, begins=1.0, delay=1)  # 0.08 s hide behind the next step's 0.1 s
    assert slow.timeline(late, 8).end[-1, 0] == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(12))
def test_more_bandwidth_never_ends_later_and_nobody_waits_less_than_0(seed):
    draw = random.Random(seed)
    n = draw.choice([2, 4, 6])
    name = draw.choice(["ring", "complete", "static-ring", "base"] if n > 2 else ["complete", "base"])
    rates = [draw.uniform(0.1, 2) for _ in range(n)]
    sends = Exchange(df.topology(name, n), draw.uniform(0, 1e7), draw.random(), draw.choice([0, 0, 2]))
    ends = []
    for factor in (1.0, 1.5, 10.0):
        clock = df.clock(lambda u: 0.05 + 0.1 * u, Links([factor * rate for rate in rates]), seed=seed)
        line = clock.timeline(sends, 20)
        assert (line.waited >= 0).all() and (line.start[1:] == line.end[:-1]).all()
        ends.append(line.end)
    assert all((faster <= slower + 1e-12).all() for slower, faster in pairwise(ends))


def messages(topology, t, to_each):
    """Sender, receiver, payloads, latencies and group of each message of a step; those of no group are one of their own."""
    this = topology.round(t)
    found = [(j, i, 1.0, 2.0, (i, j)) for i, its in enumerate(this.sources.tolist()) for j in its if j >= 0]
    for group in set() if this.groups is None else set(this.groups[this.mean_weights != 0].tolist()):
        ranks = (this.groups == group).nonzero()[:, 0].tolist()
        r = len(ranks)
        if to_each:
            found += [(j, i, 1.0, 2.0, group) for j in ranks for i in ranks if i != j]
        else:
            found += [(ranks[k], ranks[k - 1], 2 * (r - 1) / r, 2 * r - 1.0, group) for k in range(r)]
    return found


def traveled(found, cluster, nbytes):
    """Seconds of each message, all at once: the slower of both interfaces, which others use too, and of its link."""
    rates, latency = (np.asarray(x, dtype=float) for x in (cluster.links.gbit_per_s, cluster.links.latency_ms))
    rates, latency = rates * 0.93e9 / 8, np.broadcast_to(latency / 1e3, (cluster.nodes,) * 2)
    node = [i // cluster.workers_per_node for i in range(cluster.num_workers)]
    loads, ends = {}, []
    for j, i, payloads, _, _ in found:
        away = node[j] != node[i]
        ways = ("out", "node", node[j]) if away else ("out", j), ("in", "node", node[i]) if away else ("in", i)
        ends.append((payloads * nbytes / (1 if away else cluster.processes_per_worker), ways, away))
        for way in ways:
            loads[way] = loads.get(way, 0.0) + ends[-1][0]
    seconds = []
    for (j, i, _, rounds, _), (load, (out, into), away) in zip(found, ends, strict=True):
        a, b = node[j], node[i]
        if not away:
            rate = cluster.inside.gbit_per_s * 0.93e9 / 8
            takes, late = max(loads[out], loads[into]) / rate, cluster.inside.latency_ms / 1e3
        elif rates.ndim == 2:
            leaves, arrives = np.delete(rates[a], a).max(), np.delete(rates[:, b], b).max()
            takes, late = max(loads[out] / leaves, loads[into] / arrives, load / rates[a, b]), latency[a, b]
        else:
            takes, late = max(loads[out] / rates[a], loads[into] / rates[b]), latency[a, b]
        seconds.append(takes + rounds * late)
    return seconds


def worked(i, now, seconds, outages):
    """When worker i is done with work that begins now, and that outages interrupt."""
    for who, since, until in sorted(outages, key=lambda its: its[1]):
        if who == i and now < until and now + seconds > since:
            seconds, now = seconds - max(0.0, since - now), until
    return now + seconds


@pytest.mark.parametrize("seed", range(12))
def test_a_timeline_is_that_of_its_rules_worker_by_worker(seed):
    draw = random.Random(seed)
    n, steps, first = 4, 12, draw.randrange(3)
    kind, name = ["rates", "pairs", "nodes"][seed % 3], ["hierarchical", "ring", "complete", "static-exp"][seed % 4]
    nodes = 2 if kind == "nodes" else n
    table = [[draw.uniform(0.2, 3) for _ in range(nodes)] for _ in range(nodes)]
    links = Links(table if kind == "pairs" else table[0], draw.choice([0.0, 5.0]))
    inside = Link(4, latency_ms=1) if kind == "nodes" else None
    cluster = Cluster(n, Link(1), inside, n // nodes, 1 + (kind == "nodes"), links=links)
    compute = [[draw.uniform(0.02, 0.2) for _ in range(n)] for _ in range(first + steps)]
    outages = [(draw.randrange(n), at := draw.uniform(0, 2), at + draw.uniform(0, 0.6)) for _ in range(8)]
    topology = df.topology(name, n, **({"local_world_size": 2} if name == "hierarchical" else {}))
    topology = df.topologies.every(1 + seed % 2, topology)
    begins, delay, parts = draw.choice([0.0, 0.4, 1.0]), draw.choice([0, 0, 2]), draw.choice([1.0, 3.0])
    sends = Exchange(topology, draw.uniform(1e6, 2e7), begins, delay, to_each=seed in (0, 2, 5, 6), parts=parts)
    line = df.clock(compute, cluster, outages=outages).timeline(sends, steps, first=first)

    now, free, arrived = [0.0] * n, [0.0] * n, [[0.0] * n] * delay
    for k in range(steps):
        np.testing.assert_allclose(line.start[k], now, rtol=1e-12)
        work = compute[first + k]
        done = [worked(i, now[i], work[i], outages) for i in range(n)]
        ready = [max(worked(i, now[i], begins * work[i], outages), free[i]) for i in range(n)]
        found = messages(topology, first + k, sends.to_each)
        lasts, there = traveled(found, cluster, sends.nbytes), [0.0] * n
        for j, i, _, _, group in found:
            same = [m for m, one in enumerate(found) if one[4] == group]
            begin, last = (max(max(at[found[m][0]], at[found[m][1]]) for m in same) for at in (ready, done))
            longest = max(lasts[m] for m in same)
            end = max(begin + longest, last + longest / parts) if parts > 1 else begin + longest
            there[i], there[j] = max(there[i], end), max(there[j], end)
        arrived, free = [*arrived, there], [max(pair) for pair in zip(free, there, strict=True)]
        now = [max(pair) for pair in zip(done, arrived.pop(0), strict=True)]
        np.testing.assert_allclose(line.end[k], now, rtol=1e-12)
        np.testing.assert_allclose(line.waited[k], np.subtract(now, done), atol=1e-12)


def test_what_a_large_group_does_not_send_takes_no_time():
    """Of more than 64 workers of one node, rows are sums of their messages, of which none leaves it."""
    sends = Exchange(df.topology("complete", 65), 1e6, to_each=True)
    ends = [
        df.clock(0.1, Cluster(65, Link(1, latency_ms=ms), Link(10), 65)).timeline(sends, 2).end for ms in (0.1, 1e6)
    ]
    assert np.array_equal(*ends)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: df.clock([0.1] * 3, Cluster(4, Link(1))), "a number >= 0"),
        (lambda: df.clock(-1, Cluster(4, Link(1))), "a number >= 0"),
        (lambda: df.clock(0.1, 4), "df.planning.Cluster or df.timing.Links"),
        (lambda: df.clock(0.1, Cluster(4, Link(1)), outages=[(4, 0, 1)]), "outages are"),
        (lambda: Links([1, 0]), "numbers > 0"),
        (lambda: Exchange(df.topology("complete", 4), 1, parts=0.5), "a number of parts"),
        (lambda: Exchange(df.topology("complete", 4), 1, is_awaited=False), "averages in groups are awaited"),
        (lambda: df.clock(0.1, Links([1, 1])).timeline(Exchange(df.topology("ring", 4), 1), 2), "has 2 workers"),
        (lambda: df.clock([[0.1] * 4], Links([1] * 4)).timeline(Exchange(df.topology("ring", 4), 1), 2), "1 rows"),
    ],
)
def test_what_no_clock_has_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_near_the_least_mass_a_timeline_sends_what_a_mailbox_would():
    """Slot by slot, as long as enough stays: of step 1's two shares the first one."""
    own = 2.0**-15
    w = np.full((3, 3), (1 - own) / 2) + np.eye(3) * (own - (1 - own) / 2)
    topology = df.topologies.from_matrices("greedy", w)
    clock = df.clock([0.1, 0.35, 0.35], Cluster(3, Link(10)))
    trace = clock.timeline(Exchange(topology, 1e3, is_awaited=False), 3).trace
    assert trace.sent[0][:2] == ((True, True, False), (True, False, False))
    given = _at_once(topology, 1, torch.full((3,), own, dtype=torch.float64))  # as the simulator, and a mailbox
    assert (given.to[0] >= 0).tolist() == [*trace.sent[0][1]]


def test_seconds_may_be_a_tensor():
    seconds, four, sends = [0.1, 0.1, 0.1, 0.3], Cluster(4, Link(10)), Exchange(df.topology("ring", 4), 1e6)
    for given in (torch.tensor(seconds, dtype=torch.float64), torch.tensor([seconds] * 5, dtype=torch.float64)):
        found = df.clock(given, four).timeline(sends, 5).end
        assert np.array_equal(found, df.clock(seconds, four).timeline(sends, 5).end)
    with pytest.raises(ValueError, match=r"clock\(compute=.*a number >= 0"):
        df.clock(torch.tensor([0.1, 0.1]), four)
