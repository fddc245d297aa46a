"""The examples and the README's code run as they stand: simulated here, under torchrun in processes of their own."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import tyro

import decentfn as df

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "5", "--warmup", "2", "--layers", "1", "--dim", "16", "--heads", "2", "--batch-size", "2"]
TINY += ["--seq-len", "32", "--log-every", "2", "--eval-bytes", "1024", "--no-compile"]


def load(name):
    if str(ROOT / "examples") not in sys.path:  # as Python does for a script
        sys.path.insert(0, str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(example, *arguments, ranks=0, code=0):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == code, finished.stderr
    return finished


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_consensus_mean_knows_the_digits_that_no_worker_has_seen_alone():
    assert load("digits").main(steps=200, simulate=4) > 0.93


@pytest.mark.slow
def test_digits_say_the_same_under_torchrun_and_simulated():
    under_torchrun = run("digits.py", "--steps", "30", ranks=2).stdout
    assert under_torchrun.startswith("2 workers: held-out accuracy")
    assert under_torchrun == run("digits.py", "--steps", "30", "--simulate", "2").stdout


def test_digits_stay_at_their_smallest():
    assert len((ROOT / "examples" / "digits.py").read_text().splitlines()) <= 85


@pytest.mark.one_in(2)
@pytest.mark.parametrize("algorithm", ["adapt-while-communicate", "all-reduce"])
def test_the_language_model_logs_the_same_under_torchrun_and_simulated(algorithm, tmp_path):
    options = [*TINY, "--algorithm", algorithm, "--out"]
    shown = run("train_lm.py", *options, str(tmp_path / "ranks.jsonl"), ranks=2)
    said = run("train_lm.py", *options, str(tmp_path / "simulated.jsonl"), "--simulate", "2").stderr
    assert "Warning" not in said  # of vmap, about which nobody can do anything
    ranks, simulated = lines(tmp_path / "ranks.jsonl"), lines(tmp_path / "simulated.jsonl")

    assert "it/s" not in shown.stderr  # no progress bar without a terminal
    assert len(ranks) == len(simulated)
    head, *steps, end = ranks
    assert re.fullmatch("[0-9a-f]{64}", head["corpus_sha256"])
    assert [line["step"] for line in steps] == [0, 2, 4]
    for line, other in zip(steps, simulated[1:-1], strict=True):
        assert line["loss"] == pytest.approx(sum(line["losses"]) / 2, rel=1e-6)
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["consensus_distance"] == pytest.approx(other["consensus_distance"], rel=1e-3, abs=1e-5)
        assert line["bytes_sent"] == other["bytes_sent"] > 0
        assert line["tokens_per_s"] > 0
    assert len(end["bits_per_byte"]["replicas"]) == 2
    assert end["bits_per_byte"]["bigram"] < end["bits_per_byte"]["unigram"] < 8


def trained_on_ranks(path, config):
    """The last line of the log, and each step's mean loss."""
    try:
        module = load("train_lm")
        end = module.main(tyro.cli(module.Config, args=[*config, "--out", path]))
        steps = lines(Path(path))[1:-1] if df.init().rank == 0 else []
        return end["bits_per_byte"], [line["loss"] for line in steps]
    finally:
        df.init(processes_per_worker=1)


def test_two_workers_in_shards_train_the_language_model_as_four_workers_do(ranks, tmp_path):
    """By the mean gradient of the same four batches."""
    options, four = [*TINY, "--algorithm", "all-reduce", "--clip", "1e9"], ranks(4).run
    bits, losses = four(trained_on_ranks, str(tmp_path / "2"), [*options, "--processes-per-worker", "2"])[0]
    expected, of_four = four(trained_on_ranks, str(tmp_path / "4"), options)[0]
    assert losses == pytest.approx(of_four, rel=1e-5)
    assert bits["consensus_mean"] == pytest.approx(expected["consensus_mean"], rel=1e-5)
    assert bits["replicas"] == pytest.approx([bits["consensus_mean"]] * 2)


