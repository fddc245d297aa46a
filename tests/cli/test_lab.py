"""Hosts on one machine: limited links between them, none to others, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from decentfn import cli
from tests.hosts import LAB, hosts, needs_hosts  # noqa: F401

PROGRAM = """
import json, os, socket, statistics, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server(("10.77.0.1", 5000))
    print("listening", flush=True)
    connection, _ = server.accept()
    while (byte := connection.recv(1)) == b"p":
        connection.send(byte)
    times, got = [], 0
    while data := connection.recv(1 << 16):
        got += len(data)
        times.append((time.monotonic(), got))
    (start, first), (end, last) = times[len(times) // 4], times[-1]
    nbytes, packets = (int(open(f"/sys/class/net/eth0/statistics/rx_{of}").read()) for of in ("bytes", "packets"))
    print(json.dumps({"mbit": (last - first) * 8e-6 / (end - start), "packet": nbytes / packets}))
elif rank == 1:
    for _ in range(100):
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    taken = []
    for _ in range(21):
        since = time.monotonic()
        connection.send(b"p")
        connection.recv(1)
        taken.append(time.monotonic() - since)
    connection.send(b"x")
    end = time.monotonic() + 2
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 16))
    print(json.dumps({"ms": statistics.median(taken) * 500, "host": socket.gethostname(), "to": sys.argv[1]}))
"""


def start(*options, program, **how):
    return subprocess.Popen([*LAB, *options, "--", *program], stdout=subprocess.PIPE, text=True, **how)


def facts(said):
    return {name: x for line in said.splitlines() if line[:1] == "{" for name, x in json.loads(line).items()}


@needs_hosts
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "mbit", "ms"),
    [
        (["--mbit", "50"], 50, 0),
        (["--mbit", "200", "--delay-ms", "10"], 200, 10),
        (["--mbit", "500", "20", "--delay-ms", "40", "0"], 20, 20),
    ],
)
@pytest.mark.parametrize("is_quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_links_have_the_rate_and_delay_that_were_asked_for(options, mbit, ms, is_quiet):
    """A busy machine slows a link, and nothing makes one faster than was asked for. Packets of many frames are not cut."""
    said, _ = start("-n", "2", *options, program=[sys.executable, "-c", PROGRAM, "here"]).communicate(timeout=300)
    found, rate = facts(said), mbit * 1448 / 1514  # frames of 1,500 bytes and their headers
    assert found["host"] == "host1" and found["mbit"] <= rate * 1.05 and found["ms"] >= ms * 0.9
    assert found["packet"] > 4000, "as frames, they would keep the processor busy"
    if is_quiet:
        assert found["mbit"] == pytest.approx(rate, rel=0.05) and found["ms"] == pytest.approx(ms, abs=1, rel=0.1)


@needs_hosts
@pytest.mark.thorough
def test_two_labs_at_once_do_not_meet():
    """Both have the same addresses and ports; a rank that met the other lab's would leave its own alone."""
    program = [sys.executable, "-c", PROGRAM]
    labs = [start("-n", "2", "--mbit", rate, program=[*program, rate]) for rate in ("20", "60")]
    for rate, one in zip(("20", "60"), labs, strict=True):
        found = facts(one.communicate(timeout=300)[0])
        assert one.returncode == 0 and found["to"] == rate
        assert found["mbit"] <= float(rate) * 1448 / 1514 * 1.05


def namespaces(token):
    """Network namespaces of the processes of one lab, other than this one, and its processes."""
    found, of_lab = set(), []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if f"OF_THIS_TEST={token}".encode() not in file.read():
                    continue
            of_lab.append(process)
            found.add(os.readlink(f"/proc/{process}/ns/net"))
        except OSError:
            continue
    return found - {os.readlink("/proc/self/ns/net")}, of_lab


def nothing_is_left(token):
    """Killed processes of a rank that was waited for may need a moment to end."""
    end = time.monotonic() + 60
    while any(namespaces(token)) and time.monotonic() < end:
        time.sleep(0.2)
    return not any(namespaces(token))


