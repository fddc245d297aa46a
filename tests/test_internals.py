"""Without PyTorch's private API everything stays correct; only the overlap is gone."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecISA

import decentfn  # noqa: F401  (defines the operators)
from decentfn import internals

WITHOUT = """
import sys
import torch
{removal}
import decentfn as df
{restoration}
from decentfn import internals
from tests import cases

assert not internals.OVERLAPS and "reorder_for_compute_comm_overlap" not in internals.compile_options()
case = cases.Case("adapt_while_communicate", "ring")
mine, _ = cases.on_this_rank(case, steps=3, local=1, backend="inductor")
rank = df.init().rank
from decentfn.collectives import World, use
with use(World(None, 0, 1)):
    expected, _ = cases.simulated(case, 2, steps=3)
for got, wanted in zip(mine, expected):
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=_environment(root), timeout=300)
    assert result.returncode == 0 and result.stdout.count("agrees") == 2, result.stderr[-3000:]


def _environment(root):
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_simulator_agrees_with_itself_on_a_gpu(compiled):
    import decentfn as df
    from decentfn import trees
    from tests import cases

    for case in cases.CASES:
        init, step = cases.build(case, 4)
        state = df.stack(init(trees.map(lambda p: p.cuda(), cases.params())), 4)
        step = df.compile(df.simulate(step, 4)) if compiled else df.simulate(step, 4)
        for t in range(3):
            state, _ = step(state, tuple(x.cuda() for x in cases.batches(4, t)), t)
        expected, _ = cases.simulated(case, 4, 3)
        for got, wanted in zip(trees.leaves(state), expected, strict=True):
            torch.testing.assert_close(got.cpu(), wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("how", ["not sent", "itself", "a view of it"])
def test_donated_state_is_stored_early_except_while_it_may_be_on_its_way(how):
    """FX: `y = x - g; waited = wait(exchange(x)); metric = sum(waited); copy_(x, y)`: the copy moves up or stays last."""
    graph = torch.fx.Graph()
    x, g, peers, t = (graph.placeholder(name) for name in ("x", "g", "peers", "t"))
    sent = graph.call_function(torch.ops.aten.view.default, (x, [-1])) if how == "a view of it" else x
    sent = g if how == "not sent" else sent
    inbox = graph.call_function(torch.ops.decentfn.exchange.default, (sent, peers, t, False))
    new = graph.call_function(torch.ops.aten.sub.Tensor, (x, g))
    waited = graph.call_function(torch.ops.decentfn.wait.default, (inbox,))
    metric = graph.call_function(torch.ops.aten.sum.default, (waited,))
    store = graph.call_function(torch.ops.aten.copy_.default, (x, new))
    graph.output((metric, store))
    internals.compile_options()["post_grad_custom_post_pass"](graph)
    order = list(graph.nodes)
    assert (order.index(store) < order.index(waited)) == (how == "not sent")
    assert (order.index(store) > order.index(metric)) == (how != "not sent")


def test_a_probe_that_passed_is_not_repeated_and_one_that_failed_is(tmp_path, monkeypatch):
    probed, outcome = [], {"good": True, "bad": False, "other": True}
    monkeypatch.setattr(VecISA, "_probe_load", lambda self, path: probed.append(path) or outcome[Path(path).name])
    original, unit = VecISA._probe_load, VecISA()
    for _ in range(2):
        with internals.remembered_probes():
            found = {name: unit._probe_load(str(tmp_path / name)) for name in outcome}
        assert found == outcome
        assert VecISA._probe_load is original
    assert [Path(path).name for path in probed] == ["good", "bad", "other", "bad"]
    with pytest.raises(KeyError), internals.remembered_probes():
        unit._probe_load("unknown")
    assert VecISA._probe_load is original


def traced(constant=2.0, shape=(3, 4), dtype=torch.float32):
    """What Dynamo hands to a backend."""
    kept = []

    def backend(graph, inputs):
        kept.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * constant, backend=backend, dynamic=False)(torch.ones(shape, dtype=dtype))
    return kept[0]


def test_graphs_share_a_note_iff_the_same_code_is_compiled(monkeypatch):
    notes = [internals.note_of(traced(), {"a": 1}), internals.note_of(traced(constant=3.0), {"a": 1})]
    notes += [internals.note_of(traced(shape=(4, 3)), {"a": 1}), internals.note_of(traced(), {"a": 2})]
    notes += [internals.note_of(traced(dtype=torch.float64), {"a": 1})]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    notes += [internals.note_of(traced(), {"a": 1})]
    monkeypatch.setattr(internals, "_digest_of_sources", lambda: "other sources")
    notes += [internals.note_of(traced(), {"a": 1})]
    assert len(set(notes)) == len(notes)
    assert internals.note_of(traced(), {"a": 1, "pass": object()}) == notes[-1]


class Compiler:
    """In Inductor's place: sees whether two ranks compile at the same time."""

    def __init__(self, monkeypatch, folder):
        monkeypatch.setenv("MASTER_PORT", "29400")
        monkeypatch.setattr(internals.tempfile, "gettempdir", lambda: str(folder))
        monkeypatch.setattr(internals, "_cache_dir", lambda: str(folder))
        monkeypatch.setattr(internals, "lookup_backend", lambda name: self)
        monkeypatch.setattr(internals, "remembered_probes", contextlib.nullcontext)  # ranks are threads here

    def __call__(self, graph, inputs, config_patches):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(self.patience)
            self.met = True
        return "compiled"

    def at_once(self, graphs, patience):
        """Whether two ranks meet in the compiler, where each waits so many seconds for the other."""
        self.meeting, self.patience, self.met, results = threading.Barrier(2), patience, False, []
        ranks = [threading.Thread(target=lambda g=g: results.append(internals.inductor(g, []))) for g in graphs]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert results == ["compiled", "compiled"]
        return self.met


def test_ranks_take_turns_until_each_graph_was_compiled_once(monkeypatch, tmp_path):
    graphs = [traced(), traced(shape=(5,))]  # as on one GPU each
    compiler = Compiler(monkeypatch, tmp_path)
    assert not compiler.at_once(graphs, patience=0.3)
    assert compiler.at_once(graphs, patience=60)
    assert not compiler.at_once([traced(constant=5.0)] * 2, patience=0.3)


def test_where_no_note_can_be_left_ranks_take_turns_every_time(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, tmp_path)
    (tmp_path / "decentfn").write_text("a file where the folder should be")
    for _ in range(2):
        assert not compiler.at_once([traced()] * 2, patience=0.3)


def test_a_compilation_that_fails_leaves_no_note_and_frees_the_lock(monkeypatch, tmp_path):
    Compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(internals, "lookup_backend", lambda name: lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            internals.inductor(traced(), [])
    assert not (tmp_path / "decentfn").exists()
