"""The run's log: one writer, whole lines, a second run beside the first, a resumed one in its place; and what decentfn says."""

import json
import logging
import signal

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import world
from decentfn.testing.ranks import on_kept_ranks

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

pytestmark = pytest.mark.thorough


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_when_write_returns_and_holds_tensors_and_paths(tmp_path):
    with df.logs.JSONLines(tmp_path / "new" / "log.jsonl") as log:
        log.write({"lr": 0.1, "out": tmp_path})
        log.write({"loss": torch.tensor(1.5), "of": {"worker": torch.tensor([1, 2])}}, step=torch.tensor(3))
        said = [{"lr": 0.1, "out": str(tmp_path)}, {"step": 3, "loss": 1.5, "of": {"worker": [1, 2]}}]
        assert lines(log.path) == df.logs.read(log.path) == said
    with pytest.raises(ValueError, match="the log is closed"):
        log.write({})


def test_a_line_has_one_step(tmp_path):
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        log.write({"step": 3, "loss": 0.5}, step=torch.tensor(3))
        with pytest.raises(ValueError, match=r"write\(\{'step': 5\}, step=3\): these are two steps; leave one out"):
            log.write({"step": 5}, step=3)
    assert lines(log.path) == [{"step": 3, "loss": 0.5}]


def test_arrays_are_values_as_tensors_are_and_what_is_no_value_is_refused(tmp_path):
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        log.write({"loss": np.float32(0.5), "of": [np.array([1, 2]), np.array(3), np.bool_(True)]})
        assert lines(log.path) == [{"loss": 0.5, "of": [[1, 2], 3, True]}]
        for value in (torch.eye(2).to_sparse(), torch.ones(1, device="meta"), object()):
            with pytest.raises(ValueError, match=r"JSONLines.write\(\{'x': "):
                log.write({"x": value})
        for step in ("7", 6.5, True, torch.tensor([1, 2])):
            with pytest.raises(ValueError, match=r"JSONLines.write\(step=.*: step is an integer"):
                log.write({"step": step}, step=7)
            with pytest.raises(ValueError, match=r"JSONLines.write\(step=.*: step is an integer"):
                log.write({"step": step})