def test_the_language_model_is_shared_by_tensor_parallel_processes_too(ranks, tmp_path):
    """With one batch for each of two workers."""
    options = [*TINY, "--algorithm", "all-reduce", "--clip", "1e9"]
    config = [*options, "--processes-per-worker", "2", "--inside", "tensor"]
    bits, losses = ranks(4).run(trained_on_ranks, str(tmp_path / "tensor"), config)[0]
    expected, of_alike = ranks(2).run(trained_on_ranks, str(tmp_path / "alike"), options)[0]
    assert losses == pytest.approx(of_alike, rel=1e-5)
    assert bits["consensus_mean"] == pytest.approx(expected["consensus_mean"], rel=1e-5)
    assert bits["replicas"] == pytest.approx([bits["consensus_mean"]] * 2)


def test_a_language_model_that_is_stopped_goes_on_as_if_it_had_not_been(language_model, tmp_path, monkeypatch):
    def train(name, *arguments):
        options = [*TINY, "--layers", "0", "--simulate", "2", "--out", str(tmp_path / name), *arguments]
        end = language_model.main(tyro.cli(language_model.Config, args=options))
        return end["bits_per_byte"], [(line["step"], line["loss"]) for line in lines(tmp_path / name) if "loss" in line]

    whole = train("whole")
    options = ("--checkpoint", str(tmp_path / "run"), "--save-every", "4")
    record, shown = df.logs.JSONLines.record, []

    def tell_at_the_second(*arguments, **more):
        shown.append(more)
        if len(shown) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(df.logs.JSONLines, "record", tell_at_the_second)
        with pytest.raises(SystemExit) as leaving:
            train("parts", *options)
    assert leaving.value.code == 0 and lines(tmp_path / "run" / "preempted.json") == [{"step": 3}]
    assert train("parts", *options) == whole and not (tmp_path / "run" / "preempted.json").exists()


def test_one_worker_alone_sends_nothing(language_model, tmp_path):
    language_model.main(tyro.cli(language_model.Config, args=[*TINY, "--out", str(tmp_path / "alone.jsonl")]))
    *steps, end = lines(tmp_path / "alone.jsonl")[1:]
    assert [line["bytes_sent"] for line in steps] == [0, 0, 0]
    assert end["bits_per_byte"]["replicas"] == [pytest.approx(end["bits_per_byte"]["consensus_mean"])]


@pytest.fixture(scope="module")
def language_model():
    return load("train_lm")


