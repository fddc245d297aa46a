"""Tests that need a GPU: every algorithm agrees with the CPU. `pytest tests/test_gpu.py --durations=0` times it."""

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing import problem
from tests import contract

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOW = ["eager", "compiled", "by autograd", "compiled, by autograd"]


def trained(subject, how, device):
    n = subject.num_workers
    loss_fn = df.autograd(problem.loss_fn) if "autograd" in how else problem.loss_fn
    algorithm = subject.build(loss_fn=loss_fn)
    state = subject.start(algorithm, range(n), stacked=True)
    state = trees.map(lambda x: x.to(device), state)
    step = df.simulate(algorithm.step, n)
    step = df.compile(step) if "compiled" in how else step
    for t in range(4):
        batch = problem.stacked([problem.batch(i, t) for i in range(n)])
        state, metrics = step(state, trees.map(lambda x: x.to(device), batch), t)
    return trees.map(lambda x: x.cpu(), (df.params(state), metrics.loss))


@needs_gpu
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", contract.ROWS)
def test_a_gpu_computes_what_the_cpu_does(row, how):
    got, wanted = (trained(contract.ROWS[row], how if d == "cuda" else "eager", d) for d in ("cuda", "cpu"))
    for a, b in zip(trees.leaves(got), trees.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def network(how):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).cuda()
    params, buffers, loss_fn = df.functional(net, torch.nn.functional.cross_entropy)
    loss_fn = df.autograd(loss_fn) if "autograd" in how else loss_fn
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(1e-3), df.topology("complete", 1))
    return init(params, buffers), df.compile(step) if "compiled" in how else step


@needs_gpu
@pytest.mark.parametrize("how", HOW)
def test_a_step_on_a_gpu_does_not_wait_for_it(how):
    state, step = network(how)
    batch = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    for t in range(3):
        state, _ = step(state, batch, t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(3, 8):
            state, _ = step(state, batch, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("how", HOW)
def test_how_long_a_step_on_a_gpu_takes(how, capsys):
    state, step = network(how)
    batch = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for t in range(220):
        if t == 20:
            start.record()
        state, _ = step(state, batch, t)
    end.record()
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\n{how}: {start.elapsed_time(end) / 200:.3f} ms per step on {torch.cuda.get_device_name()}")
    assert all(bool(torch.isfinite(b).all()) for b in state.params)
