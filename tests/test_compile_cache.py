"""Ranks of one machine share what Inductor compiled."""

import contextlib
import os
import stat
import subprocess
import sys
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
                file.write_bytes(b"code" * 20)
            if file.read_bytes() != b"code" * 20:
                raise ImportError(f"{file}: file too short")
        return "compiled"

    assert on_three_ranks(monkeypatch, compiler) == ["compiled"] * 3
    assert caplog.messages == ["removed 2 file(s) of Inductor's cache that a kill or a full disk had damaged"]


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


_PROGRAM = """
import logging, torch, decentfn as df
logging.basicConfig()
init, step = df.adapt_while_communicate(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.1), df.topology("complete", 1))
_, metrics = df.compile(step)(init(torch.zeros(300)), torch.ones(4, 300), 0)
print("loss", float(metrics.loss))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 2000])
def test_a_cache_whose_libraries_were_all_cut_off_is_made_again(kept, tmp_path):
    """Also the library with which Inductor tries the CPU's vector instructions."""
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    variables["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # they take longer than these few kernels
    variables.pop("TORCHINDUCTOR_VEC_ISA_OK", None)

    def run():
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=variables, timeout=300
        )
        assert done.returncode == 0 and done.stdout == "loss 1.0\n", done.stderr
        return done.stderr

    assert "damaged" not in run()
    libraries = list(tmp_path.rglob("*.so"))
    assert any(".main" not in library.name for library in libraries)  # the trial's
    for library in libraries:
        os.truncate(library, kept)
    assert "damaged" in run()
