"""Ranks of one machine share what Inductor compiled."""

import contextlib
import os
import stat
import threading
from types import SimpleNamespace

import pytest
import torch

import decentfn as df
from decentfn import compile_cache
from decentfn.torch_private import inductor


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
    notes = [compile_cache.note_of(traced(), {"a": 1}), compile_cache.note_of(traced(constant=3.0), {"a": 1})]
    notes += [compile_cache.note_of(traced(shape=(4, 3)), {"a": 1}), compile_cache.note_of(traced(), {"a": 2})]
    notes += [compile_cache.note_of(traced(dtype=torch.float64), {"a": 1})]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    notes += [compile_cache.note_of(traced(), {"a": 1})]
    monkeypatch.setattr(compile_cache, "digest_of_sources", lambda: "other sources")
    notes += [compile_cache.note_of(traced(), {"a": 1})]
    assert len(set(notes)) == len(notes)
    assert compile_cache.note_of(traced(), {"a": 1, "pass": object()}) == notes[-1]


class Compiler:
    """In Inductor's place: sees whether two ranks compile at the same time."""

    def __init__(self, monkeypatch, folder):
        monkeypatch.setenv("MASTER_PORT", "29400")
        monkeypatch.setattr(compile_cache, "cache_dir", lambda: str(folder))
        monkeypatch.setattr(compile_cache, "lookup_backend", lambda name: self)
        monkeypatch.setattr(compile_cache, "remembered_probes", contextlib.nullcontext)  # ranks are threads here

    def __call__(self, graph, inputs, config_patches):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(self.patience)
            self.met = True
        return "compiled"

    def at_once(self, graphs, patience):
        """Whether two ranks meet in the compiler, where each waits so many seconds for the other."""
        self.meeting, self.patience, self.met, results = threading.Barrier(2), patience, False, []
        ranks = [threading.Thread(target=lambda g=g: results.append(compile_cache.inductor(g, []))) for g in graphs]
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
    monkeypatch.setattr(compile_cache, "lookup_backend", lambda name: lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compile_cache.inductor(traced(), [])
    assert not (tmp_path / "decentfn").exists()


def test_the_cache_is_its_owners_alone_unless_somebody_chose_its_place(monkeypatch, tmp_path):
    def mode(path):
        return stat.S_IMODE(os.stat(path).st_mode)

    chosen = tmp_path / "chosen"
    chosen.mkdir(mode=0o750)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(chosen))
    assert inductor.cache_dir() == str(chosen) and mode(chosen) == 0o750
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = inductor.cache_dir()
    assert own.startswith(str(tmp_path)) and mode(own) == 0o700
    monkeypatch.setattr(inductor, "os", SimpleNamespace(stat=lambda path: SimpleNamespace(st_uid=7), getuid=lambda: 8))
    with pytest.warns(UserWarning, match="belongs to another user.*TORCHINDUCTOR_CACHE_DIR"):
        inductor.cache_dir()


@pytest.mark.parametrize("wrap", [lambda loss_fn: loss_fn, df.autograd])
def test_a_damaged_file_in_the_cache_is_named_with_the_way_out(wrap):
    def backend(graph, inputs):
        raise OSError("/cache/il/x.main.so: file too short")

    init, step = df.all_reduce(wrap(lambda x, batch: (x - batch).sum()), df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(RuntimeError, match="x.main.so: file too short. A file in Inductor's cache is damaged.*delete "):
        df.compile(step, backend=backend)(init(torch.ones(2)), torch.ones(2), 0)