@pytest.mark.skipif(resource is None, reason="files have no limit here")
def test_a_line_that_does_not_fit_on_a_full_disk_is_an_error_and_leaves_the_log_as_it_was(tmp_path):
    """The next line was joined to the half one: the log could no longer be read, and no run resumed with it."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        log.write({"loss": 0.5}, step=0)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 5, before[1]))
            with pytest.raises(OSError, match="no room for a line of 26 bytes.*log.jsonl"):
                log.write({"loss": 0.25}, step=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        log.write({"loss": 0.125}, step=2)
    with df.logs.JSONLines(tmp_path / "log.jsonl", first_step=3) as log:
        assert df.logs.read(log.path) == [{"step": 0, "loss": 0.5}, {"step": 2, "loss": 0.125}]


def strictly(path):
    """The lines as JSON has them, which has no NaN and no infinity."""

    def constant(name):
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=constant) for line in path.read_text().splitlines()]


def test_what_is_not_finite_is_null_wherever_it_is_in_a_line_also_in_one_of_an_older_version(tmp_path):
    nan, inf = float("nan"), float("inf")
    values = {
        "loss": nan,
        "best": -inf,
        "norms": torch.tensor([[1.0, inf], [nan, 2.0]]),
        "of": {"numpy": np.float64(nan), "list": [1, (inf, 0.5)], "lr": 0.1},
    }
    null = {"loss": None, "best": None, "norms": [[1.0, None], [None, 2.0]]}
    null["of"] = {"numpy": None, "list": [1, [None, 0.5]], "lr": 0.1}
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        log.write(values, step=0)
    assert strictly(log.path) == df.logs.read(log.path) == [{"step": 0} | null]
    with log.path.open("a") as older:
        older.write('{"step": 1, "loss": NaN, "best": [-Infinity]}\n{"step": 2}\n')
    with df.logs.JSONLines(tmp_path / "log.jsonl", first_step=2) as log:
        assert strictly(log.path) == [{"step": 0} | null, {"step": 1, "loss": None, "best": [None]}]
    loop = []
    loop.append(loop)
    with df.logs.JSONLines(tmp_path / "other.jsonl") as log, pytest.raises(ValueError, match=r"JSONLines.write\("):
        log.write({"loop": loop})


def test_a_second_run_does_not_write_over_the_first(tmp_path):
    for number in range(3):
        with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
            log.write({"run": number})
    assert {path.name: lines(path) for path in tmp_path.iterdir()} == {
        "log.jsonl": [{"run": 0}],
        "log-2.jsonl": [{"run": 1}],
        "log-3.jsonl": [{"run": 2}],
    }


@pytest.mark.parametrize("earlier", ["log.jsonl", "log-2.jsonl"])
def test_a_run_that_goes_on_takes_up_its_log_at_its_step(tmp_path, earlier):
    if earlier != "log.jsonl":
        (tmp_path / "log.jsonl").write_text('{"another": "run"}\n')
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        log.write({"config": 1})
        for step in range(6):
            log.write({"loss": step}, step)
    with (tmp_path / earlier).open("a") as file:
        file.write('{"step": 6, "lo')  # a crash
    with df.logs.JSONLines(tmp_path / "log.jsonl", first_step=4) as log:
        log.write({"loss": -4}, 4)
    assert log.path == tmp_path / earlier and sorted(p.name for p in tmp_path.iterdir())[-1] == "log.jsonl"
    assert lines(log.path) == [{"config": 1}, *({"step": s, "loss": s} for s in range(4)), {"step": 4, "loss": -4}]


def test_process_0_alone_writes_and_all_know_where(tmp_path):
    def job(rank):
        with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
            log.write({"rank": rank}, 0)
            return str(log.path)

    assert on_kept_ranks(2, job) == [str(tmp_path / "log.jsonl")] * 2
    assert lines(tmp_path / "log.jsonl") == [{"step": 0, "rank": 0}]


def test_a_log_that_cannot_be_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("no log\n")

    def job(rank):
        with pytest.raises(OSError, match="rank 0: .*/file: a file is where a directory is needed"):
            df.logs.JSONLines(tmp_path / "file" / "log.jsonl")
        with pytest.raises(ValueError, match="rank 0: .*file, line 1: .*not a log of JSON lines"):
            df.logs.JSONLines(tmp_path / "file", first_step=1)

    on_kept_ranks(2, job)
    with pytest.raises(ValueError, match=r"first_step=-1\): .*integer >= 0"):
        df.logs.JSONLines(tmp_path / "log", -1)
    with df.logs.JSONLines(tmp_path / "log") as log, pytest.raises(ValueError, match="object is not a JSON value"):
        log.write({"x": object()})


@pytest.mark.parametrize("first_step", [0, 3])
def test_a_directory_is_no_log(tmp_path, first_step):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"JSONLines\('.*a'\): that is a directory; .* such as log\.jsonl"):
        df.logs.JSONLines(tmp_path / "a", first_step)
    assert [x.name for x in tmp_path.iterdir()] == ["a"]


def test_init_says_the_run_in_a_few_numbers_at_level_info(caplog):
    init, _ = df.adapt_then_combine(lambda p, x: (p["w"] * x).sum(), df.sgd(0.1), df.topology("ring", 4))
    init({"w": torch.zeros(3)})
    assert not caplog.records
    with caplog.at_level(logging.INFO, "decentfn"):
        init({"w": torch.zeros(3)})
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "run: 3 values (1.144e-05 MiB) in 1 buckets, Topology('ring', num_workers=4, period=2, degree=1)"


@pytest.mark.parametrize("metrics", [None, {"loss": 1.0}, torch.ones(())])
def test_what_are_no_metrics_is_refused(metrics, tmp_path):
    init, _ = df.adapt_while_communicate(
        lambda params, batch: params["x"].sum(), df.sgd(0.1), df.topology("complete", 1)
    )
    with (
        df.logs.JSONLines(tmp_path / "log.jsonl") as log,
        pytest.raises(ValueError, match=r"record\(.*found .* metrics"),
    ):
        log.record(init({"x": torch.ones(2)}), metrics, 0)


def test_a_value_in_place_of_what_a_report_reads_is_refused_and_under_another_name_logged(tmp_path):
    init, step = df.adapt_while_communicate(
        lambda params, batch: params["x"].sum(), df.sgd(0.1), df.topology("complete", 1)
    )
    state, metrics = step(init({"x": torch.ones(2)}), torch.ones(1), 0)
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        with pytest.raises(ValueError, match=r"record\(workers=0.8\): .* another name"):
            log.record(state, metrics, 0, workers=0.8)
        line = log.record(state, metrics, 0, share_of_workers=0.8, seconds=3.0)
        assert len(world().counters) == 1  # a message is counted once, however many lines there are
    assert not world().counters and df.logs.read(tmp_path / "log.jsonl") == [
        {"step": 0, **json.loads(json.dumps(line, default=torch.Tensor.tolist))}
    ]
