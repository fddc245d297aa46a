"""Training through an encrypted tunnel, as SECURITY.md describes it; WireGuard runs as a process, without a kernel module."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.hosts import LAB, hosts, needs_hosts  # noqa: F401

TUNNEL = """
set -e
mount -t tmpfs none /run  # its own sockets
cd "$1"
wireguard-go -f wg0 >/dev/null 2>&1 &
until test -e /run/wireguard/wg0.sock; do sleep 0.1; done
wg set wg0 private-key key$RANK listen-port 51820
other=$((1 - RANK))
wg set wg0 peer "$(cat public$other)" allowed-ips 10.9.0.$((other + 1))/32 endpoint 10.77.0.$((other + 1)):51820
ip addr add 10.9.0.$((RANK + 1))/24 dev wg0
ip link set wg0 up mtu 1420
export MASTER_ADDR=10.9.0.1 GLOO_SOCKET_IFNAME=wg0
exec "$2" -c "$3"
"""
PROGRAM = """
import json, os, pathlib, time, torch
import torch.distributed as dist
import decentfn as df
here = df.init()
topology = df.topology("one-peer-exp", here.size)
init, step = df.adapt_then_combine(lambda x, batch: ((x - batch) ** 2).sum(), df.sgd(0.1), topology)
state, batch = init(torch.zeros(1_000_000)), torch.full((1_000_000,), here.rank + 1 / 3)
sent = pathlib.Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
state, _ = step(state, batch, 0)
dist.barrier()
before, since = int(sent.read_text()), time.monotonic()
for t in range(1, 11):
    state, _ = step(state, batch, t)
dist.barrier()
if here.rank == 0:
    took = (time.monotonic() - since) * 100
    print(json.dumps({"x": df.params(state)[::250_000].tolist(), "bytes": int(sent.read_text()) - before, "ms": took}))
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("wireguard-go") is None or shutil.which("wg") is None,
    reason="install wireguard-go and wireguard-tools",
)
@pytest.mark.parametrize("mbit", [50, 100, 200])
def test_training_through_wireguard_ends_with_the_same_bits(mbit, tmp_path):
    os.umask(0o077)
    for rank in (0, 1):
        key = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
        public = subprocess.run(["wg", "pubkey"], input=key, capture_output=True, text=True, check=True).stdout
        (tmp_path / f"key{rank}").write_text(key)
        (tmp_path / f"public{rank}").write_text(public)
    program = {
        "plain": [sys.executable, "-c", PROGRAM],
        "tunnel": ["sh", "-c", TUNNEL, "sh", str(tmp_path), sys.executable, PROGRAM],
    }
    found = {
        way: json.loads(
            subprocess.run(
                [*LAB, "-n", "2", "--mbit", str(mbit), "--", *words], capture_output=True, timeout=600
            ).stdout
        )
        for way, words in program.items()
    }
    assert found["tunnel"]["x"] == found["plain"]["x"] and len(set(found["plain"]["x"])) == 1
    assert found["tunnel"]["bytes"] >= 40_000_000  # all of it took the tunnel
    print(f"{mbit} Mbit/s: {found['plain']['ms']:.0f} ms a step, through the tunnel {found['tunnel']['ms']:.0f}")
