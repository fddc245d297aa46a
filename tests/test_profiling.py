"""Counters match planned and sent bytes, traces show events in the right place, and neither changes the step."""

import json
import re
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import decentfn as df
from decentfn.core import trees
from decentfn.testing import on_ranks
from tests import network
from tests.test_examples import load

pytestmark = pytest.mark.thorough


def profiled():
    return profile(activities=[ProfilerActivity.CPU])


def batch_of(rank, num_workers, t):
    return tuple(x[rank] for x in network.batches(num_workers, t))


# -- counters -------------------------------------------------------------------------------------------------------


def payload_bytes(row, plan, wire_dtype=torch.float64):
    """Return the bytes of one worker's parameters on the wire, from the plan alone."""
    if row == "choco_sgd":
        return sum(df.compressors.top_k(0.25).nbytes(bucket) for bucket in plan.buckets)
    return sum(bucket.numel * min(bucket.dtype.itemsize, wire_dtype.itemsize) for bucket in plan.buckets)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("adapt_while_communicate on one-peer-exp", {}),
        ("adapt_then_combine on ring", {}),
        ("adapt_while_communicate on static-exp", {"wire_dtype": torch.bfloat16}),
        ("choco_sgd", {}),
        ("adapt_while_communicate on alternating-exp-ring", {}),
        ("all_reduce on complete", {}),
    ],
    ids=str,
)
def test_the_bytes_of_every_worker_are_those_that_its_topology_plans(row, options):
    n = 4
    topology = network.subject(row).topology(n)
    planned = df.topologies.certificate(topology)

    def train(rank):
        init, step = network.build(row, n, **options)
        state = init(network.params())
        with df.profiling.communication() as whole:
            for t in range(topology.period):
                with df.profiling.communication() as one:
                    state, _ = step(state, batch_of(rank, n, t), t)
        step(state, batch_of(rank, n, 0), topology.period)  # nobody counts this one
        return whole, one, state.params.plan

    for whole, one, plan in on_ranks(n, train):
        bytes_planned = topology.period * planned.bytes_per_step(payload_bytes(row, plan, **options))
        assert whole.bytes_sent == whole.bytes_received == pytest.approx(bytes_planned, rel=1e-12)
        assert whole.messages == topology.period * planned.messages_per_step * len(plan.buckets)
        assert one == whole if topology.period == 1 else one.bytes_sent < whole.bytes_sent


def test_of_several_workers_in_a_process_only_what_leaves_it_is_counted():
    def train(rank):
        init, step = network.build("adapt_while_communicate on static-exp", 4)
        state = df.stack(init(network.params()), 2)
        batch = tuple(x[2 * rank : 2 * rank + 2] for x in network.batches(4, 0))
        with df.profiling.communication() as counted:
            df.simulate(step, 2)(state, batch, 0)
        return counted, state.params.plan

    sources = df.topology("static-exp", 4).sources[0]
    for rank, (counted, plan) in enumerate(on_ranks(2, train)):
        inside = range(2 * rank, 2 * rank + 2)
        crossing = sum(int(source) not in inside for worker in inside for source in sources[worker])
        assert counted.messages == crossing * len(plan.buckets)
        assert counted.bytes_received == crossing * sum(b.numel * b.dtype.itemsize for b in plan.buckets)


def test_who_waits_for_a_slow_peer_counts_the_wait_and_the_peer_does_not():
    def train(rank):
        init, step = network.build("adapt_while_communicate on ring", 2)
        state, _ = step(init(network.params()), batch_of(rank, 2, 0), 0)
        time.sleep(1.0 * rank)
        with df.profiling.communication() as counted:
            step(state, batch_of(rank, 2, 1), 1)
        return counted.seconds_waited

    patient, slow = on_ranks(2, train)
    assert patient > 0.3 and slow < patient


WITH_MEANS = {
    "gossip": lambda loss, n: df.adapt_while_communicate(loss, df.sgd(0.1), df.topology("static-ring", n)),
    "a mean while computing": lambda loss, n: df.adapt_while_communicate(loss, df.sgd(0.1), df.topology("complete", n)),
    "all_reduce": lambda loss, n: df.all_reduce(loss, df.sgd(0.1), df.topology("complete", n)),
    "a weighted mean": lambda loss, n: df.all_reduce(loss, df.sgd(0.1), df.topology("complete", n), weight=torch.abs),
    "diloco": lambda loss, n: df.diloco(loss, df.sgd(0.1), df.topology("complete", n), inner_steps=1),
    "groups": lambda loss, n: df.adapt_then_combine(
        loss, df.sgd(0.1), df.topology("hierarchical", n, local_world_size=2)
    ),
}


