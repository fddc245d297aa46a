"""Three workarounds for names that torch 2.11 lacks, which a machine with a GPU may have.

Each works for all versions, or depends on the names that exist.
"""

import inspect

import pytest
import torch

import decentfn as df
from decentfn.core import buckets
from decentfn.torch_private import dynamo
from decentfn.torch_private.names import GUARDS


def test_the_limit_of_graphs_is_an_argument_or_dynamos_own(monkeypatch):
    assert ("recompile_limit" in inspect.signature(torch.compile).parameters) == bool(dynamo.at_most(32))
    dynamo.prepare()
    monkeypatch.setattr(dynamo, "_HAS_LIMIT", False)
    config = GUARDS.find()
    before = config.recompile_limit
    try:
        assert dynamo.at_most(before + 1) == {}
        dynamo.guard_everything(before + 1)
        assert config.recompile_limit == before + 1
        dynamo.guard_everything(before)
        assert config.recompile_limit == before + 1
    finally:
        config.recompile_limit = before


def test_equal_plans_have_one_number_by_which_an_operator_finds_them():
    first, same, other = (buckets.flatten({"w": torch.zeros(n)}).plan for n in (3, 3, 4))
    assert first.number() == same.number() != other.number()
    assert buckets.plan_of(same.number()) == first and buckets.plan_of(other.number()) is other


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_nested_dicts_is_looked_through_before_it_is_traced(workers):
    def loss_fn(params, batch):
        return ((batch[0]["x"]["y"] @ params) ** 2).mean()

    topology = df.topology("one-peer-exp", 2) if workers else df.topology("complete", 1)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), topology)
    state, batch = init(torch.ones(3)), ({"x": {"y": torch.ones(4, 3)}}, torch.ones(4))
    if workers:
        state, step, batch = df.stack(state, 2), df.simulate(step, 2), df.stack(batch, 2)
    expected, _ = step(state, batch, 0)
    got, _ = df.compile(step, backend="aot_eager")(state, batch, 0)
    torch.testing.assert_close(got.params[0], expected.params[0])
