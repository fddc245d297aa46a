"""The benchmark runs as it stands: small networks, two ranks, and what it counts is right."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent


def benchmark(tmp_path, *arguments, launcher=(), code=0):
    """Run the benchmark; what it printed and the JSON that it wrote."""
    out = tmp_path / "out.json"
    command = [sys.executable, *launcher, str(ROOT / "examples" / "benchmark.py"), "--json", str(out), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.splitlines()[-1].startswith("benchmark: could not run ")
    return done.stdout, json.loads(out.read_text())


QUICK = ["--small", "--blocks", "2", "--steps", "8"]


def test_every_peer_runs_beside_the_others_and_sends_what_it_says(tmp_path):
    peers = ["decentfn:mode=eager", "decentfn:mode=eager,wire=bfloat16", "decent-dp", "ddp:view=True,bucket_mb=1"]
    peers += [
        "ddp:hook=bf16",
        "ddp:mode=compiled",
        "fsdp2",
        "periodic:every=4",
        "alone",
        "decentfn:algorithm=all_reduce,mode=eager",
    ]
    broken = "decentfn:mode=eager,topology=nowhere"
    shown, result = benchmark(tmp_path, "--workload", "mlp", *QUICK, "--no-floors", "--peers", *peers, broken, code=1)
    rows = {row["peer"]: row for row in result["rows"]}
    # A peer that cannot run is reported, the others are measured, and the exit code is 1.
    assert "nowhere" in rows.pop(broken)["failure"] and "failed: ValueError" in shown
    assert list(rows) == peers and all(peer in shown for peer in peers)
    assert [row["failure"] for row in rows.values()] == [None] * len(peers)
    assert rows["ddp:mode=compiled"]["graphs"] == 1 and rows["ddp:hook=bf16"]["graphs"] == 0
    parameters = 4 * (64 * 128 + 2 * 128 * 128 + 128 * 10 + 3 * 128 + 10)
    assert rows["decentfn:mode=eager"]["payload_bytes"] == parameters
    assert rows["decentfn:mode=eager,wire=bfloat16"]["payload_bytes"] == parameters / 2
    for row in rows.values():
        assert row["step_s"]["q1"] <= row["step_s"]["median"] <= row["step_s"]["q3"]
        assert row["samples_per_s"] == 2 * result["batch_size"] / row["step_s"]["median"]
        assert row["block_steps"] == 8 and len(row["blocks_s"]) == 2


@pytest.mark.slow
def test_torchrun_starts_it_too_and_it_draws_a_plot(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["--workload", "tiny", "--plot", str(tmp_path / "plot.png"), *QUICK]
    shown, result = benchmark(tmp_path, *arguments, "--peers", "decentfn:mode=eager", launcher=launcher)
    rows = {row["peer"]: row for row in result["rows"]}
    assert result["workers"] == 2 and rows["decentfn:mode=eager"]["over_raw"] > 0 and "decentfn:mode=eager" in shown
    compute, ours = rows["floor:kind=compute"]["step_s"]["median"], rows["decentfn:mode=eager"]
    assert ours["efficiency"] == compute / ours["step_s"]["median"] and "samples/s" in shown
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_its_own(tmp_path):
    _, rows = benchmark(tmp_path, "--memory", "--workload", "mlp", "--small", "--workers", "1", "--peers", "alone")
    assert rows[0]["peak_bytes"][0] > rows[0]["added_bytes"][0] > 0 and rows[0]["failure"] is None


@pytest.mark.slow
def test_donated_and_by_autograd_a_rank_adds_the_memory_of_a_second_state(tmp_path):
    """Not compiled, a new state is computed before it is copied over the old one: of parameters and two moments, 2.3 of Decent-DP's."""
    peers = ["decent-dp", "decentfn:mode=donated,gradient=autograd"]
    _, rows = benchmark(tmp_path, "--memory", "--workload", "mlp", "--peers", *peers)
    assert [row["failure"] for row in rows] == [None, None]
    theirs, ours = (max(row["added_bytes"]) for row in rows)
    assert 0 < ours <= 2.6 * theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bare_exchange_posts_receives_first_and_as_many_bytes_as_there_are_parameters(monkeypatch, dtype):
    import torch

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from benchmarking.by_hand import BareExchange

    posted = []
    work = SimpleNamespace(wait=lambda: posted.append(("wait", 0)))

    def call(kind):
        return lambda tensors, rank, tag: posted.append((kind, sum(x.nbytes for x in tensors))) or work

    group = SimpleNamespace(send=call("send"), recv=call("recv"))
    exchange = BareExchange(4 * 10_000_000, rank=1, size=2, dtype=getattr(torch, dtype), group=group)
    exchange.post(0)
    exchange.wait()
    kinds = [kind for kind, _ in posted]
    assert kinds == sorted(kinds, key=["recv", "send", "wait"].index)
    width = getattr(torch, dtype).itemsize
    assert sum(n for kind, n in posted if kind == "send") == 10_000_000 * width
    assert sum(n for kind, n in posted if kind == "recv") == 10_000_000 * width