@pytest.mark.parametrize("name", WITH_MEANS)
def test_of_four_the_slow_one_waits_least_also_in_means(name):
    steps, seconds = 3, 0.3

    def train(rank):
        @df.autograd
        def loss(p, batch):
            time.sleep(seconds * (rank == 2))
            return ((p - batch) ** 2).mean(), torch.ones(())

        init, step = WITH_MEANS[name](loss, 4)
        state, _ = step(init(torch.ones(5)), torch.zeros(5), 0)
        since = time.monotonic()
        with df.profiling.communication() as counted:
            for t in range(1, 1 + steps):
                state, _ = step(state, torch.zeros(5), t)
        assert counted.seconds_waited <= time.monotonic() - since  # each second once, of several messages too
        assert rank not in counted.peers
        if "mean" in name:  # gloo's ring leads backward
            to, of = (
                {r for r, x in counted.peers.items() if getattr(x, f"bytes_{way}")} for way in ("sent", "received")
            )
            assert (to, of) == ({(rank - 1) % 4}, {(rank + 1) % 4})
        return counted.seconds_waited

    waits = on_ranks(4, train)
    assert waits[2] == min(waits) and max(waits) > 0.7 * steps * seconds, waits
    assert name == "groups" or sorted(waits)[1] > 0.3 * steps * seconds, waits


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["a mean while computing", "gossip"])
def test_a_post_does_not_wait_for_the_others_also_of_a_mean(name, backend):
    """The third rank begins its step only when the first one computes its gradient, after its post."""
    computes, seen = threading.Event(), []

    def train(rank):
        @df.autograd
        def loss(p, batch):
            if rank == 0 and batch[0]:
                computes.set()
            return ((p - batch) ** 2).mean()

        init, step = WITH_MEANS[name](loss, 3)
        step = step if backend is None else df.compile(step, backend=backend)
        state, _ = step(init(torch.ones(5)), torch.zeros(5), 0)
        if rank == 2:
            seen.append(computes.wait(60))
        step(state, torch.ones(5), 1)

    on_ranks(3, train)
    assert seen == [True]


def test_simulated_workers_send_nothing_and_wait_for_nothing():
    with df.profiling.communication() as counted:
        network.simulated("adapt_while_communicate on ring", 4, 2)
    assert counted == df.profiling.Communication(0, 0, 0, 0.0)


# -- neither changes the step ---------------------------------------------------------------------------------------


def plain_and_observed():
    """On a rank: the same compiled steps alone, and counted and profiled from the first on; and the graphs compiled."""
    torch._dynamo.reset()
    counters.clear()
    here = df.init()
    ends, hits = [], []
    for observers in ([], [df.profiling.communication, profiled]):
        topology = df.topology("one-peer-exp", here.size)
        init, step = df.adapt_while_communicate(lambda p, x: ((x - p) ** 2).mean(), df.sgd(0.1), topology)
        state, step, losses = init(torch.ones(7)), df.compile(step), []
        with ExitStack() as stack:
            for observe in observers:
                stack.enter_context(observe())
            for t in range(4):
                state, metrics = step(state, torch.arange(7.0) + here.rank, t)
                losses.append(metrics.loss.clone())
        ends.append([x.clone() for x in trees.leaves((state, losses))])
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    return ends, counters["stats"]["unique_graphs"], hits[1] - hits[0]


def test_a_step_that_is_counted_and_profiled_is_the_same_code_and_the_same_numbers(ranks):
    for (alone, observed), graphs, known in ranks(2).run(plain_and_observed):
        assert all(torch.equal(a, b) for a, b in zip(alone, observed, strict=True))
        assert graphs == 2 and known == 1  # one each, and Inductor found the second one's code: it has the same graph


# -- ranges ---------------------------------------------------------------------------------------------------------


def names(profiler):
    return [event.name for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]


