"""Delays of the lab's links: packets between its hosts, forwarded later."""

from __future__ import annotations

import heapq
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

_HEADER = 10
"""Bytes of the kernel's header before each packet: packets of up to 64 kB travel whole."""
_LONGEST = 2**16 + 64
_OPTIONS = [(263, 15, 1), (263, 23, 1)]
"""A header before each packet; only packets that arrive."""
_BUFFERS = [(socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32)]
"""Options for large buffers: up to the system's limits, and beyond, for root."""
_CHECKED_S = 0.05


def ports(n: int) -> list[socket.socket]:
    """Return sockets at the switch's ends p0, p1, ... of the links of `n` hosts; not read before this is called."""
    made = []
    for i in range(n):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        for level, option, value in _OPTIONS:
            port.setsockopt(level, option, value)
        for option in (option for both in _BUFFERS for option in both):
            with suppress(PermissionError):
                port.setsockopt(socket.SOL_SOCKET, option, 2**26)
        port.bind((f"p{i}", 3))
        port.setblocking(False)
        made.append(port)
    return made


def forward(links: Sequence[socket.socket], delays_ms: Sequence[float], is_running: Callable[[], bool]) -> None:
    """Forward packets between links until `is_running` is False: late by half of the delays of both hosts."""
    with suppress(OSError, AttributeError):  # to be on time, where it may; not its children
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    waiting, number, checked = list[tuple[float, int, int, bytes]](), 0, 0.0
    while True:
        now = time.monotonic()
        if now >= checked + _CHECKED_S:
            checked = now
            if not is_running():
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
