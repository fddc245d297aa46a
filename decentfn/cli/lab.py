"""Command that starts a program's ranks as hosts behind limited links, in network namespaces of this machine.

The namespaces have no names: only this process and its ranks hold them, and the kernel removes them, with their links, when
these have ended. Ranks end with this process, also if it is killed. Processes that a rank started may outlive a kill;
the next lab ends them.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from decentfn.core.arguments import require

_MARK = "DECENTFN_LAB"
"""Variable of the ranks: the process of their lab."""
_NEW_MOUNTS, _NEW_NAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_ENDS_WITH_PARENT = 1
_BURST_S = 2e-3
"""Time in which a link may exceed its rate."""
_STOPS = {signal.SIGINT, signal.SIGTERM}
"""Signals that end a lab and its ranks."""
_PATIENCE_S = 3
"""Time for the other ranks to report a rank that failed."""
_HEADER = 10
"""Bytes of the kernel's header before each packet: packets of up to 64 kB travel whole."""
_LONGEST = 2**16 + 64
_OPTIONS = [(263, 15), (263, 23)]
"""A header before each packet; only packets that arrive."""
_BUFFERS = [socket.SO_RCVBUF, socket.SO_SNDBUF, 33, 32]
"""Options for large buffers: up to the system's limits, and beyond, for root."""
_CHECKED_S = 0.05


def lab(
    command: Positional[tuple[str, ...]],
    *,
    num_hosts: Annotated[int, arg(aliases=["-n"])],
    mbit: tuple[float, ...] = (),
    delay_ms: tuple[float, ...] = (0.0,),
    ranks_per_host: int = 1,
) -> None:
    """Start a program as hosts behind limited links: `decentfn lab -n 4 --mbit 100 --delay-ms 5 -- python train.py`.

    Each host is a network namespace; nothing leaves the machine. Ranks of one host talk over its loopback device, which is
    not limited. They get the variables that torchrun sets. Needs Linux, iproute2, and root or user namespaces.

    Args:
        command: program of each rank, after `--`.
        num_hosts: number of hosts.
        mbit: rate of a host's link in each direction, Mbit/s: one for all, or one per host; none: no limit.
        delay_ms: time that a packet takes between two hosts, ms: one for all, or one per host, of which a packet takes half
            of the sender's and half of the receiver's.
        ranks_per_host: number of ranks of each host.
    """
    require(1 <= num_hosts <= 250, "lab", "1 to 250 hosts.", num_hosts=num_hosts)
    require(ranks_per_host >= 1, "lab", "a host has a rank.", ranks_per_host=ranks_per_host)
    require(bool(command), "lab", "end with the program to start, as in `-- python train.py`.", command=command)
    rule = "one number for all hosts, or one per host; rates from 0.01 to 100,000, delays from 0 to 10,000."
    require(len(mbit) in (0, 1, num_hosts) and all(0.01 <= x <= 1e5 for x in mbit), "lab", rule, mbit=mbit)
    require(len(delay_ms) in (1, num_hosts) and all(0 <= x <= 1e4 for x in delay_ms), "lab", rule, delay_ms=delay_ms)
    require(shutil.which(command[0]) is not None, "lab", "there is no such program.", command=command[0])
    _require_permission()
    _end_what_a_dead_lab_left()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end, too
    rates, delays = (list(values) * (num_hosts if len(values) == 1 else 1) for values in (mbit, delay_ms))
    with _hosts(num_hosts, rates, is_bridged=not any(delays)) as hosts:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until all ranks can be ended
        ranks = [_start(command, rank, hosts, ranks_per_host) for rank in range(num_hosts * ranks_per_host)]
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            _forward(_ports(num_hosts) if any(delays) else [], delays, ranks)
        finally:
            failed = [f"rank {i} ended with status {status}" for i, rank in enumerate(ranks) if (status := rank.poll())]
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    if failed:
        print(f"decentfn lab: {', '.join(failed)}.", file=sys.stderr)
        sys.exit(1)


