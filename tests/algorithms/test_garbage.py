"""Temporaries of a step are freed when it returns, without waiting for Python's garbage collector."""

import gc

import pytest
import torch

import decentfn as df
from decentfn.testing import problem
from tests import contract

pytestmark = pytest.mark.thorough


@pytest.fixture
def collected():
    """Collects the garbage of what was made since; an earlier test's, let go by pytest only now, is not looked at."""
    gc.collect(1)  # all that is there is of the oldest generation now
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def tensors():
        gc.collect(0)
        return [x for x in gc.garbage if isinstance(x, torch.Tensor)]

    yield tensors
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("row", contract.ROWS)
@pytest.mark.parametrize("way", ["traced", "by autograd"])
def test_a_step_leaves_no_tensor_to_the_garbage_collector(row, way, request):
    loss_fn = problem.loss_fn if way == "traced" else df.autograd(problem.loss_fn)
    algorithm = contract.ROWS[row].build(num_workers=1, loss_fn=loss_fn)
    steps = [algorithm.step, df.donate(algorithm.step)]
    state = algorithm.init(problem.params())
    for t, step in enumerate(steps):
        state, _ = step(state, problem.batch(0, 0), t)
    collected = request.getfixturevalue("collected")
    for t, step in enumerate(steps, 2):
        state, _ = step(state, problem.batch(0, t), t)
    assert [tuple(x.shape) for x in collected()] == []
