"""`decentfn report`: a page with the log's numbers, whose names are text, and a sentence for each file that is no run."""

import base64
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn import cli
from decentfn.testing import on_ranks

HOSTILE = "<script>alert(1)</script><b>\"'&amp;%{x}$a$</td></style>"


def row(step, losses, *, started=0.0, seconds=None, workers=None, links=(), waited=()):
    who = list(range(len(losses))) if workers is None else workers
    return {
        "step": step,
        "started": started,
        "seconds": float(step) if seconds is None else seconds,
        "loss": sum(losses) / len(losses),
        "losses": losses,
        "consensus_distance": 1.0 / (1 + step),
        "workers": who,
        "links": list(links),
        "waited": [*waited, *([i, None, 0.0] for i in who)],
    }


def write(path, lines, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)
    return path


class Page(HTMLParser):
    """Tags, texts and figures of a page; numbers in Plotly's base64 become arrays."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.inside = [], [], ""
        self.feed(text)
        decoder = json.JSONDecoder()
        starts = [match.end() for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]*",\s*', text)]
        self.figures = [self.plain(decoder.raw_decode(text, start)[0]) for start in starts]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.texts.append(data)

    def plain(self, x):
        if isinstance(x, dict) and "bdata" in x:
            return np.frombuffer(base64.b64decode(x["bdata"]), x["dtype"])
        if isinstance(x, dict):
            return {key: self.plain(value) for key, value in x.items()}
        return [self.plain(value) for value in x] if isinstance(x, list) else x


def reported(capsys, *paths):
    out = paths[0].parent / "page.html"
    cli.run(["report", *map(str, paths), "--out", str(out)])
    assert capsys.readouterr().out == f"{out}\n"
    return Page(out.read_text())


def curve(figure, what, axis=""):
    [found] = [one for one in figure if what in one.get("hovertemplate", "") and one.get("xaxis", "x") == f"x{axis}"]
    return found


@pytest.mark.parametrize("config", [None, [1, "two"], "name", {"a": {"b": [None]}}])
def test_a_log_may_have_any_configuration_and_lines_without_links(config, tmp_path, capsys):
    rows = [{"config": config}, row(0, [1.0]) | {"links": None, "waited": None}, {"checkpoint": "final"}]
    page = reported(capsys, write(tmp_path / "log.jsonl", rows).parent)
    name, value = ("config: a", config["a"]) if isinstance(config, dict) else ("config: ", config)
    assert {name.strip(), str(value)} <= {text.strip() for text in page.texts}


def test_a_page_has_the_losses_of_a_log_against_steps_seconds_and_bytes(tmp_path, capsys):
    links = [[0, 1, 10**6, True], [1, 0, 3 * 10**6, True]]
    rows = [row(10 * k, [3.0 - k, 4.0 - k], seconds=7.0 * k, links=links) for k in range(3)]
    page = reported(capsys, write(tmp_path / "a" / "log.jsonl", [{"config": {"lr": 0.5}}, *rows]).parent)
    losses = page.figures[0]
    for axis, x in ("", [0, 10, 20]), ("2", [0, 7, 14]), ("3", [2, 4, 6]):
        for what, y in ("worker 0", [3, 2, 1]), ("worker 1", [4, 3, 2]), ("mean", [3.5, 2.5, 1.5]):
            drawn = curve(losses, what, axis)
            assert (list(drawn["x"]), list(drawn["y"])) == (x, y)
    assert np.allclose(curve(losses, "distance", "4")["y"], [1, 1 / 11, 1 / 21])
    assert {"config: lr", "0.5"} <= set(page.texts)


def test_restarts_losses_of_workers_and_checkpoints_are_marks_and_time_goes_on(tmp_path, capsys):
    rows = [
        row(0, [3.0, 3.0, 3.0], started=5.0, seconds=1.0),
        row(1, [2.0, 2.0, 2.0], started=5.0, seconds=2.0),
        {"step": 1, "checkpoint": 2},
        row(2, [1.0, 1.0, 1.0], started=90.0, seconds=0.5),
        row(3, [1.0, 1.0], started=90.0, seconds=1.5, workers=[0, 2]),
        row(4, [1.0, 1.0, 1.0], started=90.0, seconds=2.5, workers=[0, 2, 3]),
    ]
    [figure] = reported(capsys, write(tmp_path / "log.jsonl", rows)).figures
    marks = {one["name"]: one for one in figure if one.get("text") and one["xaxis"] == "x2"}
    words = {kind: (list(one["x"]), one["text"]) for kind, one in marks.items()}
    assert words == {
        "restart": ([2.5], ["restart before step 2"]),
        "lost": ([3.5], ["lost 1 before step 3"]),
        "joined": ([4.5], ["joined 3 before step 4"]),
        "checkpoint": ([2.0], ["checkpoint after step 1"]),
    }
    assert np.isnan(curve(figure, "worker 1")["y"]).tolist() == [False] * 3 + [True] * 2


def test_of_several_runs_settings_that_differ_are_shown_and_others_not(tmp_path, capsys):
    folder = tmp_path / ("long" * 30)
    for name, rate in ("a", 0.1), ("b", 0.2):
        write(folder / name / "log.jsonl", [{"config": {"lr": rate, "steps": 8}}, row(0, [1.0])])
    page = reported(capsys, folder / "a", folder / "b")
    assert {"config: lr", "0.1", "0.2"} <= set(page.texts) and "config: steps" not in page.texts
    assert page.texts.count("steps") == 1  # those that were taken
    assert len({curve(page.figures[0], f"{name}/log, mean")["line"]["color"] for name in "ab"}) == 2


def test_who_waits_least_is_named_and_every_link_has_its_bytes(tmp_path, capsys):
    links = [[0, 1, 2e9, True], [1, 2, 1e9, False], [2, 0, 1e9, False]]
    waited = [[0, 2, 40.0], [1, 0, 30.0], [1, 2, 20.0], [2, 1, 1.0]]
    page = reported(capsys, write(tmp_path / "log.jsonl", [row(100, [1.0] * 3, links=links, waited=waited)]))
    assert any("process 2 waited least, 1 s: the others wait for it." in text for text in page.texts)
    heat, *drawn = page.figures[1]
    assert np.nan_to_num(np.array(heat["z"]).reshape(3, 4)).tolist() == [[0, 0, 40, 40], [30, 0, 20, 50], [0, 1, 0, 1]]
    assert {one.get("name") for one in drawn} >= {"inside a node: 2,000.00 MB", "between nodes: 2,000.00 MB"}
    words = [text for one in drawn if one["mode"] == "markers" for text in one["text"]]
    assert words == ["0 to 1: 2,000.00 MB", "1 to 2: 1,000.00 MB", "2 to 0: 1,000.00 MB"]


def test_names_are_text_wherever_they_are(tmp_path, capsys):
    def page(name):
        links, waited = [[name, "b", 10, True], ["b", name, 10, True]], [[name, "b", 9.0]]
        lines = [{"config": {name: name}}, row(1, [1.0, 2.0], workers=[name, "b"], links=links, waited=waited)]
        lines += [{"step": 1, "checkpoint": name, name: name}]
        folder = name.replace("/", "|")
        return reported(capsys, write(tmp_path / folder / f"{folder}.jsonl", lines))

    plain, hostile = page("plain"), page(HOSTILE)
    assert hostile.tags == plain.tags
    assert [text for text in hostile.texts if HOSTILE in text][-2:] == [f"config: {HOSTILE}", HOSTILE]
    said = [text for figure in hostile.figures for one in figure for text in strings(one) if "alert" in text]
    assert len(said) > 5  # long names are cut
    for text in said:
        outside = text.replace("<br>", "").replace("<extra></extra>", "")
        assert "<" not in outside and "$" not in outside and outside.count("%{x}") <= text.count("%{x}<")


def strings(x):
    if isinstance(x, str):
        return [x]
    return [
        text
        for value in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())
        for text in strings(value)
    ]


def test_of_long_logs_the_smallest_and_the_largest_values_are_drawn(tmp_path, capsys):
    losses = np.random.default_rng(0).random(30_000)
    losses[778], losses[20_002] = 9.0, -9.0  # not the first of a part
    rows = [{"step": k, "loss": x} for k, x in enumerate(losses.tolist())]
    y = curve(reported(capsys, write(tmp_path / "log.jsonl", rows)).figures[0], "mean")["y"]
    assert len(y) <= 20_000 and {9.0, -9.0} <= set(y)


def test_what_one_worker_does_not_have_is_said(tmp_path, capsys):
    text = "".join(strings_of(tmp_path, capsys, {"step": 1, "loss": 1.0, "seconds": 3.0}))
    assert "sent by a worker: unknown" in text and "consensus distance: none" in text
    assert "against seconds: unknown" not in text


def strings_of(tmp_path, capsys, line):
    log = write(tmp_path / "log.jsonl", [line])
    assert "-" in reported(capsys, log).texts
    return (tmp_path / "page.html").read_text()


def test_a_last_line_that_a_kill_cut_short_is_left_out_and_the_page_says_so(tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", [row(0, [1.0])], end='\n{"step": 1, "lo')
    assert any("cut short" in text for text in reported(capsys, log).texts)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"no \*.jsonl, trace\*.json or timeline\*.json is there"),
        ({}, r"no \*.jsonl, trace\*.json or timeline\*.json is there"),
        ({"log.jsonl": ""}, "no line has a step and a loss"),
        ({"log.jsonl": '{"config": {}}\n'}, "no line has a step and a loss"),
        ({"log.jsonl": "nonsense\n"}, "line 1: .* not a log of JSON lines"),
        ({"log.jsonl": '{"step": 0, "loss": 1, "links": [1]}\n'}, "not as df.logs.*: links=.1., expected rows .from,"),
        (
            {"log.jsonl": '{"step": 0, "loss": 1, "workers": [1, 2]}\n'},
            "not as df.logs.*: workers=.1, 2. for the losses 1",
        ),
        ({"log.jsonl": '{"step": 0, "loss": 1, "workers": 3}\n'}, "not as df.logs.*: workers=3 for the losses 1"),
        ({"log.jsonl": '{"step": 0, "loss": 1, "waited": [[0, 1, "x"]]}\n'}, "waited=.*, expected rows .who, for whom"),
        ({"log.jsonl": '{"step": 0, "loss": 1, "losses": []}\n'}, "no worker has a loss"),
        ({"log.jsonl": '{"step": 0, "loss": "low"}\n'}, "not as df.logs.*: 'low' is no number"),
        ({"log.jsonl": '{"step": 0, "loss": 1, "losses": [1, true]}\n'}, "not as df.logs.*: True is no number"),
        ({"log.jsonl": '{"step": "0", "loss": 1}\n'}, "not as df.logs.*: '0' is no number"),
        ({"trace.json": "{}"}, "not a trace"),
        ({"timeline.json": '{"start": [[0]], "end": [[1]]}'}, "a/timeline.json: not a timeline.*'waited'"),
        ({"timeline.json": '{"start": [], "end": [], "waited": [], "messages": []}'}, "not a timeline.*are .steps, N."),
        ({"timeline.json": '{"start": [[0]], "en'}, "a/timeline.json: not a timeline"),
    ],
)
def test_what_is_no_run_is_one_line_and_status_2(content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "a").mkdir()
    for name, text in (content or {}).items():
        (tmp_path / "a" / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.run(["report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert end.value.code == 2 and re.search(words, said) and said.count("\n") == 1


def test_without_plotly_the_command_that_installs_it_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(SystemExit) as end:
        cli.run(["report", str(write(tmp_path / "log.jsonl", [row(0, [1.0])]))])
    assert end.value.code == 2 and "pip install 'decentfn[report]'" in capsys.readouterr().err


# -- timelines --------------------------------------------------------------------------------------------------------


def test_a_timeline_has_a_bar_for_each_step_and_a_line_for_each_message(tmp_path, capsys):
    clock = df.clock([0.1, 0.1, 0.3], df.planning.Cluster(3, df.planning.Link(1)))
    line = clock.timeline(df.timing.Exchange(df.topology("static-ring", 3), 1e6, begins=1.0), 5)
    line.save(tmp_path / "timeline.json")
    computes, waits, _, arrivals = reported(capsys, tmp_path / "timeline.json").figures[0]
    assert len(computes["x"]) == 15 and np.isclose(sum(computes["x"]) + sum(waits["x"]), (line.end - line.start).sum())
    assert len(arrivals["text"]) == 5 * 3 * 2


def test_a_timeline_without_messages_is_drawn_and_one_that_was_sorted_and_indented_is_the_same(tmp_path, capsys):
    clock = df.clock([[0.1], [0.2]], df.planning.Cluster(1, df.planning.Link(1)))
    clock.timeline(df.timing.Exchange(df.topology("complete", 1), 1e6), 2).save(path := tmp_path / "timeline.json")
    assert (told := json.loads(path.read_text()))["messages"] == []
    first, _, _, arrivals = reported(capsys, path).figures[0]
    path.write_text(json.dumps(told, sort_keys=True, indent=1))
    again = reported(capsys, path).figures[0][0]
    assert np.allclose(first["x"], [0.1, 0.2]) and all(np.array_equal(first[k], again[k]) for k in ("x", "base"))
    assert not len(arrivals["text"])


def test_an_asynchronous_trace_is_a_timeline_of_own_steps_and_of_messages_that_are_taken(tmp_path, capsys):
    clock = df.clock([0.1, 0.1, 0.1, 0.3], df.planning.Cluster(4, df.planning.Link(1)))
    line = clock.timeline(df.timing.Exchange(df.topology("one-peer-exp", 4), 1e6, is_awaited=False), 9)
    line.save(tmp_path / "trace.json")
    computes, _, messages, arrivals = reported(capsys, tmp_path / "trace.json").figures[0]
    assert len(computes["x"]) == sum(line.trace.num_steps)
    its = line.trace
    taken = [(i, k, j, s) for i in range(4) for k, step in enumerate(its.taken[i]) for j, s in step]
    expected = [(its.ended[j][s], its.ended[i][k - 1] if k else 0.0, j, i) for i, k, j, s in taken]
    drawn = [*zip(messages["x"][::3], messages["x"][1::3], messages["y"][::3], messages["y"][1::3], strict=True)]
    assert drawn == expected and len(arrivals["text"]) == len(expected) > 20


@pytest.mark.parametrize("begins", [0.0, 1.0])
def test_a_step_ends_when_its_last_message_has_arrived(begins):
    n, steps, link = 4, 6, df.planning.Link(1)
    seconds = np.random.default_rng(0).uniform(0.01, 0.2, (steps, n))
    exchange = df.timing.Exchange(df.topology("one-peer-exp", n), 1e6, begins=begins)
    line = df.clock(seconds, df.planning.Cluster(n, link)).timeline(exchange, steps)
    messages = line.messages.reshape(steps, n, 4)  # each worker sends one
    assert np.allclose(messages[..., 3] - messages[..., 2], 1e6 * 8 / 0.93e9 + 2 * 1e-4)
    for k in range(steps):
        for i in range(n):
            mine = messages[k][(messages[k, :, :2] == i).any(1)]
            assert line.end[k, i] == pytest.approx(max(line.start[k, i] + seconds[k, i], mine[:, 3].max()))


# -- what the training loop logs ---------------------------------------------------------------------------------------


def test_a_line_has_the_bytes_of_each_link_and_whose_message_was_awaited(tmp_path):
    topology = df.topology("one-peer-exp", 4)

    def train(rank):
        init, step = df.adapt_while_communicate(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.1), topology)
        state, waited = init(torch.zeros(10)), []
        with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
            for t in range(4):
                with df.profiling.communication() as counted:
                    state, metrics = step(state, torch.full((10,), float(rank)), t)
                waited.append(counted.seconds_waited)
                if t % 2:
                    log.record(state, metrics, t, note="x")
        return waited

    everyone = on_ranks(4, train)
    lines = df.logs.read(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [1, 3]
    for k, line in enumerate(lines):
        assert sorted(map(tuple, line["links"])) == [
            (i, j, 40, True) for i in range(4) for j in sorted({i ^ 1, (i + 2) % 4})
        ]
        assert line["workers"] == [0, 1, 2, 3] and line["note"] == "x" and line["seconds"] >= 0
        for i, waited in enumerate(everyone):
            its = {j: x for who, j, x in line["waited"] if who == i}
            assert set(its) <= {None, i ^ 1, (i + 2) % 4}
            assert sum(its.values()) == pytest.approx(sum(waited[2 * k : 2 * k + 2]), abs=1e-5)


def test_simulated_workers_are_in_a_line_and_their_seconds_may_be_a_clocks(tmp_path, capsys):
    init, step = df.adapt_then_combine(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.1), df.topology("base", 3))
    state, step = df.stack(init(torch.zeros(2)), 3), df.simulate(step, 3)
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        for t in range(2):
            state, metrics = step(state, torch.eye(3)[:, :2], t)
            line = log.record(state, metrics, t, seconds=0.5 * t, bytes_sent=8e6 * t)
            assert line["losses"].tolist() == metrics.loss.tolist()
    [figure] = reported(capsys, tmp_path / "log.jsonl").figures
    for axis, x in ("2", [0, 0.5]), ("3", [0, 8]):
        assert list(curve(figure, "worker 2", axis)["x"]) == x


def test_processes_of_two_workers_each_log_four(tmp_path):
    def train(rank):
        init, step = df.adapt_then_combine(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.1), df.topology("base", 4))
        state = df.stack(init(torch.zeros(2)), 2)
        with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
            state, metrics = df.simulate(step, 2)(state, torch.ones(2, 2) * rank, 0)
            log.record(state, metrics, 0)

    on_ranks(2, train)
    [line] = df.logs.read(tmp_path / "log.jsonl")
    assert line["workers"] == [0, 1, 2, 3] and len(line["losses"]) == 4
    assert {tuple(link[:2]) for link in line["links"]} <= {(0, 1), (1, 0)}