def test_a_ratio_is_over_the_floor_of_the_same_bytes_or_none(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from benchmarking.report import add_ratios

    seconds = {"floor:kind=compute": 1, "floor:kind=exchange": 4, "floor:kind=exchange,wire=bfloat16": 2}
    seconds |= {"decentfn": 5, "decentfn:wire=bfloat16": 3, "ddp:hook=bf16": 6, "decentfn:wire=float16": 3}
    rows = [{"peer": peer, "step_s": {"median": median}} for peer, median in seconds.items()]
    rows = add_ratios({"workers": 2, "batch_size": 1, "rows": rows}, None)["rows"]
    assert [row.get("over_floor") for row in rows[3:]] == [5 / 4, 3 / 2, 6 / 2, None]


def test_decent_dp_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name in ("decent_dp", "decent_dp.ddp"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    from benchmarking import peers, report
    from benchmarking.workloads import workload

    with pytest.raises(ModuleNotFoundError, match="Decent-DP is not installed: pip install decent-dp"):
        peers.build("decent-dp", workload("tiny"), 0, 1)
    bad = {"peer": "decent-dp", "failure": "Decent-DP is not installed"}
    result = {"rows": [{"peer": "alone", "failure": None}, bad]}
    assert report.failures(result) == ["decent-dp (Decent-DP is not installed)"] == report.failures([bad])
    assert report.failures([{"peer": "decent-dp", "cold": bad, "warm": bad}]) == report.failures(result)


def test_scaling_says_samples_per_second_and_efficiency_and_draws_them(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from benchmarking import report

    def run(scaling, workers, step, samples):
        row = {"peer": "decentfn", "step_s": {"median": step}, "samples_per_s": samples}
        return {"scaling": scaling, "workers": workers, "rows": [row]}

    runs = [run("weak", 1, 0.1, 80), run("weak", 4, 0.125, 256), run("strong", 1, 0.1, 80), run("strong", 4, 0.05, 160)]
    assert report.scaling_table(runs).splitlines()[-1].split() == [
        "decentfn",
        "4",
        "125",
        "256",
        "0.80",
        "50",
        "160",
        "0.50",
    ]
    report.plot_scaling(runs, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("environment", "shared_by"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 2),  # one machine, over its loopback device
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),  # two hosts, and nobody said which interface
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth7"}, 2),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth7"}, 1),
    ],
)
def test_bytes_are_counted_where_they_travel(environment, shared_by, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from benchmarking import measure

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(measure, "_read", lambda path: "1000")
    assert measure.Interface().sent() == (None if shared_by is None else 1000 / shared_by)


def can_make_hosts():
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made


@pytest.mark.slow
def test_workers_of_several_ranks_send_what_workers_of_one_rank_do(tmp_path):
    """A worker of two ranks sends its parameters once; HSDP 2 (H - 1) / H times as much, with H hosts."""
    is_linked = can_make_hosts()
    link = ["--link-mbit", "1000"] if is_linked else []
    ours = ["decentfn:inside=sharded,mode=eager", "decentfn:mode=eager"]
    floor, narrow = "floor:kind=overlap", "decentfn:inside=sharded,mode=donated,wire=bfloat16"
    theirs = ["hsdp", "hsdp:wire=bfloat16"]
    peers = ["floor:kind=allreduce", floor, *ours, narrow, *theirs]
    arguments = ["--workload", "gpt", "--small", "--workers", "2", "--ranks-per-host", "2", *link, "--blocks", "2"]
    arguments += ["--steps", "8", "--no-floors", "--against", theirs[1], floor, "--peers", *peers]
    shown, result = benchmark(tmp_path, *arguments)
    rows = {row["peer"]: row for row in result["rows"]}
    assert (result["workers"], result["ranks_per_host"], result["batch_size"]) == (2, 2, 4) and list(rows) == peers
    assert "2 workers of 2 ranks" in shown
    parameters = 4 * (64 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32 + 32 * 64)
    assert [rows[peer]["payload_bytes"] for peer in peers[:5]] == [parameters] * 4 + [parameters / 2]
    assert rows[narrow]["over"].keys() == {theirs[1], floor} and rows[theirs[1]]["over"].keys() == {floor}
    for peer in peers:  # between hosts alone: what two ranks of one gather and scatter is not counted
        expected = rows[peer]["payload_bytes"] or parameters / (2 if "wire" in peer else 1)
        assert ("wire_bytes" in rows[peer]) == is_linked
        limit = 1.02 if peer in ours else 1.3 if peer in theirs else 1.05
        assert not is_linked or 1 < rows[peer]["wire_bytes"] / expected < limit


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks-per-host", "0"], "--ranks-per-host 0: it is at least 1."),
        (["--ranks-per-host", "2", "--overhead"], "--checkpoints are of one rank each."),
        (["--peers", "hsdq"], "--peers hsdq: known are"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no GPU here"),
        (["--device", "cpu", "--backend", "nccl"], "NCCL moves what is on GPUs, gloo what is not."),
        (["--peers", "ddp", "--against", "hsdp"], "--against hsdp: it is none of the peers compared, floor:kind="),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(arguments, sentence, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import benchmark

    with pytest.raises(SystemExit, match="2"):
        benchmark.checked(benchmark.arguments(), arguments)
    assert sentence in capsys.readouterr().err


def test_peers_of_hosts_say_that_a_host_is_one_rank(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from benchmarking import peers
    from benchmarking.workloads import workload

    for spec in ("hsdp", "decentfn:inside=sharded"):
        with pytest.raises(ValueError, match=f"peer {spec}: a worker is several ranks; say --ranks-per-host 2"):
            peers.build(spec, workload("tiny"), 0, 1)


@pytest.mark.slow
def test_what_a_checkpoint_costs_is_measured(tmp_path):
    arguments = ["--workload", "tiny", "--checkpoints", "--blocks", "2", "--steps", "4", "--folder", str(tmp_path)]
    shown, result = benchmark(tmp_path, *arguments)
    assert "restore" in shown and result["workers"] == 2 and len(result["added"]) == 2
    assert (
        result["save_s"] > 0
        and result["written_s"] > 0
        and result["restore_s"] > 0
        and result["bytes"] > 2 * 3 * 4 * 9000
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_record_appends_one_line_with_its_commit_and_load(tmp_path, monkeypatch):
    record = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))
    main, log = record["main"], tmp_path / "log.jsonl"
    kept = subprocess.run

    def run(command, **options):
        if "--json" not in command:
            return kept(command, **options)
        Path(command[-1]).write_text('{"rows": []}')

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(main.__globals__, "LOG", log)
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    for _ in range(2):
        main(["--workload", "tiny"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["arguments"] for line in lines] == [["--workload", "tiny"]] * 2
    assert lines[0].keys() == {"date", "commit", "arguments", "cores", "processor", "load", "result"}
