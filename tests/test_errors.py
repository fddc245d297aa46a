"""Bad input: an error at construction that names the call, the value, the rule and the way out."""

import re
from datetime import timedelta

import pytest
import torch

import decentfn as df
from tests import network


def ring(n=4):
    return df.topology("ring", n)


def loss_fn(params, batch):
    return (params["w"] ** 2).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: df.topology("ring", 5), r"num_workers=5.*even.*static-ring"),
        (lambda: df.topology("one-peer-exp", 6), r"num_workers=6.*power of two.*base"),
        (lambda: df.topology("alternating-exp-ring", 6, local_world_size=4), r"multiple of local_world_size"),
        (lambda: df.topology("alternating-exp-ring", 6, local_world_size=2), r"3 nodes.*power of two"),
        (lambda: df.topology("one-per-exp", 8), r"no such topology; nearest: one-peer-exp.*register_topology"),
        (lambda: df.topology("ring", 0), r"num_workers=0.*>= 1"),
        (
            lambda: df.topologies.from_groups(
                "mine", [[df.topologies.Edge([0, 1], 0.7), df.topologies.Edge([1, 2])]], 3
            ),
            r"\[0, 1, 1, 2\].*exactly one",
        ),
        (lambda: df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1], 1.4)]], 2), r"weight=1.4.*\[0, 1\]"),
        (lambda: df.topologies.from_matrices("mine", [[0.5, 0.6], [0.5, 0.4]]), r"row 0 of phase 0 sums to 1.1"),
        (
            lambda: df.topologies.from_permutations("mine", [[[1], [1]]], [[[0.5, 0.5]] * 2]),
            r"phase 0, slot 0.*not a permutation",
        ),
        (lambda: df.topologies.from_matrices("mine", torch.eye(3)), r"workers \[0, 1, 2\] receive no message"),
        (
            lambda: df.adapt_while_communicate(loss_fn, object(), ring()),
            r"no init\(\).*pair \(init, update\).*df.adamw",
        ),
        (lambda: df.adapt_while_communicate(loss_fn, df.sgd(0.1), "ring"), r"topology='ring': expected a Topology"),
        (lambda: df.adapt_while_communicate(None, df.sgd(0.1), ring()), r"loss_fn=None: expected a function"),
        (lambda: df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring(), gamma=1.5), r"gamma=1.5.*\[0, 1\]"),
        (lambda: df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring(), update_at="x"), r"'x'.*'local' or 'mixed'"),
        (lambda: df.simulate(loss_fn, 0), r"num_workers=0.*>= 1"),
        (lambda: df.init(timeout=timedelta(0)), r"timeout=0:00:00.*positive"),
        (lambda: df.params(torch.ones(3)), r"Tensor is not a training state.*init\(params\)"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match=r"adapt_then_combine\(bucket_size=...\).*gossip_rounds.*bucket_mb"):
        df.adapt_then_combine(loss_fn, df.sgd(0.1), ring(), bucket_size=3)


@pytest.mark.parametrize("returned", [torch.ones(3), torch.tensor(1), 1.5])
def test_a_loss_that_is_no_scalar_is_refused(returned):
    init, step = df.adapt_then_combine(lambda p, b: returned, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"loss_fn returned.*0-d floating-point tensor"):
        step(init({"w": torch.ones(2)}), None, 0)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_who_forgets_init_under_torchrun_is_told_so(monkeypatch, backend):
    monkeypatch.setenv("WORLD_SIZE", "4")
    init, step = df.adapt_then_combine(lambda p, b: (p["w"] ** 2).sum(), df.sgd(0.1), ring())
    step = step if backend is None else df.compile(step, backend=backend)
    with pytest.raises(ValueError, match=r"this process is alone: 4 processes were started .*Call df\.init\(\) first"):
        step(init({"w": torch.ones(2)}), None, 0)


def test_a_simulation_of_another_size_is_refused():
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), ring())
    state = df.stack(init({"w": torch.ones(2)}), 2)
    with pytest.raises(ValueError, match=r"num_workers=4, but 1 process\(es\) hold 2 worker"):
        df.simulate(step, 2)(state, None, 0)
    with pytest.raises(
        ValueError, match=r"simulate\(num_workers=4\): leaf 'params.0' of the state is \[2, 2\].*df.stack"
    ):
        df.simulate(step, 4)(state, None, 0)
    with pytest.raises(ValueError, match=r"1 process\(es\) hold 1 worker\(s\) each. Start 4 processes with torchrun"):
        step(init({"w": torch.ones(2)}), None, 0)


def mean_of(*weights):
    return df.topologies.from_groups(
        "mine", [[df.topologies.Edge([i, i ^ 1], w) for i, w in zip((0, 2), weights, strict=True)]], 4
    )


