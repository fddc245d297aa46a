"""Store with which gloo connects processes, and gives up at once if one of them does not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_POLL_S = 0.005


class Meeting(Store):
    """Store that ends a wait for entries that will not come. gloo itself would wait for a dead process until its timeout.

    Args:
        store: where the entries are.
        is_over: raises RuntimeError if nobody else writes here.
        within: longest wait.
    """

    def __init__(self, store: Store, is_over: Callable[[], None], within: timedelta) -> None:
        super().__init__()
        self._store, self._is_over, self._within = store, is_over, within

    def set(self, key: str, value: bytes) -> None:
        """Write an entry."""
        self._store.set(key, value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Return an entry that is there."""
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for entries; raise RuntimeError if they do not come."""
        end = time.monotonic() + self._within.total_seconds()
        while not self._store.check(list(keys)):
            self._is_over()
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {self._within}: another process did not come to connect")
            time.sleep(_POLL_S)