def ends(script, arguments, capsys):
    """Return a script's output and exit code for these arguments; None if it succeeds."""
    try:
        if script.__name__ == "digits":
            with mock.patch.object(sys, "argv", ["digits.py", *arguments]):
                script.run(script.main)
        else:
            script.main(tyro.cli(script.Config, args=arguments))
        code = None
    except SystemExit as left:
        code = left.code
    shown = capsys.readouterr()
    return " ".join(re.sub("[│─╭╮╰╯]", " ", shown.out + shown.err).split()), code


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "train_lm: --steps 0: it is at least 1"),
        (["--warmup", "100", "--steps", "40"], "train_lm: --warmup 100 --steps 40: the warm-up"),
        (["--warmup", "-1"], "train_lm: --warmup -1 --steps 5: the warm-up"),
        (["--dim", "128", "--heads", "3"], "train_lm: --dim 128 --heads 3: the heads share"),
        (["--dim", "0"], "train_lm: --dim 0: it is at least 1"),
        (["--heads", "0"], "train_lm: --heads 0: it is at least 1"),
        (["--seq-len", "0"], "train_lm: --seq-len 0: it is at least 1"),
        (["--seq-len", "1000000000"], "train_lm: --seq-len 1000000000: there are"),
        (["--batch-size", "0"], "train_lm: --batch-size 0: it is at least 1"),
        (["--layers", "-1"], "train_lm: --layers -1: it is at least 0"),
        (["--save-every", "0"], "train_lm: --save-every 0: it is at least 1"),
        (["--log-every", "0"], "train_lm: --log-every 0: it is at least 1"),
        (["--eval-bytes", "0"], "train_lm: --eval-bytes 0: it is at least 1"),
        (["--simulate", "-1"], "train_lm: --simulate -1: it is at least 0"),
        (["--processes-per-worker", "0"], "train_lm: --processes-per-worker 0: it is at least 1"),
        (["--processes-per-worker", "2", "--simulate", "2"], "train_lm: --processes-per-worker 2: neither --simulate"),
        (["--processes-per-worker", "3", "--inside", "tensor"], "train_lm: --inside tensor --dim 16: 3 processes"),
        (["--processes-per-worker", "2"], "train_lm: init(processes_per_worker=2): the number must divide 1"),
        (["--learning-rate", "-1"], "train_lm: warmup_cosine(peak=-1.0)"),
        (["--clip", "0"], "train_lm: clip_by_global_norm(max_norm=0.0)"),
        (["--topology", "nope"], "train_lm: topology('nope'): no such topology"),
        (
            ["--topology", "graph"],
            "train_lm: --topology graph: graph() missing 1 required keyword-only argument: 'graph'",
        ),
        (
            ["--topology", "ring", "--topology-args", "foo=1"],
            "train_lm: --topology ring: ring(foo=...): there is no such argument",
        ),
        (["--algorithm-args", "gamma"], "train_lm: --algorithm-args gamma: expected name=value"),
        (["--algorithm-args", "gamma=2"], "train_lm: adapt_while_communicate(gamma=2)"),
        (["--algorithm-args", "gama=0.5"], "there is no such argument; write gamma=; there are gamma"),
        (["--algorithm-args", "x=open('a')"], "train_lm: --algorithm-args x=open('a'): malformed"),
        (
            ["--algorithm", "choco-sgd", "--algorithm-args", "gamma=0.3", "compressor=top_k(2)"],
            "train_lm: --algorithm-args compressor=top_k(2): top_k(fraction=2): fraction lies",
        ),
        (["--algorithm", "choco-sgd", "--algorithm-args", "gamma=0.3", "compressor=none"], "train_lm: choco_sgd"),
        (["--accumulate", "0"], "train_lm: --accumulate 0: it is at least 1"),
        (["--loader-workers", "-1"], "train_lm: --loader-workers -1: it is at least 0"),
        (["--eval-every", "0"], "train_lm: --eval-every 0: it is at least 1"),
        (["--ema", "1"], "train_lm: ema(decay=1.0)"),
        (["--wire-dtype", "int8"], "invalid choice 'int8'"),
        (["--device", "cuda"], "train_lm: --device cuda: "),
        (["--backend", "mpi"], "invalid choice 'mpi'"),
        (["--batch-size", "10000000"], "train_lm: shards(num_samples="),
        (["--topology", "ring", "--simulate", "3"], "train_lm: ring(num_workers=3)"),
        (["--algorithm", "choco-sgd"], "train_lm: --algorithm choco-sgd: choco_sgd() missing 2 required"),
        (["--algorithm", "nope"], "invalid choice 'nope'"),
        (["--algorithm", "extra", "--simulate", "4"], "train_lm: extra: 'base' has period 2"),
        (["--out", str(ROOT / "README.md" / "log")], "README.md: a file is where a directory is needed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_language_model_cannot_do_it_says_in_a_sentence(language_model, arguments, sentence, tmp_path, capsys):
    said, code = ends(language_model, [*TINY, "--out", str(tmp_path / "log"), *arguments], capsys)
    assert code == 2 and sentence in said


@pytest.mark.parametrize("steps", [1, 3, 40, 500, 5000])
def test_a_run_of_any_length_has_a_warm_up_that_ends_before_it(language_model, steps):
    warmup = language_model.Config(steps=steps).warmup_steps
    assert warmup <= steps / 10 and (warmup == 50) == (steps >= 500)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "1", "--warmup", "None"],
        ["--seq-len", "64", "--eval-bytes", "1"],
        ["--layers", "0", "--seed", "-1"],
        ["--topology", "hierarchical", "--simulate", "4", "--layers", "0"],
        ["--topology", "grid", "--topology-args", "rows=2", "--simulate", "4", "--layers", "0"],
        [
            "--algorithm",
            "choco-sgd",
            "--algorithm-args",
            "gamma=0.3",
            "compressor=top_k(0.1)",
            "--simulate",
            "2",
            "--layers",
            "0",
        ],
        [
            "--accumulate",
            "2",
            "--autocast",
            "--ema",
            "0.9",
            "--wire-dtype",
            "bfloat16",
            "--loader-workers",
            "1",
            "--eval-every",
            "2",
        ],
    ],
    ids=" ".join,
)
def test_what_is_small_or_odd_and_can_be_done_is_done(language_model, arguments, tmp_path, capsys):
    said, code = ends(language_model, [*TINY, "--out", str(tmp_path / "log"), *arguments], capsys)
    assert code is None and "bits per byte, consensus" in said


