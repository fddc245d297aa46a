"""A compiled step alone: it waits for nothing, and nothing of it is computed on the CPU."""

import pytest
import torch

import decentfn as df
from tests.gpu.on_rank import without_waiting

HOW = [
    "eager",
    "traced",
    "by autograd",
    "traced, by autograd",
    "traced, replayed",
    "64 workers, traced",
    "64 workers, traced, replayed",
]


def network(how, device):
    n = 64 if "workers" in how else 1
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).to(device)
    params, buffers, loss_fn = df.functional(net, torch.nn.functional.cross_entropy)
    loss_fn = df.autograd(loss_fn) if "autograd" in how else loss_fn
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(1e-3), df.topology("one-peer-exp", n))
    state, batch = init(params, buffers), (torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device))
    if n > 1:
        state, batch, step = df.stack(state, n), df.stack(batch, n), df.simulate(step, n)
    mode = "reduce-overhead" if "replayed" in how else None
    return state, df.compile(step, mode=mode) if "traced" in how else df.donate(step), batch


@pytest.mark.parametrize("how", HOW)
def test_a_step_waits_for_nothing(how, device):
    if "replayed" in how and device.type == "cpu":
        pytest.skip("a CUDA graph needs a GPU; tests/test_cuda_graphs.py tries it on the CPU")
    state, step, batch = network(how, device)
    for t in range(3):
        state, _ = step(state, batch, t)
    with without_waiting(device):
        for t in range(3, 8):
            state, _ = step(state, batch, t)
    assert all(bool(torch.isfinite(b).all()) for b in state.params)


@pytest.mark.parametrize("how", ["traced", "traced, by autograd"])
def test_no_kernel_is_compiled_for_the_cpu(how, device):
    """The first one takes 40 s, and its result would have to be copied."""
    if device.type == "cpu":
        pytest.skip("on the CPU all kernels are")
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    state, step, batch = network(how, device)
    _, codes = run_and_get_code(step, state, batch, 0)
    assert codes and not any("cpp_fused" in code or "empty_strided_cpu" in code for code in codes)


def test_the_gradient_of_a_norm_of_many_rows_is_in_its_bucket(device):
    """Inductor's mix-order reduction, from 4,096 rows and 5 MiB of numbers on, leaves it unwritten (PyTorch's 193061)."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 768), torch.nn.LayerNorm(768), torch.nn.Linear(768, 64)).to(device)
    params, buffers, loss_fn = df.functional(net, torch.nn.functional.mse_loss)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(10.0), df.topology("complete", 1))
    batch = torch.randn(8192, 64, device=device), torch.randn(8192, 64, device=device)
    expected, found = (df.params(how(step)(init(params, buffers), batch, 0)[0]) for how in (df.donate, df.compile))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
