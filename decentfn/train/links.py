"""Measurement of the links between the processes of a launch."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, quantiles
from typing import Any

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
_GET_ADDRESS = 0x8915


def measure_links(world: World) -> dict[str, Any]:
    """Measure the links between all processes. Collective; takes at most about 20 s for 16 processes.

    A node is a network namespace of a machine. Pairs of nodes are measured in rounds of disjoint pairs, by one process of
    each, and inside nodes one pair of processes: empty messages, and large ones in both directions at once over one
    connection and over four, as gossip sends them, over gloo. Of more than 16 nodes, each meets 15.

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
    one, all_of_them = (_mbit(streams, peer, seconds * share) for streams, share in ((groups[:1], 0.3), (groups, 0.4)))
    return {
        "from": peer,
        "to": rank,
        "latency_ms": 1e3 * latencies[9],
        "latency_median_ms": 1e3 * latencies[49],
        "latency_99_ms": 1e3 * latencies[-1],
        "mbit_one_stream": one,
        "mbit": max(one, all_of_them),
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


def _mbit(groups: Sequence[Any], peer: int, seconds: float) -> float:
    """Return the rate in Mbit/s at which messages arrive while as many are sent.

    They grow until they arrive for so long (what came while a busy process was away arrives at once), and larger ones are no faster.
    """
    size, growth, last = 2**14, 2.0, 0.0
    while True:
        x, inbox = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        receives = [[dist.irecv(inbox, peer, group) for _ in range(_MESSAGES)] for group in groups]
        sends = [dist.isend(x, peer, group) for group in groups for _ in range(_MESSAGES)]
        with ThreadPoolExecutor(len(groups)) as threads:
            streams = list(threads.map(_arrivals, receives))
        _arrivals(sends)
        end = min(times[-1] for times in streams)  # of the first stream: later ones have the link to themselves
        times = sorted(t for stream in streams for t in stream if t <= end)
        lasted, times = times[-1] - times[0], times[len(times) // 4 :]
        rate = linear_regression(times, range(len(times))).slope * size * 8e-6
        growth = 8.0 if lasted < seconds / 10 else 2.0 if lasted < seconds or rate > 1.1 * last else 1.0
        theirs = _hear(groups[0], peer)
        dist.send(torch.tensor([growth]), peer, groups[0])
        growth, last = max(growth, theirs()), rate
        if growth == 1:
            return rate
        size *= int(growth)


def _arrivals(works: Sequence[Any]) -> list[float]:
    times = []
    for work in works:
        work.wait()
        times.append(time.monotonic())
    return times


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