def test_every_algorithm_is_on_offer(language_model):
    assert {name.replace("-", "_") for name in language_model.ALGORITHMS} == set(df.algorithms.__all__)


def test_a_second_run_does_not_write_over_the_first(language_model, tmp_path, capsys):
    options = [*TINY, "--layers", "0", "--steps", "1", "--warmup", "0", "--out", str(tmp_path / "log.jsonl")]
    for name in ("log.jsonl", "log-2.jsonl"):
        said, _ = ends(language_model, options, capsys)
        assert said.endswith(name) or f"{name} picture" in said
        assert len(lines(tmp_path / name)) == 3


def heeding_ctrl_c():
    """Also where the shell that started pytest in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(tmp_path, *arguments):
    """Return the script's output and exit code after Ctrl-C at the first line of its loop."""
    options = [
        *TINY,
        "--steps",
        "100000",
        "--log-every",
        "1",
        "--layers",
        "0",
        "--out",
        str(tmp_path / "log"),
        *arguments,
    ]
    command = [sys.executable, "-u", str(ROOT / "examples" / "train_lm.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=heeding_ctrl_c, **pipes)
    for line in process.stdout:
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    _, said = process.communicate(timeout=300)
    return said, process.returncode


def test_ctrl_c_ends_with_a_sentence(tmp_path):
    said, code = interrupted(tmp_path)
    assert code == 130 and said.splitlines()[-1].startswith("train_lm: interrupted; with --checkpoint")
    assert "Traceback" not in said


def test_ctrl_c_saves_where_there_is_a_place_to(tmp_path):
    said, code = interrupted(tmp_path, "--checkpoint", str(tmp_path / "run"))
    assert code == 0 and "Traceback" not in said
    [stopped] = lines(tmp_path / "run" / "preempted.json")
    assert df.checkpoint.latest(tmp_path / "run").name == f"checkpoint-000001-step-{stopped['step']}"


@pytest.mark.slow
def test_ranks_say_a_sentence_once():
    said = run("train_lm.py", *TINY, "--topology", "nope", ranks=2, code=1).stderr  # torchrun's own code
    assert said.count("train_lm: topology('nope')") == 1 and "in topology" not in said  # no traceback
    said = run("train_lm.py", "--steps", "0", ranks=2, code=1)
    assert (said.stdout + said.stderr).count("it is at least 1") == 1


@pytest.mark.parametrize(
    ("example", "arguments", "sentence"),
    [
        ("digits", ["--topology", "nope"], "digits: topology('nope')"),
        (
            "digits",
            ["--device", "cuda"],
            "digits: --device cuda: the processes compute on cpu; a GPU is needed for each",
        ),
        ("digits", ["--device", "tpu"], "invalid choice 'tpu'"),
        ("digits", ["--topology", "hierarchical"], "digits: hierarchical() missing 1 required keyword-only argument"),
        ("digits", ["--simulate", "-1"], "digits: base(num_workers=-1)"),
        ("digits", ["--simulate", "2048"], "digits: fixed_shards(parts): part 1437"),
        ("heterogeneity", ["--methods", "foo"], "invalid choice 'foo'"),
        ("heterogeneity", ["--methods"], "--methods: the table needs at least one"),
        ("heterogeneity", ["--alphas"], "--alphas: the table needs at least one"),
        ("heterogeneity", ["--alphas", "-1"], "dirichlet_shards(alpha=-1.0)"),
        ("heterogeneity", ["--seeds", "0"], "--seeds 0: it is at least 1"),
        ("heterogeneity", ["--batch-size", "0"], "--batch-size 0: it is at least 1"),
        ("heterogeneity", ["--num-workers", "5000"], "num_workers=5000"),
        ("heterogeneity", ["--picture", "picture"], "--picture picture: the name of a file that ends in .png"),
        ("heterogeneity", ["--steps", "-1"], "--steps -1: it is at least 0"),
    ],
)
def test_what_the_experiments_cannot_do_they_say_in_a_sentence(example, arguments, sentence, capsys):
    said, code = ends(load(example), arguments, capsys)
    assert code == 2 and sentence in said


@pytest.mark.slow
def test_the_ddp_script_and_the_one_that_replaces_it_learn_the_digits_alike(tmp_path):
    def said(script, folder):
        options = ("--steps", "30", "--checkpoint", str(tmp_path / folder))
        return run(f"from_ddp/{script}.py", *options, ranks=2).stdout.splitlines()

    _, before = said("ddp", "before")
    _, after = said("decent", "after")
    for line in (before, after):
        assert float(line.removeprefix("accuracy on the test set: ")) > 0.85
    assert said("decent", "after") == [after]  # nothing is left to train


def test_what_the_page_shows_of_both_scripts_is_in_them():
    def code(text):  # ruff, which formats the page too, has other blank lines there
        return "\n".join(line for line in text.splitlines() if line.strip())

    page = (ROOT / "docs" / "coming_from_ddp.md").read_text()
    scripts = [code((ROOT / "examples" / "from_ddp" / f"{name}.py").read_text()) for name in ("ddp", "decent")]
    pairs = re.findall(r"```py\n(.*?)```\n\n```py\n(.*?)```", page, re.DOTALL)
    assert len(pairs) >= 6 and page.count("```py\n") == 2 * len(pairs)
    for pair in pairs:
        for shown, script in zip(pair, scripts, strict=True):
            assert code(textwrap.indent(shown, "    ")) in script, shown


def test_heterogeneity_ends_with_a_picture_of_its_table(tmp_path, capsys):
    script, path = load("heterogeneity"), tmp_path / "new" / "table.png"
    few = {"steps": 2, "seeds": 2, "alphas": (10.0, 1.0), "methods": ("all-reduce", "D²"), "num_workers": 4}
    results = script.main(script.Config(picture=path, **few))
    assert path.read_bytes().startswith(b"\x89PNG") and f"The picture: {path}" in capsys.readouterr().out
    own, mean_model = script.picture(results).axes
    for axes, field in ((own, "local"), (mean_model, "consensus")):
        for alpha, dots in zip(few["alphas"], axes.containers, strict=True):
            values = [100 * sum(getattr(r, field) for r in results[name][alpha]) / 2 for name in few["methods"]]
            assert dots.lines[0].get_xdata().tolist() == pytest.approx(values)


def test_the_readme_step_runs_as_it_stands_and_finds_the_weights(capsys):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    namespace = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["params"]["w"].tolist() == pytest.approx([1, 2, 3], abs=0.3)
    distance = namespace["df"].consensus_distance(namespace["state"])
    assert (
        distance < 0.1
        and f"{namespace['params']['w']}, and the workers are {distance:.4f} away" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_methods_behind_slow_links_are_compared_and_not_run_twice(tmp_path):
    tiny = ["--steps", "4", "--evaluations", "2", "--hosts", "2", "--mbit", "0", "--seeds", "0", "--out", str(tmp_path)]
    methods = ["DDP, bf16", "one-peer gossip, bf16"]
    first = run("slow_links.py", "--methods", *methods, *tiny).stdout
    assert all(method in first for method in methods)
    curves = {path.name: lines(path)[0]["curve"] for path in tmp_path.glob("*.json")}
    assert len(curves) == 2 and (tmp_path / "slow_links.png").read_bytes().startswith(b"\x89PNG")
    for curve in curves.values():
        assert [point["step"] for point in curve] == [2, 4] and 0 < curve[1]["bits_per_byte"] < 8
    again = run("slow_links.py", "--methods", *methods, *tiny).stdout
    assert ", seed 0:" in first and ", seed 0:" not in again
