"""Nothing in a step reads from the device or copies more than a round's weights to it: every algorithm, counted on meta."""

import pytest
import torch

from decentfn import buckets, collectives, trees
from decentfn.gradient import beside
from decentfn.gradient.backward import backward
from decentfn.gradient.layout import Layout
from decentfn.testing import problem
from tests import contract, devices


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_step_reads_nothing_back_and_copies_a_rounds_numbers(row):
    for simulated in (False, True):
        seen, new = devices.copies(contract.ROWS[row], simulated=simulated)
        assert {leaf.device.type for leaf in trees.leaves(new)} == {"meta"}
        assert all(copy.waits for copy in seen), seen
        assert sum(copy.numbers for copy in seen) <= 200 and len(seen) <= 16, seen


@pytest.mark.parametrize("row", contract.ROWS)
def test_no_copy_in_a_traced_graph_is_asynchronous(row):
    """Inductor would write over the host memory before such a copy has started."""
    graphs = [devices.traced_copies(contract.ROWS[row], simulated=simulated) for simulated in (False, True)]
    assert any(str(copy.get("device")) == "meta" for copy in graphs[1]) or "all_reduce" in row, graphs
    assert not [copy for graph in graphs for copy in graph if copy.get("non_blocking")], graphs


def test_the_gradient_by_autograd_waits_for_nothing_and_copies_nothing():
    params = trees.map(devices.on_meta, buckets.flatten(problem.params(0)))
    batch = trees.map(devices.on_meta, problem.batch(0, 0))
    with beside.Step(), devices.Copies() as copies:
        form, here = Layout(params.plan, None, (), is_tried=True), collectives.world()
        one = backward(problem.loss_fn, form, False, 3, here, 0, None, list(params), [], batch)
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
