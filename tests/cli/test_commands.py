"""The command line: what it says agrees with the library, and a mistake is one line."""

import json
import re
import subprocess
import sys

import pytest

import decentfn as df
from decentfn import cli
from decentfn.cli import tables


def said(capsys, *arguments):
    cli.run([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_topology_is_its_certificate(capsys):
    facts, c = (
        said(capsys, "topology", "static-ring", "-n", "8"),
        df.topologies.certificate(df.topology("static-ring", 8)),
    )
    assert (facts["gap"], facts["payloads/step"], facts["degree"]) == (c.spectral_gap, c.payloads_per_step, c.degree)
    two_steps = said(capsys, "topology", "ring", "-n", "8")
    assert (1 - two_steps["gap/step"]) ** 2 == pytest.approx(1 - two_steps["gap"])
    shown, made = said(capsys, "topology", "ring", "-n", "8", "--matrices"), df.topology("ring", 8)
    assert [shown[f"W({t})"] for t in (0, 1)] == [df.topologies.mixing_matrix(made, t).tolist() for t in (0, 1)]


def test_all_topologies_of_a_size_are_compared(capsys):
    names = {row["name"] for row in said(capsys, "topologies", "-n", "6", "--local-world-size", "3")}
    assert {"base", "ring", "hierarchical"} <= names
    assert "one-peer-exp" not in names  # needs a power of two


PLAN = ("plan", "-n", "4", "--parameters", "1e7", "--compute-ms", "100", "--gbit", "1")


def test_a_plan_is_the_librarys_with_its_recommendation(capsys):
    told = said(capsys, *PLAN)
    planned = df.plan(df.planning.Cluster(4, df.planning.Link(1)), 10**7, compute_seconds=0.1)
    assert [row["step ms"] for row in told["predictions"]] == [p.seconds * 1e3 for p in planned.predictions]
    assert told["recommended"] in told["predictions"] and told["reason"] == planned.reason
    cli.run(PLAN)
    *_, empty, last, gap = capsys.readouterr().out.splitlines()
    assert gap.startswith("gap/step: ") and (empty, last) == (
        "",
        f"recommended: adapt_while_communicate on base, because {planned.reason}",
    )


@pytest.mark.thorough
def test_a_narrow_terminal_breaks_texts_and_no_number(capsys, monkeypatch):
    for name, value in {"COLUMNS": "90", "TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    cli.run(PLAN)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    numbers = {tables._text(x) for row in said(capsys, *PLAN)["predictions"] for x in row.values() if type(x) is float}
    assert numbers <= set(printed.split())
    table, _, _ = printed.partition("recommended:")
    assert max(map(len, table.splitlines())) <= 90 and table.count("adapt") == 2  # others are between


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("plan", "-n", "4", "--parameters", "9", "--compute-ms", "9", "--gbit", "1", "--processes-per-worker", "8"),
            "--inside-gbit",
        ),
        (("topology", "rnig", "-n", "4"), "nearest: ring"),
        (("topology", "one-peer-exp", "-n", "6"), "use 'base'"),
        (("topology", "ring", "-n", "4", "--local-world-size", "2"), "no such argument"),
        (("topology", "ring"), "Missing from decentfn topology: -n INT, --num-workers INT"),
        (("topology", "ring", "-n", "x"), "Error parsing -n/--num-workers"),
        (("plan", "-n", "4", "--parameters", "9", "--compute-ms", "9", "--gbit", "1", "--bogus", "3"), "--bogus, 3"),
        (("doctr",), "Available subcommands: topology, topologies, plan, report, doctor, links, lab"),
        (("report", "no.json"), "report no.json: no *.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        cli.run(arguments)
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out
    assert words in printed.err and printed.err.count("\n") == 1


def test_an_unknown_command_is_refused_with_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["doctr"])
    assert end.value.code == 2 and {"doctr", "doctor"} <= set(re.findall(r"\w+", capsys.readouterr().err))


def test_a_pipe_gets_tabs_and_a_file_the_picture(capsys, tmp_path):
    cli.run(["topology", "base", "-n", "4", "--plot", str(tmp_path / "base.png")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t") for line in lines[:2]] == [["name", "base"], ["workers", "4"]]
    assert (tmp_path / "base.png").stat().st_size > 1000


def test_a_file_that_cannot_be_read_or_written_is_named_with_the_fix(capsys, tmp_path):
    (binary := tmp_path / "timeline.json").write_bytes(b"\x80\x81")
    picture = tmp_path / "no" / "base.png"
    for arguments, words in {
        ("report", str(binary)): f"Trace.load({str(binary)!r}): not a trace",
        (
            "topology",
            "base",
            "-n",
            "4",
            "--plot",
            str(picture),
        ): f"{str(picture)!r}; name another, or make its directory",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            cli.run(arguments)
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


@pytest.mark.thorough
def test_a_reader_that_has_enough_ends_the_command_without_a_word():
    command = f"{sys.executable} -m decentfn topologies -n 16"
    told = subprocess.run(
        f"{command} | true; exit ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", capture_output=True
    )
    assert told.returncode == 0 and told.stderr == b""


@pytest.mark.slow
def test_the_doctor_trains_on_two_ranks_and_names_an_unknown_interface(capsys, monkeypatch):
    checks = {row["check"]: row for row in said(capsys, "doctor")}
    assert all(row["ok"] for row in checks.values())
    assert "compiled step right" in checks["two ranks"]["found"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(SystemExit) as end:
        said(capsys, "doctor")
    checks = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert end.value.code == 1
    assert "no interface nope0" in checks["GLOO_SOCKET_IFNAME"]["fix"] and not checks["two ranks"]["ok"]


@pytest.mark.thorough
def test_a_number_of_workers_that_no_topology_has_is_refused_in_place_of_an_empty_table():
    for n in ("0", "-3", "99999999"):
        done = subprocess.run(
            [sys.executable, "-m", "decentfn", "topologies", "-n", n], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2 and done.stdout == "" and "none has so many; 1 to 1048576." in done.stderr
        assert len(done.stderr.splitlines()) == 1
