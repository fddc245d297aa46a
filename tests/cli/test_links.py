"""Measured links are those of the lab, what is wrong with them is named, and a plan reads them."""

import json
import socket
import subprocess
import sys
import time
from copy import deepcopy
from statistics import median

import pytest
import torch
import torch.distributed as dist

import decentfn as df
from decentfn import cli
from decentfn.cli.links import findings
from decentfn.planning import Cluster, Link
from decentfn.train import links
from tests.hosts import LAB, hosts, needs_hosts  # noqa: F401
from tests.ranks import Ranks

SETTINGS = [  # rates, Mbit/s, and delays, ms, of four hosts, of which one is different
    ([50, 50, 50, 20], [0, 0, 0, 0]),
    ([200, 100, 200, 200], [5, 5, 5, 5]),
    ([100, 100, 100, 100], [10, 10, 40, 10]),
    ([1000, 1000, 1000, 250], [0, 0, 0, 10]),
]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("mbit", "delay_ms"), SETTINGS)
def test_measured_links_are_those_of_the_lab(mbit, delay_ms, tmp_path):
    check(mbit, delay_ms, tmp_path / "links.json")


def check(mbit, delay_ms, path):
    words = ["-n", "4", "--mbit", *map(str, mbit), "--delay-ms", *map(str, delay_ms)]
    done = subprocess.run(
        [*LAB, *words, "--", sys.executable, "-m", "decentfn", "links", "--out", path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [node["name"] for node in found["nodes"]] == ["host0", "host1", "host2", "host3"] and len(
        found["pairs"]
    ) == 12
    of_limit = [pair["mbit"] / min(mbit[pair["from"]], mbit[pair["to"]]) for pair in found["pairs"]]
    assert median(of_limit) == pytest.approx(1, rel=0.05) and of_limit == pytest.approx([1] * 12, rel=0.15), of_limit
    for pair in found["pairs"]:
        i, j = pair["from"], pair["to"]
        # One machine runs all hosts and other tests, so an empty message may take a few ms longer; it never takes less.
        wanted = (delay_ms[i] + delay_ms[j]) / 2
        assert wanted < pair["latency_ms"] < 1.1 * wanted + 4, pair
    odd = next(i for i in range(4) if [*mbit, *delay_ms].count(mbit[i]) == 1 or delay_ms.count(delay_ms[i]) == 1)
    assert any(line.startswith(f"host{odd}") for line in found["findings"]), found["findings"]
    assert not any(line.startswith(f"host{i} ") for i in range(4) if i != odd for line in found["findings"])
    assert Cluster.measured(path).between.gbit_per_s == pytest.approx(min(mbit) / 1e3, rel=0.15)


@pytest.mark.parametrize("seconds", [0.2, 0.5])
def test_bytes_that_waited_for_a_lost_segment_and_a_process_that_is_away_are_no_rate(seconds):
    """1,000 segments of 1,448 bytes per second. At 1 s one is lost: bytes wait for it until 1.5 s. At 2 s nobody counts for 0.3 s."""
    moments = [t for t in torch.linspace(0, 4, 401).tolist() if not 2 < t < 2.3]
    counts = [links._Count(t, 1448 * round(1000 * (1 if 1 < t < 1.5 else t)), round(1000 * t), t) for t in moments]
    assert links._fastest(counts, seconds) == pytest.approx(1000 * 1448 * 8e-6, rel=0.02)
    late = [one._replace(until=one.since + 0.2 * (i == 200)) for i, one in enumerate(counts)]  # away while it counted
    assert links._fastest(late, seconds) == pytest.approx(1000 * 1448 * 8e-6, rel=0.02)
    assert links._fastest(counts[:10], seconds) == 0.0  # too short for a rate


def rates_without_counts():
    links._arrived = lambda: links._Count(now := time.monotonic(), 0, 0, now)
    return links._mbit([dist.group.WORLD], 1 - dist.get_rank(), 0.02, 2**14, 0.0)


@pytest.mark.thorough
def test_a_kernel_that_does_not_count_has_rates():
    ranks = Ranks(2)
    rates = ranks.run(rates_without_counts)
    ranks.close()
    assert all(0 < rate < 1e6 and size >= 2**14 for rate, size in rates), rates


def test_other_systems_count_nothing(monkeypatch):
    monkeypatch.setattr(links.sys, "platform", "darwin")
    assert links._arrived()[1:3] == (0, 0)


def test_what_connections_receive_is_counted():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        before = links._arrived()
        client.sendall(bytes(100_000))
        assert len(connection.recv(100_000, socket.MSG_WAITALL)) == 100_000
        after = links._arrived()
        connection.close()
    assert before.until <= after.since and before.segments < after.segments <= before.segments + 100
    assert after.nbytes - before.nbytes == 100_000


def four_hosts():
    nodes = [
        {"name": f"host{i}", "interface": "eth0", "ranks": [i], "mtu": 1500, "nominal_mbit": 1000, "is_bridge": False}
        for i in range(4)
    ]
    numbers = {
        "between": True,
        "mbit": 940.0,
        "mbit_one_stream": 930.0,
        "latency_ms": 0.2,
        "latency_median_ms": 0.3,
        "latency_99_ms": 0.4,
    }
    pairs = [{"from": i, "to": j} | numbers for i in range(4) for j in range(4) if i != j]
    return {"backend": "gloo", "nodes": nodes, "pairs": pairs, "all_reduce_ms": 1.0, "exchange_ms": 1.0}


def with_pairs(change):
    found = four_hosts()
    for pair in found["pairs"]:
        change(pair)
    return found


def with_node(**facts):
    found = four_hosts()
    found["nodes"][2] |= facts
    return found


def slow_host(pair):
    pair["mbit"] = pair["mbit_one_stream"] = 500 if 2 in (pair["from"], pair["to"]) else 940


def slow_sender(pair):
    pair["mbit"] = pair["mbit_one_stream"] = 600 if pair["from"] == 2 else 940


def far_host(pair):
    pair["latency_ms"] = 30.2 if 2 in (pair["from"], pair["to"]) else 0.2


def slow_way(pair):
    pair["mbit"] = pair["mbit_one_stream"] = 300 if (pair["from"], pair["to"]) == (2, 1) else 940


def small_windows(pair):
    pair["latency_ms"], pair["mbit_one_stream"] = 40, 300


def limited(pair):
    pair["mbit"] = pair["mbit_one_stream"] = 300


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (with_pairs(slow_host), ["host2 (eth0): its link is slow, 500 Mbit/s, that of others 940."]),
        (with_pairs(slow_sender), ["host2 (eth0): it sends at 600 Mbit/s and receives at 940;"]),
        (with_pairs(far_host), ["host2: messages from and to it take 30.0 ms more than others';"]),
        (with_pairs(slow_way), ["host2 to host1: 300 Mbit/s, though both are faster with others;"]),
        (with_pairs(small_windows), ["one connection gets 300 of 940 Mbit/s from host", "larger than 9.4 MB"]),
        (with_pairs(limited), [f"host{i} (eth0): 300 Mbit/s of nominally 1000;" for i in range(4)]),
        (
            with_node(interface="lo"),
            ["host2 (lo): this interface does not lead to other nodes; set GLOO_SOCKET_IFNAME"],
        ),
        (with_node(is_bridge=True, interface="docker0"), ["host2 (docker0): this interface does not lead to other"]),
        (with_node(mtu=1400), ["host2 (eth0): frames have at most 1400 bytes;"]),
        (with_node(nominal_mbit=10_000), ["host2 (eth0): 940 Mbit/s of nominally 10000;"]),
        (four_hosts(), []),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_and_nothing_else(found, words):
    lines = list(findings(found))
    assert len(lines) == len([word for word in words if not word.startswith("larger")]), lines
    for word in words:
        assert any(word in line for line in lines), lines


@pytest.mark.thorough
def test_a_plan_takes_the_slowest_of_measured_links(tmp_path, capsys):
    path, found = tmp_path / "links.json", with_pairs(slow_host)
    path.write_text(json.dumps(found))
    assert Cluster.measured(path) == Cluster(4, Link(0.5, 0.2))
    links = Cluster.measured(path).links
    assert (
        links is not None and links.gbit_per_s[2, 0] == links.gbit_per_s[1, 2] == 0.5 and links.gbit_per_s[0, 1] == 0.94
    )  # type: ignore
    one_pair = with_pairs(lambda pair: slow_way(pair) if (pair["from"], pair["to"]) == (2, 1) else None)
    path.write_text(json.dumps(one_pair))
    assert Cluster.measured(path).between.gbit_per_s == 0.94  # a noisy pair is not its nodes' link
    equal = with_pairs(limited)
    path.write_text(json.dumps(equal))
    arguments = ["plan", "--parameters", "1e7", "--compute-ms", "100"]
    cli.run([*arguments, "--links", str(path), "--json"])
    from_file = json.loads(capsys.readouterr().out)
    cli.run([*arguments, "-n", "4", "--gbit", "0.3", "--latency-ms", "0.2", "--json"])
    typed = json.loads(capsys.readouterr().out)
    assert from_file.pop("links") == "The slowest link that it uses leads from host0 to host1: 300 Mbit/s, 0.2 ms."
    assert typed.pop("links") == "" and from_file == typed
    two = deepcopy(found)
    two["nodes"] = [node | {"ranks": [2 * i, 2 * i + 1]} for i, node in enumerate(two["nodes"])]
    two["pairs"].append(two["pairs"][0] | {"between": False, "mbit": 9000.0, "latency_ms": 0.05})
    path.write_text(json.dumps(two))
    assert Cluster.measured(path) == Cluster(8, Link(0.5, 0.2), Link(9, 0.05), 2)
    assert Cluster.measured(path, 2) == Cluster(4, Link(0.5, 0.2), Link(9, 0.05), 1, 2)
    with pytest.raises(ValueError, match="nodes have equally many processes, of whole workers"):
        Cluster.measured(path, 4)


def test_schedules_that_leave_out_a_slow_link_are_planned_without_it(tmp_path, capsys):
    """Workers 2 and 1 exchange slowly; those in the middle of a star exchange with all, the others with it alone."""
    (path := tmp_path / "links.json").write_text(json.dumps(with_pairs(slow_way)))
    slow = 0.32 / (0.93 * 0.3) + 0.0004
    for center in range(4):
        star = df.topologies.relabel(df.topology("star", 4), [center, *(i for i in range(4) if i != center)])
        made = df.plan(Cluster.measured(path), 10**7, compute_seconds=0.001, topologies=[star])
        row = next(p for p in made.predictions if p.topology == "star")
        assert row.seconds == pytest.approx(
            3 * 0.32e9 / (0.93 * 0.94e9) + 0.0004 if center in (0, 3) else slow, rel=1e-6
        )
    found = with_pairs(slow_way)
    found["pairs"] = [pair for pair in found["pairs"] if {pair["from"], pair["to"]} != {0, 3}]
    path.write_text(json.dumps(found))
    assert Cluster.measured(path).links.link(0, 3) == Link(
        0.94, 0.2
    )  # not measured: as the slower of its nodes usually is
    cli.run(["plan", "--parameters", "1e7", "--compute-ms", "1", "--links", str(path)])
    assert "\nThe slowest link that it uses leads from host" in capsys.readouterr().out


ODD = {
    "empty": "",
    "other JSON": '{"a": 1}',
    "a list": "[1, 2]",
    "truncated": json.dumps(four_hosts())[:-40],
    "NaN": json.dumps(with_pairs(lambda pair: pair.update(mbit=float("nan")))),
    "no pairs": json.dumps(four_hosts() | {"pairs": []}),
    "no hosts": json.dumps(four_hosts() | {"nodes": []}),
    "another version": json.dumps(with_pairs(lambda pair: pair.pop("mbit"))),
    "numbers too large": json.dumps(with_pairs(lambda pair: pair.update(mbit=10**400))),
    "binary": b"\x80\x81",
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_of_links_is_named_with_the_fix_in_one_sentence(kind, tmp_path, capsys):
    (path := tmp_path / "links.json").write_bytes(text if isinstance(text := ODD[kind], bytes) else text.encode())
    with pytest.raises(SystemExit, match="2"):
        cli.run(["plan", "--parameters", "9", "--compute-ms", "9", "--links", str(path)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and "measure again with `decentfn links`" in said, said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mbit": -940}, "the rate is positive"),
        ({"mbit": float("inf")}, "gbit_per_s is a finite number"),
        ({"latency_ms": -1}, "the latency is not negative"),
        ({"to": 7}, "pairs are of the nodes' ranks.*measure again"),
        ({"between": False}, "those between nodes are among them"),
    ],
)
def test_numbers_that_no_link_has_are_refused_and_not_made_part_of_a_median(changes, words, tmp_path):
    """A file without pairs between its nodes was planned with a link of 1,000 Gbit/s."""
    found = with_pairs(lambda pair: pair.update(changes if pair["from"] == 0 or "between" in changes else {}))
    (path := tmp_path / "links.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=words):
        Cluster.measured(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["links"], "links(processes=1): it measures between processes; start it by torchrun, or by"),
        (["plan", "--parameters", "9", "--compute-ms", "9"], "plan: add --num-workers and --gbit, or --links"),
        (
            ["plan", "--parameters", "9", "--compute-ms", "9", "--links", "no.json"],
            "No such file or directory: 'no.json'",
        ),
        (
            ["plan", "--parameters", "9", "--compute-ms", "9", "--links", __file__],
            "expected a file that `decentfn links`",
        ),
        (["plan", "--parameters", "9", "--compute-ms", "9", "--links", "x", "--gbit", "1"], "leave them out"),
    ],
)
def test_a_mistake_with_links_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(arguments)
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