def _require_permission() -> None:
    """Raise OSError with the reason if there can be no hosts; without root, start again in a user namespace."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise OSError(f"lab needs the program {tool}, of Linux: install iproute2 and util-linux.")
    if os.geteuid() == 0:
        return
    enter = ["unshare", "--map-root-user", "--net"]
    tried = subprocess.run([*enter, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise PermissionError(
            f"lab makes network namespaces, which needs root, or user namespaces, and these are refused here ({tried.stderr.strip()}); "
            "use sudo, or have them allowed (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0)."
        )
    sys.stdout.flush()
    os.execvp("unshare", [*enter, *sys.orig_argv])


def _end_what_a_dead_lab_left() -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            labs = [text.partition(b"=")[2].decode() for text in variables if text.startswith(_MARK.encode())]
            if labs and not Path("/proc", labs[0]).exists() and os.stat(process / "ns/pid").st_ino == here:
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def _hosts(n: int, rates: Sequence[float], is_bridged: bool) -> Iterator[list[int]]:
    """Connect `n` network namespaces, whose descriptors these are, by links from each to a switch; then be in the switch."""
    before, switch, *hosts = [os.open("/proc/self/ns/net", os.O_RDONLY), *(_namespace() for _ in range(n + 1))]
    try:
        _call("setns", switch, _NEW_NETWORK)
        lines = ["link add br0 type bridge", "link set br0 up"] if is_bridged else []
        for i, host in enumerate(hosts):
            peer = f"peer name eth0 address 02:00:00:00:00:{i:02x} netns /proc/{os.getpid()}/fd/{host}"
            lines += [f"link add p{i} type veth {peer}", f"link set p{i} up {'master br0' if is_bridged else ''}"]
        _run("ip -batch -", lines)
        for i, host in enumerate(hosts):
            rate = rates[i] if rates else None
            _shape(f"p{i}", rate)
            _call("setns", host, _NEW_NETWORK)
            _run("ip -batch -", ["link set lo up", f"addr add 10.77.0.{i + 1}/24 dev eth0", "link set eth0 up"])
            _shape("eth0", rate)
            _call("setns", switch, _NEW_NETWORK)
        yield hosts
    finally:
        _call("setns", before, _NEW_NETWORK)
        for descriptor in (before, switch, *hosts):
            os.close(descriptor)


def _namespace() -> int:
    """Make a network namespace with TCP Reno, which each kernel allows there: BBR pauses where messages cross."""
    _call("unshare", _NEW_NETWORK)
    ipv6 = [f"ipv6/conf/{which}/disable_ipv6" for which in ("all", "default")]  # no packets that nobody sent
    for name, value in [*((name, "1") for name in ipv6), ("ipv4/tcp_congestion_control", "reno")]:
        with suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _shape(device: str, mbit: float | None) -> None:
    if mbit is not None:
        burst = max(16 * 1024, round(mbit * 1e6 / 8 * _BURST_S))
        _run(f"tc qdisc add dev {device} root tbf rate {mbit:g}mbit burst {burst} latency 200ms")
        # Larger packets than the burst would be cut, and many small ones keep the processor busy. Their frames' headers count.
        _run(f"ip link set {device} gso_max_size {min(round(0.95 * burst), 65536)}")


def _run(command: str, lines: Sequence[str] = ()) -> None:
    done = subprocess.run(command.split(), input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"lab: `{command}` failed: {done.stderr.strip()}.")


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        reason = os.strerror(ctypes.get_errno())
        raise OSError(f"lab: {name}: {reason}; it needs the right to make network namespaces: use sudo.")


def _start(command: Sequence[str], rank: int, hosts: Sequence[int], local: int) -> subprocess.Popen[bytes]:
    host, size, libc = rank // local, len(hosts) * local, ctypes.CDLL(None)

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        libc.prctl(_ENDS_WITH_PARENT, signal.SIGKILL)
        libc.setns(hosts[host], _NEW_NETWORK)
        libc.unshare(_NEW_MOUNTS | _NEW_NAME)
        socket.sethostname(f"host{host}")
        libc.mount(b"none", b"/", None, 0x84000, None)  # private, recursively
        libc.mount(b"lab", b"/sys", b"sysfs", 0, None)  # its own interfaces in /sys/class/net; if it may

    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0", _MARK: os.getpid()}
    own = {name: str(value) for name, value in (place | meeting).items()}
    # One thread per rank, as torchrun does; and no warnings that 10.77.0.1 has no name.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | own
    return subprocess.Popen(command, env=environment, preexec_fn=enter, process_group=0, stdin=subprocess.DEVNULL)


# -- delays: packets between hosts, forwarded later ------------------------------------------------------------------


def _ports(n: int) -> list[socket.socket]:
    """Return sockets at the switch's ends p0, p1, ... of the links of `n` hosts; not read before this is called."""
    made = []
    for i in range(n):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        for level, option in _OPTIONS:
            port.setsockopt(level, option, 1)
        for option in _BUFFERS:
            with suppress(PermissionError):
                port.setsockopt(socket.SOL_SOCKET, option, 2**26)
        port.bind((f"p{i}", 3))
        port.setblocking(False)
        made.append(port)
    return made


def _forward(
    links: Sequence[socket.socket], delays_ms: Sequence[float], ranks: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Forward packets between links while a rank runs, and a little longer if one failed: late by half of the delays of both hosts."""
    with suppress(OSError, AttributeError):  # to be on time, where it may; not its children
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    waiting, number, checked, ends = list[tuple[float, int, int, bytes]](), 0, 0.0, math.inf
    while True:
        now = time.monotonic()
        if now >= checked + _CHECKED_S:
            checked, states = now, [rank.poll() for rank in ranks]
            ends = min(ends, now + _PATIENCE_S) if any(states) else ends
            if None not in states or now >= ends:
                return
        pause = min(checked + _CHECKED_S, waiting[0][0] if waiting else now + 1) - now
        ready, _, _ = select.select(links, [], [], max(0.0, pause))
        now = time.monotonic()
        for link in ready:
            source = links.index(link)
            for _ in range(32):
                try:
                    packet = link.recv(_LONGEST)
                except BlockingIOError:
                    break
                to = packet[_HEADER + 5]  # the last byte of a host's address is its number; 255: all
                for target in range(len(links)) if to == 255 else [to]:
                    if target != source and target < len(links):
                        number += 1
                        due = now + (delays_ms[source] + delays_ms[target]) / 2e3
                        heapq.heappush(waiting, (due, number, target, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            with suppress(OSError):  # its queue is full: dropped, as a switch does
                links[target].send(packet)
