"""Ranks of one machine share what Inductor compiled."""

import contextlib
import os
import stat
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from decentfn.engine import cache as compile_cache
from decentfn.torch_private import inductor

pytestmark = pytest.mark.thorough

GRAPH = torch.fx.GraphModule({}, torch.fx.Graph())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where the ranks of a machine meet; they are threads here."""
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setattr(compile_cache, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(compile_cache, "without_faults", contextlib.nullcontext)
    return tmp_path


def on_three_ranks(monkeypatch, compiler):
    """Return the results of three ranks, which are threads, with this compiler."""
    monkeypatch.setattr(compile_cache, "lookup_backend", lambda name: compiler)
    results = []
    ranks = [threading.Thread(target=lambda: results.append(compile_cache.inductor(GRAPH, []))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return results


def test_one_rank_compiles_and_then_the_others_go_on_together(monkeypatch, folder):
    calls, others, was_alone = [], threading.Barrier(2), []

    def compiler(graph, inputs, config_patches):
        calls.append(graph)
        if len(calls) == 1:
            time.sleep(0.3)
            was_alone.append(len(calls) == 1)
        else:
            others.wait(60)
        return "compiled"

    assert on_three_ranks(monkeypatch, compiler) == ["compiled"] * 3 and was_alone == [True]


def test_a_compilation_that_fails_frees_the_lock(monkeypatch, folder):
    monkeypatch.setattr(compile_cache, "lookup_backend", lambda name: lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compile_cache.inductor(GRAPH, [])


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
    monkeypatch.setattr(
        inductor,
        "os",
        SimpleNamespace(**{**vars(os), "stat": lambda path: SimpleNamespace(st_uid=7), "getuid": lambda: 8}),
    )
    with pytest.warns(UserWarning, match="belongs to another user.*TORCHINDUCTOR_CACHE_DIR"):
        inductor.cache_dir()


def test_a_file_that_a_kill_has_damaged_is_removed_and_compiled_again_on_all_ranks(monkeypatch, folder, caplog):
    files = [folder / "il" / f"{name}.main.so" for name in "xy"]
    files[0].parent.mkdir()
    for file in files:
        file.touch()

    def compiler(graph, inputs, config_patches):
        for file in files:
            if not file.exists():
                file.write_bytes(b"code")
            if not file.read_bytes():
                raise ImportError(f"{file}: file too short")
        return "compiled"

    assert on_three_ranks(monkeypatch, compiler) == ["compiled"] * 3
    assert [str(file) in said for file, said in zip(files, caplog.messages, strict=True)] == [True, True]


@pytest.mark.parametrize("where", ["/elsewhere/x.so", "{}/il/x.so"])
def test_what_cannot_be_loaded_twice_or_lies_elsewhere_is_an_error(monkeypatch, folder, where):
    calls, elsewhere = [], where.format(folder)

    def compiler(graph, inputs, config_patches):
        calls.append(graph)
        raise OSError(f"{elsewhere}: file too short")

    monkeypatch.setattr(compile_cache, "lookup_backend", lambda name: compiler)
    with pytest.raises(OSError, match="too short"):
        compile_cache.inductor(GRAPH, [])
    assert len(calls) == (2 if "{" in where else 1)