@needs_hosts
@pytest.mark.thorough
def test_a_killed_lab_leaves_nothing_after_the_next_start():
    token = os.urandom(8).hex()
    program = ["sh", "-c", "echo up; sleep 600; true"]  # the shell dies with the lab, and leaves its sleep
    lab = start("-n", "3", "--delay-ms", "1", program=program, env=os.environ | {"OF_THIS_TEST": token})
    assert lab.stdout and [lab.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    assert len(namespaces(token)[0]) == 4  # three hosts and the switch
    lab.kill()
    lab.wait()
    assert subprocess.run([*LAB, "-n", "1", "--", "true"], timeout=300).returncode == 0
    assert nothing_is_left(token)
    lab.stdout.close()


@needs_hosts
@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_lab_that_is_told_to_end_ends_its_ranks_at_once(sent):
    token, program = os.urandom(8).hex(), ["sh", "-c", "echo up; sleep 600; true"]
    heard = partial(signal.signal, sent, signal.SIG_DFL)  # a job in the background ignores SIGINT
    env = os.environ | {"OF_THIS_TEST": token}
    lab = start("-n", "2", program=program, env=env, stderr=subprocess.DEVNULL, preexec_fn=heard)
    assert lab.stdout and [lab.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    lab.send_signal(sent)
    status = lab.wait(300)
    lab.stdout.close()
    assert status != 0 and nothing_is_left(token)


@needs_hosts
@pytest.mark.thorough
def test_a_lab_that_is_told_to_end_while_it_starts_ends_the_ranks_that_it_has_started():
    """The first of twelve has begun: the others, too, are ended, and not left to the next lab."""
    token, program = os.urandom(8).hex(), ["sh", "-c", "echo up; sleep 600; true"]
    words, env = ["-n", "3", "--ranks-per-host", "4"], os.environ | {"OF_THIS_TEST": token}
    lab = start(*words, program=program, env=env, stderr=subprocess.DEVNULL)
    assert lab.stdout and lab.stdout.readline() == "up\n"
    lab.terminate()
    assert lab.wait(300) != 0 and nothing_is_left(token)
    lab.stdout.close()


@needs_hosts
@pytest.mark.thorough
def test_a_rank_that_fails_ends_the_others_and_is_named():
    program = ["sh", "-c", 'test "$RANK" = 1 && exit 7; sleep 600']
    lab = start("-n", "2", "--ranks-per-host", "2", program=program, stderr=subprocess.PIPE)
    _, said = lab.communicate(timeout=300)
    assert (lab.returncode, said) == (1, "decentfn lab: rank 1 ended with status 7.\n")


COUNTED = """
import json, pathlib, time, torch
import torch.distributed as dist
import decentfn as df
here = df.init()
topology = df.topology("static-exp", here.size)
init, step = df.adapt_while_communicate(lambda x, batch: (x * batch).sum(), df.sgd(0.1), topology)
state = init(torch.ones(250_000))
of_kernel = [pathlib.Path("/sys/class/net/eth0/statistics", f"{way}_bytes") for way in ("tx", "rx")]
state, _ = step(state, torch.ones(250_000), 0)
dist.barrier()
before = [int(path.read_text()) for path in of_kernel]
dist.barrier()
with df.profiling.communication() as counted:
    for t in range(1, 9):
        state, _ = step(state, torch.ones(250_000), t)
dist.barrier()
after = [int(path.read_text()) for path in of_kernel]
both = [counted.between.bytes_sent, counted.between.bytes_received, counted.inside.bytes_sent]
everyone = [None] * here.size
dist.all_gather_object(everyone, (both, [b - a for a, b in zip(before, after)]))
if here.rank == 0:
    print(json.dumps({"all": everyone}))
"""


@needs_hosts
@pytest.mark.thorough
@pytest.mark.parametrize("local", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bytes_between_nodes_are_those_of_the_kernels_counters(local):
    said, _ = start("-n", "3", "--ranks-per-host", str(local), program=[sys.executable, "-c", COUNTED]).communicate(
        timeout=300
    )
    ranks = facts(said)["all"]
    for host in range(3):
        its = ranks[host * local : (host + 1) * local]
        for way in (0, 1):
            counted = sum(both[way] for both, _ in its)
            of_kernel = its[0][1][way]
            assert counted and of_kernel == pytest.approx(counted, rel=0.03), (host, way)
        assert sum(both[2] for both, _ in its) == (8 * 1_000_000 if local == 2 else 0), host  # from its first rank


BY_PEER = """
import json, re, subprocess, torch
import torch.distributed as dist
import decentfn as df
here = df.init()
init, step = df.all_reduce(lambda x, batch: (x * batch).sum(), df.sgd(0.1), df.topology("complete", here.size))
state, x = init(torch.ones(250_000)), torch.ones(250_000)
with df.profiling.communication() as counted:
    for t in range(8):
        state, _ = step(state, x, t)
dist.barrier()
own = re.search(r"inet ([\\d.]+)", subprocess.check_output(["ip", "-4", "address", "show", "eth0"], text=True))[1]
hosts, everyone = [None] * here.size, [None] * here.size
dist.all_gather_object(hosts, own)
sent, said = {}, subprocess.check_output(["ss", "--tcp", "--info", "--numeric", "--oneline"], text=True)
for host, nbytes in re.findall(r"[\\d.]+:\\d+ +([\\d.]+):\\d+ .* bytes_sent:(\\d+)", said):
    sent[host] = sent.get(host, 0) + int(nbytes)
counted = {hosts[rank]: its.bytes_sent for rank, its in counted.peers.items() if its.bytes_sent}
dist.all_gather_object(everyone, (counted, sent))
if here.rank == 0:
    print(json.dumps({"all": everyone}))
"""


@needs_hosts
@pytest.mark.thorough
def test_bytes_of_a_mean_went_to_the_rank_that_the_counters_name():
    said, _ = start("-n", "3", program=[sys.executable, "-c", BY_PEER]).communicate(timeout=300)
    for counted, of_kernel in facts(said)["all"]:
        ((host, nbytes),) = counted.items()
        assert of_kernel[host] == pytest.approx(nbytes, rel=0.03)
        assert all(its < 0.1 * nbytes for other, its in of_kernel.items() if other != host)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "0", "--", "true"), "lab(num_hosts=0): 1 to 250 hosts."),
        (
            ("-n", "3", "--mbit", "5", "6", "--", "true"),
            "lab(mbit=(5.0, 6.0)): one number for all hosts, or one per host",
        ),
        (("-n", "2", "--mbit", "0", "--", "true"), "lab(mbit=(0.0,)): one number"),
        (("-n", "2", "--delay-ms", "-1", "--", "true"), "lab(delay_ms=(-1.0,)): one number"),
        (("-n", "2", "--", "no-such-program"), "lab(command='no-such-program'): there is no such program."),
        (("-n", "2"), "lab(command=()): end with the program to start, as in `-- python train.py`."),
    ],
)
def test_a_lab_that_cannot_be_is_refused_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(["lab", *arguments])
    said = capsys.readouterr().err
    assert said.startswith(f"decentfn: {words}") and said.count("\n") == 1


def test_a_machine_without_tc_or_the_right_is_told_so(tmp_path, capsys, monkeypatch):
    (tmp_path / "true").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        cli.run(["lab", "-n", "2", "--", "true"])
    assert "lab needs the program ip, of Linux: install iproute2" in capsys.readouterr().err
    for name in ("ip", "tc", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\necho refused >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="2"):
        cli.run(["lab", "-n", "2", "--", "true"])
    assert "needs root, or user namespaces, and these are refused here (refused)" in capsys.readouterr().err
