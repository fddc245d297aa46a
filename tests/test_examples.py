"""The examples and the README's code run as they stand: simulated here, under torchrun in processes of their own."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "5", "--warmup", "2", "--layers", "1", "--dim", "16", "--heads", "2", "--batch-size", "2"]
TINY += ["--seq-len", "32", "--log-every", "2", "--eval-bytes", "1024", "--no-compile"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(example, *arguments, ranks=0):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_consensus_mean_knows_the_digits_that_no_worker_has_seen_alone():
    assert load("digits").main(steps=200, simulate=4) > 0.93


def test_digits_say_the_same_under_torchrun_and_simulated():
    under_torchrun = run("digits.py", "--steps", "30", ranks=2).stdout
    assert under_torchrun.startswith("2 workers: held-out accuracy")
    assert under_torchrun == run("digits.py", "--steps", "30", "--simulate", "2").stdout


def test_digits_stay_at_their_smallest():
    assert len((ROOT / "examples" / "digits.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("algorithm", ["adapt-while-communicate", "adapt-then-combine", "all-reduce"])
def test_the_language_model_logs_the_same_under_torchrun_and_simulated(algorithm, tmp_path):
    options = [*TINY, "--algorithm", algorithm, "--out"]
    shown = run("train_lm.py", *options, str(tmp_path / "ranks.jsonl"), ranks=2)
    run("train_lm.py", *options, str(tmp_path / "simulated.jsonl"), "--simulate", "2")
    ranks, simulated = lines(tmp_path / "ranks.jsonl"), lines(tmp_path / "simulated.jsonl")

    assert "it/s" not in shown.stderr  # no progress bar without a terminal
    assert len(ranks) == len(simulated)
    head, *steps, end = ranks
    assert re.fullmatch("[0-9a-f]{64}", head["corpus_sha256"])
    assert [line["step"] for line in steps] == [0, 2, 4]
    for line, other in zip(steps, simulated[1:-1], strict=True):
        assert line["loss"]["min"] <= line["loss"]["mean"] <= line["loss"]["max"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["consensus_distance"] == pytest.approx(other["consensus_distance"], rel=1e-3, abs=1e-5)
        assert line["bytes_sent"] == other["bytes_sent"] > 0
        assert line["tokens_per_s"] > 0
    assert len(end["bits_per_byte"]["replicas"]) == 2
    assert end["bits_per_byte"]["bigram"] < end["bits_per_byte"]["unigram"] < 8


def test_one_worker_alone_sends_nothing(tmp_path):
    run("train_lm.py", *TINY, "--out", str(tmp_path / "alone.jsonl"))
    *steps, end = lines(tmp_path / "alone.jsonl")[1:]
    assert [line["bytes_sent"] for line in steps] == [0, 0, 0]
    assert end["bits_per_byte"]["replicas"] == [pytest.approx(end["bits_per_byte"]["consensus_mean"])]


def test_the_readme_step_runs_as_it_stands_and_finds_the_weights():
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    namespace = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["params"]["w"].tolist() == pytest.approx([1, 2, 3], abs=0.3)
    assert namespace["df"].consensus_distance(namespace["state"]) < 0.1