def test_an_eager_step_shows_its_gradient_and_update():
    init, step = network.build("adapt_while_communicate on ring", 2)
    state = df.stack(init(network.params()), 2)
    with profiled() as p:
        df.simulate(step, 2)(state, network.batches(2, 7), 7)
    shown = [name for name in names(p) if re.match("decentfn::(step|gradient|update)", name)]
    assert shown == ["decentfn::step 7", "decentfn::gradient", "decentfn::update"]


def test_a_gradient_by_autograd_is_shown_by_its_name():
    init, step = df.adapt_while_communicate(
        df.autograd(network.loss_fn), df.sgd(0.1), df.topology("complete", 1), bucket_mb=0.002
    )
    state, batch = init(network.params()), batch_of(0, 1, 0)
    step = df.compile(step, backend="eager")
    state, _ = step(state, batch, 0)
    with profiled() as p:
        step(state, batch, 1)
    assert names(p).count("decentfn::gradient") == 1


# -- the trace ------------------------------------------------------------------------------------------------------


def run_example(out):
    return load("profile_step").main(width=48, batch_size=3, out=out)


def require_nested(slices):
    """Slices of one thread lie in one another or beside one another; Perfetto drops others."""
    ends = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-3, event  # a nanosecond of rounding
        ends.append(end)


def require_trace(trace):
    """Require what Perfetto needs: nested slices, and other events with matching begin and end."""
    by_thread, begun = {}, {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XbeMisf", event
        assert isinstance(event["name"], str) and "pid" in event and "tid" in event
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "b":
            begun[event["id"], event["name"]] = event["ts"]
        if event["ph"] == "e":
            assert begun.pop((event["id"], event["name"])) <= event["ts"]
    assert not begun
    for slices in by_thread.values():
        require_nested(slices)


def test_the_example_s_compiled_step_is_a_trace_that_perfetto_shows_and_a_picture(ranks, tmp_path):
    counted = ranks(2).run(run_example, tmp_path / "trace")
    for rank, c in enumerate(counted):
        assert (c.messages, c.bytes_sent, c.bytes_received) == (4, 4 * 48 * 48 * 4, 4 * 48 * 48 * 4)
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        require_trace(trace)
        events = sorted((e for e in trace["traceEvents"] if "ts" in e), key=lambda e: e["ts"])
        steps = [e for e in events if e["name"].startswith("decentfn::step ")]
        assert [e["name"] for e in steps] == ["decentfn::step 4", "decentfn::step 5"]
        begin, end = steps[1]["ts"], steps[1]["ts"] + steps[1]["dur"]
        inside = [e for e in events if begin <= e["ts"] <= end and e["pid"] == steps[1]["pid"]]
        shown = [e["name"] for e in inside if re.match("decentfn::(post|wait) ", e["name"])]
        assert shown == [
            *(f"decentfn::post exchange {k}" for k in (1, 2, 3, 4)),
            *(f"decentfn::wait exchange {k}" for k in (1, 2, 3, 4)),
        ]
        ranges = [e for e in inside if re.match("decentfn::(post|wait) ", e["name"])]
        gradient = ranges[3]["ts"] + ranges[3]["dur"], ranges[4]["ts"]
        products = [e for e in inside if e["name"] == "aten::mm"]
        assert len(products) >= 11
        assert all(gradient[0] <= e["ts"] <= gradient[1] for e in products)
        kernels = [e["ts"] for e in inside if "cpp_fused" in e["name"]]
        assert any(ts >= ranges[4]["ts"] + ranges[4]["dur"] for ts in kernels)
        for k in (1, 2, 3, 4):
            assert {f"exchange {k}: gloo:recv", f"exchange {k}: gloo:send"} <= {
                e["name"] for e in inside if e["ph"] == "b"
            }
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cuda"}, "--device cuda: the processes compute on cpu"),
        ({"nvtx": True}, "--nvtx: the ranges are for"),
    ],
)
def test_the_example_refuses_a_gpu_that_is_not_there(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        load("profile_step").main(width=8, out=tmp_path / "trace", **options)


def test_an_exported_trace_has_the_ranges_and_is_read_by_viewers(tmp_path):
    init, step = network.build("adapt_while_communicate on complete", 1)
    with profiled() as p:
        step(init(network.params()), batch_of(0, 1, 0), 0)
    load("profile_step").export(p, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    require_trace(trace)
    assert "decentfn::gradient" in {event["name"] for event in trace["traceEvents"]}
