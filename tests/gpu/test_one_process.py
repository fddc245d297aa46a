"""One process: every algorithm, simulated, computes what it computes on the CPU, and no step waits for the GPU."""

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.engine import cuda_graphs
from decentfn.testing import problem
from tests import tape
from tests.gpu import training
from tests.gpu.launched import ROWS
from tests.gpu.on_rank import without_waiting


@pytest.mark.parametrize("how", ["eager", "by autograd", "replayed"])
@pytest.mark.parametrize("row", ROWS)
def test_a_simulated_step_computes_what_the_cpu_does_and_waits_for_nothing(row, how, device):
    subject = training.contract.ROWS[row]
    n = subject.num_workers
    algorithm = training.build(subject, how, n)
    state = trees.map(lambda x: x.to(device), subject.start(algorithm, range(n), stacked=True))
    step = df.simulate(algorithm.step, n)
    if how == "replayed":  # a CUDA graph of the kernels of the step that is not compiled
        recorder = cuda_graphs.cuda_recorder if device.type == "cuda" else lambda: tape.record
        run = cuda_graphs.replayed(tape.in_place(step), recorder)
        step = step.transformed("donate").transformed("compile", run=run)
    batches = [problem.stacked([problem.batch(i, t) for i in range(n)]) for t in range(training.STEPS + 2)]
    batches = trees.map(lambda x: x.to(device), batches)
    for t in range(training.STEPS):
        state, _ = step(state, batches[t], t)
    got = trees.map(lambda x: x.cpu(), df.params(state))
    for mine, wanted in zip(trees.leaves(got), trees.leaves(training.reference(row, "eager", n)), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-3)
    with without_waiting(device):
        for t in range(training.STEPS, training.STEPS + 2):
            state, _ = step(state, batches[t], t)