LEAVES = {"a": torch.ones(3), "b": torch.ones(3)}
FIELDS = {
    # Of the call: what most ranks have, what one has, and how the two are named.
    "algorithm": ({}, {"build": "all_reduce"}, "algorithm adapt_while_communicate", "algorithm all_reduce"),
    "hyperparameter": ({"gamma": 0.5}, {"gamma": 0.6}, "gamma=0.5", "gamma=0.6"),
    "schedule": (
        {"gamma": df.schedules.linear(1.0, 0.5, 100)},
        {"gamma": df.schedules.linear(1.0, 0.4, 100)},
        "gamma(t)=1 at 0.*0.5 at 100,.*",
        "gamma(t)=1 at 0.*0.4 at 100,.*",
    ),
    "bucket_mb": ({}, {"bucket_mb": 1.0}, "bucket_mb=25.0", "bucket_mb=1.0"),
    "wire_dtype": ({}, {"wire_dtype": torch.bfloat16}, "wire_dtype=None", "wire_dtype=torch.bfloat16"),
    "learning rate": ({}, {"optimizer": df.sgd(0.2)}, "optimizer.*0.1", "optimizer.*0.2"),
    "optimizer": ({}, {"optimizer": df.adamw(0.1)}, "optimizer.*", "optimizer.*"),
    "mask": (
        {"optimizer": df.adamw(0.1, weight_decay=0.1, mask=lambda name, shape: name == "a")},
        {"optimizer": df.adamw(0.1, weight_decay=0.1, mask=lambda name, shape: name == "b")},
        "mask 0 takes a",
        "mask 0 takes b",
    ),
    "torch": ({}, {"torch": "1.0"}, f"torch {torch.__version__}", "torch 1.0"),
    "topology": ({}, {"topology": ("static-ring", 4)}, "topology='ring'", "topology='static-ring'"),
    "num_workers": ({}, {"topology": ("ring", 8)}, "num_workers=4", "num_workers=8"),
    "number of workers that do not fit": (
        {},
        {"topology": ("complete", 3)},
        "torch .*",
        "ValueError: .*num_workers=3.*",
    ),
    "weights": ({"tables": (0.5, 0.5)}, {"tables": (0.5, 0.6)}, "the topology's tables .*", "the topology's tables .*"),
    "seed of a random topology": (
        {"topology": ("random-matching", 4), "seed": 0},
        {"topology": ("random-matching", 4), "seed": 1},
        ".*",
        ".*",
    ),
    "name": ({}, {"params": {"a": torch.ones(3), "c": torch.ones(3)}}, r"bucket 0 .*: b .*", r"bucket 0 .*: c .*"),
    "shape": ({}, {"params": {**LEAVES, "b": torch.ones(3, 1)}}, r".*: b [3] at .*", r".*: b [3, 1] at .*"),
    "dtype": ({}, {"params": {**LEAVES, "b": torch.ones(3).double()}}, r".*float32: .*", r".*float64: b .*"),
    "place": ({}, {"params": {**LEAVES, "a": torch.ones(70)}}, r".*: a [3] at 0", r".*: a [70] at 0"),
    "one leaf more": ({}, {"params": {**LEAVES, "c": torch.ones(3)}}, "nothing", r"bucket 0 .*: c [3] at .*"),
    "leaf": ({}, {"params": {**LEAVES, "b": "text"}}, "torch .*", ".*Error: .*"),
}


def start_with_a_field_changed(culprit):
    """For each field what `init` raises on this rank, and its peer."""
    here, answers = df.init(), {}
    torch_version = torch.__version__
    for name, (usual, changed, *_) in FIELDS.items():
        given = {"build": "adapt_while_communicate", "topology": ("ring", here.size), "params": LEAVES}
        given |= {**usual, **(changed if here.rank == culprit else {})}
        make, params, optimizer = given.pop("build"), given.pop("params"), given.pop("optimizer", df.sgd(0.1))
        tables, schedule = given.pop("tables", None), given.pop("topology")
        seed = {"seed": given.pop("seed")} if "seed" in given else {}
        topology = df.topology(*schedule, **seed) if tables is None else mean_of(*tables)
        torch.__version__ = given.pop("torch", torch_version)
        init, _ = getattr(df, make)(network.loss_fn, optimizer, topology, **given)
        try:
            init(params)
        except df.errors.PlanMismatch as error:
            answers[name] = (str(error), error.process, error.peer)
        torch.__version__ = torch_version
    return answers


def test_one_rank_of_four_that_differs_is_named_with_the_field_and_both_values(ranks):
    for culprit in (2, 0):
        usual_rank = 0 if culprit else 1
        for rank, answers in enumerate(ranks(4).run(start_with_a_field_changed, culprit)):
            assert answers.keys() == FIELDS.keys()
            for name, (_, _, usual, changed) in FIELDS.items():
                message, process, peer = answers[name]
                usual_line, changed_line = (".*".join(map(re.escape, line.split(".*"))) for line in (usual, changed))
                said = rf"Rank {usual_rank} has ['\"]{usual_line}['\"], rank {culprit} has ['\"]{changed_line}['\"]; every rank"
                assert re.search(said, message), (name, message)
                assert (process, peer) == (rank, usual_rank if rank == culprit else culprit)


def test_more_workers_than_a_topology_of_one_are_refused():
    init, step = df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.1), df.topology("ring", 1))
    state, simulated = df.stack(init(torch.zeros(1)), 3), df.simulate(step, 3)
    for run in (simulated, df.compile(simulated, backend="eager")):
        with pytest.raises(ValueError, match=r"num_workers=1, but 1 process\(es\) hold 3"):
            run(state, torch.ones(3, 1), 0)
