"""Measurement of the links between the processes of a launch."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from decentfn.comm.collectives import World, gather_objects

_STREAMS, _MESSAGES = 4, 16
_ROUNDS = 15
"""Rounds of disjoint pairs of nodes: all pairs of up to 16 nodes."""
_SECONDS, _LONGEST_S = 7.0, 2.0
"""Time of all rounds, and of one: of the pings and the last messages. The messages before those, which are shorter, take as long."""
_MB, _AT_MOST_S = 25, 2.0
"""Size of an all-reduce and of an exchange; on a link where they take longer, they are smaller."""
_COUNTS = 40
"""Counts of what has arrived, in the time of a rate."""
_GET_ADDRESS = 0x8915
_INFO = struct.Struct("=128xQ16xI")
"""Of Linux's tcp_info: tcpi_bytes_received and tcpi_data_segs_in."""


def measure_links(world: World) -> dict[str, Any]:
    """Measure the links between all processes. Collective; takes at most about 20 s for 16 processes.

    A node is a network namespace of a machine. Pairs of nodes are measured in rounds of disjoint pairs, by one process of
    each, and inside nodes one pair of processes: empty messages, and large ones in both directions at once over one
    connection and over four, as gossip sends them, over gloo. A rate is that of a pair's fastest moment of 0.05 to 0.25 s. Of
    more than 16 nodes, each meets 15.

    Returns:
        dict, the same on all processes:
        `nodes`: of each its name, ranks, interface, mtu, nominal_mbit (None if it is virtual) and is_bridge;
        `pairs`: of each the ranks `from` and `to`, `between` (False: inside a node), times of an empty message (latency_ms of the
        fastest tenth, latency_median_ms, latency_99_ms), and rates, headers of frames included: mbit_one_stream, and mbit, the larger;
        `all_reduce_ms` and `exchange_ms`: 25 MB, on all processes at once, by `backend`.
    """
    groups: list[Any] = [dist.new_group(backend="gloo") for _ in range(_STREAMS)]
    nodes = _nodes(world)
    first = [node["ranks"][0] for node in nodes]
    inside = [(node["ranks"][0], node["ranks"][-1]) for node in nodes if len(node["ranks"]) > 1]
    rounds = [pairs for pairs in (inside, *_disjoint(first)) if pairs]
    found, seconds = list[dict[str, Any]](), min(_LONGEST_S, _SECONDS / len(rounds))
    for pairs in rounds:
        dist.barrier(groups[0])
        for a, b in pairs:
            if world.rank in (a, b):
                found.append(_pair(groups, a + b - world.rank, world.rank, seconds))
                found[-1]["between"] = pairs is not inside
                mtu = next(node["mtu"] for node in nodes if world.rank in node["ranks"])
                for name in ("mbit", "mbit_one_stream"):
                    found[-1][name] *= (mtu + 14) / (mtu - 52)
    pairs = [pair for its in gather_objects(found, world) for pair in its]
    timed = partial(_milliseconds, world, groups[0], min(pair["mbit"] for pair in pairs))
    return {
        "nodes": nodes,
        "pairs": pairs,
        "all_reduce_ms": timed(dist.all_reduce),
        "exchange_ms": timed(partial(_exchange, world, len(nodes[0]["ranks"]) % world.size or 1)),
        "backend": str(dist.get_backend()),
    }


# -- nodes ------------------------------------------------------------------------------------------------------------


def _nodes(world: World) -> list[dict[str, Any]]:
    name = _interface()
    folder = Path("/sys/class/net", name)
    own = {
        "key": Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net"),
        "name": socket.gethostname(),
        "interface": name,
        "mtu": int((folder / "mtu").read_text()),
        "nominal_mbit": None,
        "is_bridge": (folder / "bridge").exists(),
    }
    with suppress(OSError, ValueError):  # it has no speed
        own["nominal_mbit"] = int((folder / "speed").read_text()) if (folder / "device").exists() else None
    nodes = dict[str, dict[str, Any]]()
    for rank, its in enumerate(gather_objects(own, world)):
        nodes.setdefault(its.pop("key"), its | {"ranks": []})["ranks"].append(rank)
    return list(nodes.values())


def _interface() -> str:
    """Return the interface that gloo uses: the one that was set, else that of the host name's address."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        wanted = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                if ioctl(one, _GET_ADDRESS, struct.pack("256s", name.encode()))[20:24] == wanted:
                    return name
    return "lo"


def _disjoint(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Return rounds in which each meets at most one other, until all have met."""
    places: list[int | None] = [*ranks, *[None] * (len(ranks) % 2)]
    for _ in range(min(_ROUNDS, len(places) - 1)):
        half = len(places) // 2
        yield [(a, b) for a, b in zip(places[:half], reversed(places), strict=False) if a is not None and b is not None]
        places = [places[0], places[-1], *places[1:-1]]


# -- pairs of processes -----------------------------------------------------------------------------------------------


