"""What a step computes is freed when it returns: no cycle of references keeps vectors until Python's garbage collector runs."""

import gc

import pytest
import torch

import decentfn as df
from decentfn.buckets import blocks
from decentfn.testing import problem
from tests import contract


@pytest.fixture
def collected():
    """What is garbage from now on is put here by a collection, and by nothing else."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("row", contract.ROWS)
@pytest.mark.parametrize("way", ["traced", "by autograd"])
def test_a_step_leaves_no_tensor_to_the_garbage_collector(row, way, monkeypatch, request):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    loss_fn = problem.loss_fn if way == "traced" else df.autograd(problem.loss_fn)
    algorithm = contract.ROWS[row].build(num_workers=1, loss_fn=loss_fn)
    steps = [algorithm.step, df.donate(algorithm.step)]
    state = algorithm.init(problem.params())
    for step in steps:
        state, _ = step(state, problem.batch(0, 0), 0)
    garbage = request.getfixturevalue("collected")
    for t, step in enumerate(steps, 1):
        state, _ = step(state, problem.batch(0, t), t)
    gc.collect()
    assert [tuple(x.shape) for x in garbage if isinstance(x, torch.Tensor)] == []
