"""Nothing in a step reads from the device, copies to it, or computes elsewhere: every algorithm, counted on meta."""

from dataclasses import replace

import pytest
import torch

import decentfn as df
from decentfn.comm import collectives
from decentfn.core import buckets, trees
from decentfn.gradient import beside
from decentfn.gradient.backward import Layout, backward
from decentfn.testing import problem
from tests import contract, devices


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_step_reads_nothing_back_and_copies_nothing(row):
    for simulated in (False, True):
        seen, new = devices.copies(contract.ROWS[row], simulated=simulated)
        assert {leaf.device.type for leaf in trees.leaves(new)} == {"meta"}
        assert seen == []


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_traced_step_computes_nothing_on_another_device(row):
    """Of periodic and of random schedules: on a GPU each such operation would be compiled by C++, and its result copied."""
    subject = contract.ROWS[row]
    random = replace(subject, topology=lambda n: df.topology("random-matching", n))
    for simulated in (False, True):
        assert devices.on_the_cpu(subject, simulated=simulated) == []
        try:
            random.build()
        except ValueError:  # it needs a static graph
            continue
        assert devices.on_the_cpu(random, simulated=simulated) == []


def test_the_gradient_by_autograd_waits_for_nothing_and_copies_nothing():
    params = trees.map(devices.on_meta, buckets.flatten(problem.params(0)))
    batch = trees.map(devices.on_meta, problem.batch(0, 0))
    form = Layout(params.plan, None, frozenset())
    form.is_tried = True
    known = problem.loss_fn, form, False, 3, collectives.world(), 0, None, list(params), []
    with devices.Copies() as copies:
        one = beside.passing_beside(lambda *_: backward(*known, batch), None, batch)
    assert copies.seen == [] and {g.device.type for g in [*one.grads, one.loss]} == {"meta"}


def test_what_waits_and_what_copies_is_seen():
    with devices.Copies() as copies:
        torch.ones(3).to("meta")
        torch.empty(3, device="meta").copy_(torch.ones(3))
    assert copies.seen == [devices.Copy(3, True)] * 2
    with pytest.raises(RuntimeError):
        torch.ones(1, device="meta").item()


def test_the_page_is_what_is_counted():
    assert devices.PAGE.read_text() == devices.page()
