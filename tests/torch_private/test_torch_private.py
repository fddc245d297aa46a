"""Without PyTorch's private API everything stays correct; only the overlap is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import decentfn as df
from decentfn import compile_cache
from decentfn.buckets import flatten
from decentfn.compressors import Key
from decentfn.torch_private import inductor, inductor_on_cpu

WITHOUT = """
import sys

import torch

import decentfn as df
from decentfn.torch_private import inductor, lowering
from tests import cases

{removal}
lowering.register_all()
{restoration}
assert lowering.is_refused and "reorder_for_compute_comm_overlap" not in inductor.compile_options()
case = cases.Case("adapt_while_communicate", "ring")
ranks = df.testing.on_ranks(2, lambda rank: cases.on_this_rank(case, steps=3, local=1, backend="inductor")[0])
expected, _ = cases.simulated(case, 2, steps=3)
for rank, mine in enumerate(ranks):
    for got, wanted in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, wanted[rank], atol=1e-6, rtol=1e-5)
print("agrees")
"""
PIECES = {
    "collective kernels": (
        "import torch._inductor.ir as ir; kept = ir._CollectiveKernel; del ir._CollectiveKernel",
        "ir._CollectiveKernel = kept",  # Inductor itself still needs it
    ),
    "lowerings": (
        "name = 'torch._inductor.lowering'; import torch._inductor.lowering; kept = sys.modules[name]\n"
        "sys.modules[name] = None",
        "sys.modules[name] = kept",
    ),
}


@pytest.mark.parametrize("piece", PIECES)
def test_ranks_agree_with_vmap_without_private_api(piece, tmp_path):
    script = tmp_path / "without.py"
    removal, restoration = PIECES[piece]
    script.write_text(WITHOUT.format(removal=removal, restoration=restoration))
    root = Path(__file__).parents[2]
    command = [sys.executable, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=_environment(root), timeout=300)
    assert result.returncode == 0 and result.stdout == "agrees\n", result.stderr[-3000:]


def _environment(root):
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("how", ["not sent", "itself", "a view of it"])
def test_donated_state_is_stored_early_except_while_it_may_be_on_its_way(how):
    """FX: `y = x - g; waited = wait(exchange(x)); metric = sum(waited); copy_(x, y)`: the copy moves up or stays last."""
    graph = torch.fx.Graph()
    x, g, peers, t = (graph.placeholder(name) for name in ("x", "g", "peers", "t"))
    sent = graph.call_function(torch.ops.aten.view.default, (x, [-1])) if how == "a view of it" else x
    sent = g if how == "not sent" else sent
    inbox = graph.call_function(torch.ops.decentfn.exchange.default, (sent, peers, t, False, None))
    new = graph.call_function(torch.ops.aten.sub.Tensor, (x, g))
    waited = graph.call_function(torch.ops.decentfn.wait.default, (inbox,))
    metric = graph.call_function(torch.ops.aten.sum.default, (waited,))
    store = graph.call_function(torch.ops.aten.copy_.default, (x, new))
    graph.output((metric, store))
    inductor.compile_options()["post_grad_custom_post_pass"](graph)
    order = list(graph.nodes)
    assert (order.index(store) < order.index(waited)) == (how == "not sent")
    assert (order.index(store) > order.index(metric)) == (how != "not sent")


def test_a_probe_that_passed_is_not_repeated_and_one_that_failed_is(tmp_path, monkeypatch):
    probed, outcome = [], {"good": True, "bad": False, "other": True}
    monkeypatch.setattr(VecISA, "_probe_load", lambda self, path: probed.append(path) or outcome[Path(path).name])
    original, unit = VecISA._probe_load, VecISA()
    for _ in range(2):
        with inductor_on_cpu.remembered_probes(compile_cache.leave):
            found = {name: unit._probe_load(str(tmp_path / name)) for name in outcome}
        assert found == outcome
        assert VecISA._probe_load is original
    assert [Path(path).name for path in probed] == ["good", "bad", "other", "bad"]
    with pytest.raises(KeyError), inductor_on_cpu.remembered_probes(compile_cache.leave):
        unit._probe_load("unknown")
    assert VecISA._probe_load is original


def test_a_loop_is_not_split_by_what_does_not_divide_it():
    """620 values in chunks of 256: Inductor on a CPU would compute the first two chunks and forget the rest."""
    compressor = df.compressors.quantize(8)
    x = flatten({"a": torch.randn(620, generator=torch.Generator().manual_seed(0))})

    def there_and_back(x, me, t):
        message = compressor.compress(x, plan, Key(t, me, 0))
        return x, compressor.decompress(message, plan)

    (bucket,), (plan,) = x, x.plan.buckets
    _, heard = df.compile(there_and_back, donate=False)(bucket, torch.tensor(1), 3)
    torch.testing.assert_close(heard, there_and_back(bucket, torch.tensor(1), torch.tensor(3))[1])


def test_a_tensor_written_over_and_read_in_the_same_loop_is_compiled():
    """Inductor on a CPU would fail with a KeyError, as it did in quasi-global Adam's update on two ranks."""

    def written_over(x, batch, t):
        mask = batch.clone()
        mask[torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(1)] = 0
        return x, torch.softmax(x + mask, dim=-1)

    x, batch = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    _, chances = df.compile(written_over, donate=False)(x, batch, 0)
    torch.testing.assert_close(chances, torch.softmax(x, dim=-1))


