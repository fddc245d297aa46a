"""The measurements of `python -m tests.gpu`, as far as they need no GPU: their networks, command lines, memory and goals."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import devices
from tests.gpu import __main__ as command
from tests.gpu import speed

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_the_networks_have_as_many_parameters_as_published(examples):
    """Radford et al. 2019 (the file's count), and torchvision's."""
    from benchmarking.workloads import GPT, ResNet18, workload

    with torch.device("meta"):
        gpt2, resnet18 = GPT(50257, 768, 12, 12, 1024, is_tied=True), ResNet18(64, 1000)
        ours = workload("gpt124m").build()
    counts = [sum(p.numel() for p in module.parameters()) for module in (gpt2, resnet18, ours)]
    assert counts == [124_439_808, 11_689_512, speed.PARAMETERS]


@pytest.mark.parametrize("name", speed.PARTS)
def test_the_benchmark_takes_every_part_s_arguments(name, examples):
    import benchmark
    from benchmarking import peers

    args = benchmark.checked(benchmark.arguments(), speed.PARTS[name].arguments.split())
    assert args.simulator or set(args.peers) >= {
        row for row in speed.HIDING if row in speed.PARTS[name].arguments.split()
    }
    for spec in args.peers:
        options = spec.partition(":")[2]
        assert (
            all("=" in option for option in options.split(",") if option) and spec.partition(":")[0] in peers.BUILDERS
        )


def row(peer, *, ms=1.0, first=1.0, mega=0.0):
    return {
        "peer": peer,
        "step_s": {"median": ms / 1e3},
        "blocks_s": [ms / 1e3] * 3,
        "first_s": [first],
        "gpu_bytes": mega * 1e6,
    }


def verdicts(measured):
    return {goal.what: (round(goal.value, 3), "MISSED" not in str(goal)) for goal in speed.goals(measured)}


def test_goals_are_ratios_of_what_was_measured():
    """The testers' GPT reached its two; an exchange behind the gradient is hidden, one after it is not."""
    gpt = [row("alone:mode=eager", ms=27.3, mega=9500), row("alone:mode=compiled", ms=22.6, first=19, mega=10000)]
    gpt += [row("decentfn", ms=18.2, first=97, mega=6000), row("decentfn:gradient=autograd", ms=28, first=9)]
    found = verdicts({"gpt124m": {"rows": gpt}})
    assert found["gpt124m, traced: time / torch.compile's"] == (0.805, True)
    assert found["gpt124m, traced: memory / torch.compile's"] == (0.6, True)
    assert found["gpt124m, traced: first step / torch.compile's"] == (5.105, False)
    assert found["gpt124m, by autograd: first step / torch.compile's"] == (0.474, True)
    assert found["gpt124m, by autograd: time / plain eager"] == (1.026, False)

    ranks = [row("floor:kind=compute", ms=3), row("floor:kind=exchange", ms=10), row("alone:mode=eager", ms=4)]
    ranks += [row("decentfn", ms=10), row("decentfn:gradient=autograd", ms=14)]
    assert list(verdicts({"ranks-2": {"rows": ranks}}).values()) == [(1.0, True), (0.0, False)]

    seconds = {"one worker": 1.0, "stacked": 4.0, "stacked, replayed": 0.5}
    case = {"network": "tiny", "workers": 64, "seconds": seconds}
    assert list(verdicts({"simulator-64": {"cases": [case]}}).values()) == [(0.5, True), (8.0, True)]


def test_a_link_s_time_is_that_of_its_bytes():
    """498 MB at 93 % of 25 Gbit/s take 171.3 ms, half of it in bfloat16; of DDP's, the first MiB hides while 25 more are computed."""
    rows = [row("alone:mode=compiled", ms=22.6), row("decentfn", ms=18.2)]
    shown = speed.tables({"gpt124m": {"rows": rows}})
    exchange = 4e3 * speed.PARAMETERS * 8 / (25e9 * 0.93)
    assert f"| decentfn, traced | 2 | {exchange + 0.2:.1f} |" in shown
    assert f"| decentfn, bfloat16 wire | 4 | {exchange / 2 + 0.2:.1f} |" in shown
    mib = 2**20 / (4 * speed.PARAMETERS)
    second = 22.6 * (1 / 3 + 2 / 3 * 26 * mib)  # the forward pass is a third
    assert f"| DDP, compiled | 2 | {second + exchange * (1 - mib) + 0.2:.1f} |" in shown


@pytest.mark.thorough
def test_a_part_without_time_is_left_out_and_one_that_fails_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    for name in ("DECENTFN_TEST_DEVICE", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    assert command.main(["--device", "cpu", "--seconds", "0", "--only", "tests", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "tests: left out" in shown and "tiny: left out" in shown and not (tmp_path / "speed.json").exists()

    monkeypatch.setitem(speed.PARTS, "tiny", speed.Part("--workload nothing", 1))
    assert command.main(["--device", "cpu", "--only", "tiny"]) == 1
    assert '"failure": "exit code 2"' in (tmp_path / "speed.json").read_text()


@pytest.mark.thorough
def test_the_memory_of_a_peer_is_its_peak_beside_the_others(examples, monkeypatch):
    """100 bytes are others'; it keeps 10, its first steps take 5 more, and those in a block 9."""
    from benchmarking import measure

    card = SimpleNamespace(allocated=100, peak=100)

    def take(nbytes):
        card.allocated += nbytes
        card.peak = max(card.peak, card.allocated)

    def step(t):
        extra = 5 if t < 3 else 9
        take(extra), take(-extra)

    fakes = {
        "is_initialized": lambda: True,
        "synchronize": lambda: None,
        "memory_allocated": lambda: card.allocated,
        "max_memory_allocated": lambda: card.peak,
        "reset_peak_memory_stats": lambda: setattr(card, "peak", card.allocated),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(measure, "shown", lambda name: measure.contextlib.nullcontext())
    monkeypatch.setattr(measure, "build", lambda *_: take(10) or measure.Peer(step))
    contender = measure.Contender("peer", None, 0, 1)
    assert contender.gpu_bytes == 15
    take(1000), take(5000), take(-5000)  # another one is built, and takes a step
    contender.block(2, measure.Interface())
    assert contender.row()["gpu_bytes"] == 19


@pytest.mark.parametrize("way", ["alone", "one_large_batch", "stacked", "loop"])
def test_what_is_simulated_is_all_on_the_workload_s_device(way, examples, monkeypatch):
    """On meta, which refuses what is elsewhere, as a GPU does."""
    from benchmarking import simulator
    from benchmarking.workloads import workload

    monkeypatch.setattr("decentfn.core.buckets.plan._check_leaf", lambda name, leaf: None)  # meta stands for a GPU
    monkeypatch.setattr(simulator.df, "compile", lambda step, **how: step)
    with devices.Copies() as copies:
        run = getattr(simulator, way)(workload("tiny", device="meta"), *[4] * (way != "alone"))
        run()
        copies.seen.clear()
        run()
    assert not any(copy.waits for copy in copies.seen)
