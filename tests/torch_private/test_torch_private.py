"""The pass over a step's graph, and what Inductor is kept from on a CPU."""

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


@pytest.mark.parametrize("how", ["not sent", "itself", "a view of it"])
def test_donated_state_is_stored_early_except_while_it_may_be_on_its_way(how):
    """FX: `y = x - g; waited = wait(post(x), x); metric = sum(waited); copy_(x, y)`: the copy moves up or stays last."""
    graph = torch.fx.Graph()
    x, g, topology, t, sources = (graph.placeholder(name) for name in ("x", "g", "topology", "t", "sources"))
    sent = graph.call_function(torch.ops.aten.view.default, (x, [-1])) if how == "a view of it" else x
    sent = g if how == "not sent" else sent
    number = graph.call_function(torch.ops.decentfn.post.default, (sent, topology, t, None, False, 0))
    new = graph.call_function(torch.ops.aten.sub.Tensor, (x, g))
    waited = graph.call_function(torch.ops.decentfn.wait.default, (number, sent, sources, None, None, 0, []))
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