@pytest.mark.parametrize(
    ("norm", "options", "expected"),
    [
        (torch.nn.GroupNorm(2, 4), {}, False),
        (torch.nn.BatchNorm2d(4), {}, False),
        (torch.nn.LayerNorm(8), {}, True),
        (torch.nn.MaxPool2d(2), {}, True),
        (torch.nn.GroupNorm(2, 4), {"force_layout_optimization": True}, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else str(value),
)
def test_convolutions_are_channels_last_but_beside_norms_over_positions(norm, options, expected, monkeypatch):
    chosen, run = [], GraphLowering.run
    monkeypatch.setattr(GraphLowering, "run", lambda self, *args: chosen.append(self.layout_opt) or run(self, *args))
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), norm, torch.nn.Conv2d(4, 2, 3), torch.nn.Flatten()
    )
    params, buffers, loss_fn = df.functional(module, lambda output, target: (output.mean(1) - target).square().mean())
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("ring", num_workers=1))
    batch = torch.randn(2, 3, 8, 8), torch.randn(2)
    expected_state, _ = step(init(params, buffers), batch, 0)
    with fresh_cache():
        state, _ = df.compile(step, **options)(init(params, buffers), batch, 0)
    assert chosen == [expected]
    torch.testing.assert_close(df.params(state), df.params(expected_state))


def test_operators_in_a_loss_by_autograd_see_its_own_vmap_in_compiled_code_too():
    def loss_fn(params, batch):
        each = torch.func.vmap(
            lambda x: torch.func.vmap(lambda y: df.collectives.worker_index(x) + 0 * y)(torch.ones(3))
        )
        index = each(batch)
        return (params * index.sum()).sum(), index

    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, compiled = init(torch.ones(2)), df.compile(step, donate=False, backend="eager")
    expected = torch.arange(4.0).expand(3, 4).T
    for t in range(3):
        state, metrics = compiled(state, torch.zeros(4), t)
        assert torch.equal(metrics.aux, expected)


def test_operators_see_a_vmap_that_the_backend_runs_itself():
    def step(state, batch, t):
        def worker(x):
            return torch.func.vmap(lambda y: (df.collectives.worker_index(x) + 1) * y)(batch)

        return state + torch.func.vmap(worker)(state).sum(1), t + 0

    compiled, state = df.compile(step, donate=False, backend="eager"), torch.zeros(3)
    for t in range(3):
        state, _ = compiled(state, torch.ones(2), t)
    assert state.tolist() == [6, 12, 18]
