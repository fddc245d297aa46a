"""Start the ranks: as plain processes, or on hosts, each a network namespace behind a rate-limited link."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPING_MS = 2  # tbf's burst, in ms of the rate


def _sh(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def hosts(n: int, mbit: float, slower: float = 1.0) -> Iterator[list[str]]:
    """`n` network namespaces joined by a bridge, each with a full-duplex link of `mbit` Mbit/s; their names.

    The last one's link is `slower` times slower. Needs root and iproute2. The bridge has no way out, so nothing leaves the machine.
    """
    if os.geteuid() != 0:
        raise SystemExit("--link-mbit makes network namespaces and needs root; or use torchrun on real hosts.")
    tag = f"df{os.getpid() % 100000}"
    switch, names = f"{tag}s", [f"{tag}h{i}" for i in range(n)]

    def inside(namespace: str, *command: str, check: bool = True) -> None:
        _sh("ip", "netns", "exec", namespace, *command, check=check)

    def shape(namespace: str, device: str, rate: float) -> None:
        burst = f"{max(16, int(rate * 1e6 / 8 * SHAPING_MS * 1e-3 / 1024))}kb"
        limit = ("rate", f"{rate:g}mbit", "burst", burst, "latency", "50ms")
        inside(namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)

    try:
        for namespace in (switch, *names):
            _sh("ip", "netns", "add", namespace)
            inside(namespace, "ip", "link", "set", "lo", "up")
            # No IPv6 chatter in the byte counters.
            inside(namespace, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", check=False)
            inside(namespace, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1", check=False)
        inside(switch, "ip", "link", "add", "br0", "type", "bridge")
        inside(switch, "ip", "link", "set", "br0", "up")
        for i, name in enumerate(names):
            port = f"p{i}"
            inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            inside(switch, "ip", "link", "set", port, "master", "br0", "up")
            inside(name, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            inside(name, "ip", "link", "set", "eth0", "up")
            rate = mbit / slower if i == n - 1 else mbit
            shape(name, "eth0", rate)
            shape(switch, port, rate)
        yield names
    finally:
        for namespace in (*names, switch):
            _sh("ip", "netns", "del", namespace, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    script: str,
    arguments: list[str],
    n: int,
    *,
    ranks_per_host: int = 1,
    mbit: float | None = None,
    slower: float = 1.0,
    timeout: float = 3600,
    **environment: str,
) -> Any:
    """Run `script` on `n` hosts of so many ranks and return what rank 0 wrote as JSON to $BENCHMARK_RESULT.

    Ranks of one host talk over its loopback device, which no link limits. Without `mbit` all are this machine's.
    The last host's link is `slower` times slower.
    """
    # So that a polite kill ends the ranks and removes the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if mbit is None:
        ranks = n * ranks_per_host
        return _run(script, arguments, [[]] * ranks, ranks, "127.0.0.1", None, timeout, environment)
    with hosts(n, mbit, slower) as names:
        prefixes = [["ip", "netns", "exec", name] for name in names for _ in range(ranks_per_host)]
        return _run(script, arguments, prefixes, ranks_per_host, "10.77.0.1", "eth0", timeout, environment)


def _run(
    script: str,
    arguments: list[str],
    prefixes: list[list[str]],
    of_a_host: int,
    address: str,
    interface: str | None,
    timeout: float,
    environment: dict[str, str],
) -> Any:
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        shared = {
            "WORLD_SIZE": str(len(prefixes)),
            "LOCAL_WORLD_SIZE": str(of_a_host),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(_free_port()),
            "BENCHMARK_RESULT": str(result),
            # As torchrun does: one thread each, and no rank compiles with all cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        shared |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        try:
            for rank, prefix in enumerate(prefixes):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank % of_a_host)}
                command = [*prefix, sys.executable, script, *arguments]
                processes.append(subprocess.Popen(command, env=os.environ | shared | place | environment))
            end = time.monotonic() + timeout
            while any(process.poll() is None for process in processes):
                if time.monotonic() > end or any(process.poll() for process in processes):
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit(f"ranks ended with {[process.returncode for process in processes]}.")
        return json.loads(result.read_text())
