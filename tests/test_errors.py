"""Bad input: an error at construction that names the call, the value, the rule and the way out."""

from datetime import timedelta

import pytest
import torch

import decentfn as df
from tests import cases


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
        (lambda: df.topologies.from_matrices("mine", torch.eye(3)), r"workers \[0, 1, 2\] receive from nobody"),
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
    with pytest.raises(TypeError, match=r"unknown options \['bucket_size'\]; known.*bucket_mb"):
        df.adapt_then_combine(loss_fn, df.sgd(0.1), ring(), bucket_size=3)


@pytest.mark.parametrize("returned", [torch.ones(3), torch.tensor(1), 1.5])
def test_a_loss_that_is_no_scalar_is_refused(returned):
    init, step = df.adapt_then_combine(lambda p, b: returned, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"loss_fn returned.*0-d floating-point tensor"):
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


def mismatched_start(what):
    here = df.init()
    params = {"w": torch.ones(3 + here.rank if what == "shape" else 3)}
    if what == "dtype" and here.rank:
        params = {"w": torch.ones(3, dtype=torch.float64)}
    topology = df.topology("ring", 4 if what == "size" else here.size)
    if what == "size":
        topology = df.topology("complete", 3)
    weight = 0.5 + 0.1 * here.rank if what == "weights" else 0.5
    if what == "weights":
        topology = df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1], weight)]], 2)
    init, _ = df.adapt_then_combine(cases.loss_fn, df.sgd(0.1), topology)
    try:
        init(params)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"Rank 0 has 'bucket 0 torch.float32: w \[3\] at 0', rank 1 has 'bucket 0 torch.float32: w \[4\]"),
        ("dtype", r"rank 1 has 'bucket 0 torch.float64"),
        ("weights", r"topology 'mine', num_workers 2, tables"),
        ("size", r"num_workers=3, but 2 processes run"),
    ],
)
def test_ranks_that_disagree_are_told_before_anything_travels(ranks, what, message):
    import re

    for text in ranks(2).run(mismatched_start, what):
        assert re.search(message, text), text