def _pair(groups: Sequence[Any], peer: int, rank: int, seconds: float) -> dict[str, Any]:
    latencies = quantiles(_latencies(groups[0], peer, rank < peer, seconds / 4), n=100, method="inclusive")
    one, size = _mbit(groups[:1], peer, seconds * 0.35, 2**14, 0.0)
    most, _ = _mbit(groups, peer, seconds * 0.35, size // _STREAMS, one)
    return {
        "from": peer,
        "to": rank,
        "latency_ms": 1e3 * latencies[9],
        "latency_median_ms": 1e3 * latencies[49],
        "latency_99_ms": 1e3 * latencies[-1],
        "mbit_one_stream": one,
        "mbit": most,
    }


def _latencies(group: Any, peer: int, asks: bool, seconds: float) -> list[float]:
    """Return half the times between two answers. One message travels at a time; one of both processes asks, and ends it.

    A receive is posted before its message is sent, as gloo wants it.
    """
    times, goes_on, answer = list[float](), True, _hear(group, peer)
    if asks:
        dist.send(torch.ones(1), peer, group)
    while goes_on:
        goes_on = answer() > 0
        times.append(time.monotonic())
        if goes_on:
            answer = _hear(group, peer)
        if goes_on or not asks:
            is_last = not goes_on or (asks and len(times) > 10 and times[-1] > times[0] + seconds)
            dist.send(torch.full((1,), float(not is_last)), peer, group)
    return [(after - before) / 2 for before, after in pairwise(times)]


def _hear(group: Any, peer: int) -> Callable[[], float]:
    """Post a receive of a number; return the function that waits for it."""
    heard = torch.empty(1)
    work = dist.irecv(heard, peer, group)

    def wait() -> float:
        work.wait()  # pyright: ignore[reportOptionalMemberAccess]
        return float(heard)

    return wait


def _mbit(groups: Sequence[Any], peer: int, seconds: float, size: int, rate: float) -> tuple[float, int]:
    """Return the rate in Mbit/s at which messages arrive while as many are sent, at least `rate`, and their size at last.

    It is that of the fastest third of `seconds`: in others a processor was busy, or a window still grew. Messages grow from
    `size` until they take half of `seconds`, and larger ones are no faster.
    """
    while True:
        x, inbox = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        counts = [_arrived()]
        works = [dist.irecv(inbox, peer, group) for group in groups for _ in range(_MESSAGES)]
        works += [dist.isend(x, peer, group) for group in groups for _ in range(_MESSAGES)]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(lambda its: [work.wait() for work in its], works)
            while not waiting.done():
                wait([waiting], seconds / _COUNTS)
                counts.append(_arrived())
        waiting.result()
        lasted, before = counts[-1].until - counts[0].since, rate
        if lasted >= seconds / 3:  # the mean, if this kernel does not count
            rate = max(rate, _fastest(counts, seconds / 3), size * len(works) * 4e-6 / lasted)
        growth = 8.0 if lasted < seconds / 10 else 2.0 if lasted < seconds / 2 or rate > 1.1 * before else 1.0
        theirs = _hear(groups[0], peer)
        dist.send(torch.tensor([growth]), peer, groups[0])
        growth = max(growth, theirs())
        if growth == 1:
            return rate, size
        size *= int(growth)


class _Count(NamedTuple):
    """What all TCP connections of this process have received, at some time between two."""

    since: float
    nbytes: int
    segments: int
    until: float


def _arrived() -> _Count:
    since, nbytes, segments = time.monotonic(), 0, 0
    if sys.platform == "linux":  # others count nothing
        libc, info = ctypes.CDLL(None), ctypes.create_string_buffer(_INFO.size)
        size = ctypes.byref(ctypes.c_uint(_INFO.size))
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, size) == 0:
                its = _INFO.unpack(info)
                nbytes, segments = nbytes + its[0], segments + its[1]
    return _Count(since, nbytes, segments, time.monotonic())


def _fastest(counts: Sequence[_Count], seconds: float) -> float:
    """Return the largest rate over so many seconds, in Mbit/s; 0 if there were fewer.

    It is that of segments: bytes that wait for a lost one before them are counted when it is there, all at once.
    """
    rates = [0.0]
    for one in counts:
        at = bisect_left(counts, one.since + seconds, key=lambda other: other.until)
        if at < len(counts):
            rates.append((counts[at].segments - one.segments) / (counts[at].until - one.since))
    first, last = counts[0], counts[-1]
    return max(rates) * (last.nbytes - first.nbytes) / max(1, last.segments - first.segments) * 8e-6


# -- all processes at once --------------------------------------------------------------------------------------------


def _exchange(world: World, distance: int, x: torch.Tensor) -> None:
    inbox, (to, source) = torch.empty_like(x), ((world.rank + way * distance) % world.size for way in (1, -1))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, inbox, source), dist.P2POp(dist.isend, x, to)]):
        work.wait()


def _milliseconds(world: World, group: Any, mbit: float, call: Callable[[torch.Tensor], Any]) -> float:
    """Return the time of a call with 25 MB on the slowest process; that of fewer, scaled, where it would take long."""
    mb = min(_MB, mbit / 16 * _AT_MOST_S)
    x = torch.zeros(round(mb * 1e6 / 4), device=world.device)
    call(x[:1000])  # connects
    dist.barrier(group)
    since = time.monotonic()
    call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return max(gather_objects(time.monotonic() - since, world)) * 1e3 * _MB / mb
