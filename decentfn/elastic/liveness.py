"""Liveness of a process: an open port that tells others whether the process still exists, without a thread.

The system accepts connections for a process that computes or is stopped, and refuses them once it has ended.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from torch.distributed.distributed_c10d import Store

_PATIENCE_S = 0.3


class Liveness:
    """This process's port, and the others' addresses, which a store of its own has by seat."""

    def __init__(self, store: Store, seat: int) -> None:
        ip6 = socket.has_dualstack_ipv6()
        self._port = socket.create_server(
            ("", 0), family=socket.AF_INET6 if ip6 else socket.AF_INET, backlog=512, dualstack_ipv6=ip6
        )
        self._port.setblocking(False)
        weakref.finalize(self, self._port.close)
        # A DataLoader's forked workers may outlive the process, and would answer for it.
        own = weakref.ref(self._port)
        os.register_at_fork(after_in_child=lambda: None if (port := own()) is None else port.close())
        store.set(str(seat), f"{_own_address()} {self._port.getsockname()[1]}")
        self._store = store
        self._addresses: dict[int, tuple[str, int]] = {}
        self._known = set[int]()

    def learn(self, seats: Iterable[int], *, answered: bool = False) -> None:
        """Look up the addresses of these processes; wait for those that have not written theirs.

        Where an address is wrong from the start, as on a machine with several, nothing follows from a refusal, unless
        the process is known to have `answered` another one.
        """
        if answered:
            self._known.update(seats)
        if not (new := [seat for seat in seats if seat not in self._addresses]):
            return
        for seat, told in zip(new, self._store.multi_get([str(seat) for seat in new]), strict=True):
            host, port = told.decode().split()
            self._addresses[seat] = host, int(port)
            if self._probe(seat) == "answers":
                self._known.add(seat)

    def any_answers(self, seats: Iterable[int]) -> bool:
        """Return True if one of these processes answers, whose addresses may not be there yet."""
        there = [seat for seat in seats if self._store.check([str(seat)])]
        self.learn(there)
        return any(self._probe(seat) == "answers" for seat in there)

    def close(self) -> None:
        """Answer nobody any more."""
        self._port.close()

    def probe(self, seat: int) -> Literal["answers", "gone", "silent"]:
        """Return "gone" if a process has ended, "silent" if its machine is not reached.

        One that has never answered counts as answering: its address may be wrong.
        """
        return self._probe(seat) if seat in self._known else "answers"

    def is_gone(self, seat: int) -> bool:
        """Return True if a process has ended."""
        return self.probe(seat) == "gone"

    def reaches(self, seat: int) -> bool:
        """Return True if a process answers, and has answered before."""
        return seat in self._known and self._probe(seat) == "answers"

    def clear(self) -> None:
        """Forget who has probed; a full queue would drop further probes."""
        with suppress(BlockingIOError):
            while True:
                self._port.accept()[0].close()

    def _probe(self, seat: int) -> Literal["answers", "gone", "silent"]:
        try:
            socket.create_connection(self._addresses[seat], _PATIENCE_S).close()
        except ConnectionRefusedError:
            return "gone"
        except OSError:
            return "silent"
        return "answers"


def _own_address() -> str:
    """Return the address from which this process reaches the store."""
    place = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    with suppress(OSError), socket.create_connection(place, 10) as connection:  # without a place, none is found
        return connection.getsockname()[0]
    return "127.0.0.1"
