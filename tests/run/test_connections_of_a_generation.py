"""Connections between processes of which one dies meanwhile."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from decentfn.elastic import connections

MINUTES = timedelta(minutes=10)


class Last(dist.Store):
    """Store of a process that dies when it has written its address."""

    def __init__(self, store):
        super().__init__()
        self._store = store

    def set(self, key, value):
        self._store.set(key, value)
        raise RuntimeError("died")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_after_it_has_come_is_not_waited_for(rank, monkeypatch):
    """gloo itself would try five times for the whole timeout of `df.init`."""
    monkeypatch.setattr(connections, "_CONNECTING", timedelta(seconds=0.1))
    store, since = dist.HashStore(), time.monotonic()
    store.set("came 0", "")
    store.set("came 1", "")
    with pytest.raises(RuntimeError, match="died"):
        dist.ProcessGroupGloo(Last(store), 1 - rank, 2, MINUTES)
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        connections.connected(store, rank, 2, MINUTES, MINUTES, lambda: None)
    assert time.monotonic() - since < MINUTES.total_seconds() / 2


def test_whoever_waits_for_a_lost_process_hears_of_it_at_once():
    def lost():
        raise RuntimeError("process 1 has ended")

    with pytest.raises(RuntimeError, match="process 1 has ended"):
        connections.connected(dist.HashStore(), 0, 2, MINUTES, MINUTES, lost)
    with pytest.raises(RuntimeError, match="did not come"):
        connections.connected(dist.HashStore(), 0, 2, MINUTES, timedelta(0), lambda: None)
