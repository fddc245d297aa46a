"""The mailbox's threads: a message wakes the one that waits for its letter, and none waits for ever."""

import queue
import random
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import mailbox
from decentfn.core.buckets import flatten

N = 5
EVERYONE = df.topologies.from_shifts("everyone", [{k: 1 / N for k in range(1, N)}], N)
PATIENCE = timedelta(seconds=60)


class Condition(threading.Condition):
    """Counts its wake-ups, and says when somebody begins to wait."""

    begins = threading.Semaphore(0)
    wakes = 0

    def wait(self, timeout=None):
        self.begins.release()  # under the lock: who takes it from here on finds a thread that waits
        is_there = super().wait(timeout)
        self.wakes += 1
        return is_there


class Wires:
    """Connections of ranks that are threads: a message is sent at once, and received when it is there."""

    def __init__(self):
        self.wires = {(i, j): queue.Queue() for i in range(N) for j in range(N)}

    def group(self, rank):
        def send(tensors, peer, tag):
            return SimpleNamespace(wait=lambda timeout: self.wires[rank, peer].put(tensors[0].clone()))

        def recv(tensors, peer, tag):
            def wait(timeout):
                if (message := self.wires[peer, rank].get()) is None:
                    raise RuntimeError("closed")
                tensors[0].copy_(message)

            return SimpleNamespace(wait=wait)

        return SimpleNamespace(send=send, recv=recv, rank=rank)

    def close(self, groups):
        for group in groups:
            for peer in range(N):
                self.wires[peer, group.rank].put(None)


@pytest.fixture
def open_box(monkeypatch):
    wires = Wires()
    monkeypatch.setattr(mailbox, "close", wires.close)
    names = {name: getattr(threading, name) for name in ("Lock", "Thread")}
    monkeypatch.setattr(mailbox, "threading", SimpleNamespace(Condition=Condition, **names))
    monkeypatch.setattr(Condition, "begins", threading.Semaphore(0))

    def made(rank):
        channels = SimpleNamespace(longest_wait=PATIENCE, connected=lambda name, ranks: wires.group(rank))
        channels.apart = lambda timeout: channels
        here = SimpleNamespace(identity=SimpleNamespace(rank=rank, size=N), channels=channels)
        return mailbox.Mailbox(here, EVERYONE, [torch.zeros(2)], flatten({"w": torch.zeros(2)}))

    made.wires = wires.wires
    return made


def begins(times):
    for _ in range(times):
        assert Condition.begins.acquire(timeout=PATIENCE.total_seconds())


def message(box, step):
    bytes_ = torch.zeros_like(box._in[0].bytes)
    bytes_[:8].view(torch.int64).fill_(step)
    return bytes_


def test_a_message_wakes_the_thread_that_waits_for_its_letter_and_no_other(open_box):
    box, x, w = open_box(0), torch.ones(2), torch.ones((), dtype=torch.float64)
    begins(N - 1)  # the threads that send
    for step in range(10):
        went = box.offer(step, [x], [0.1] * (N - 1), 0.15)
        assert sorted(went)[-2:] == [0, 0.1]  # there is no mass for more
        begins(1)  # it is sent
    [(told, letter)] = [(peer, box._out[peer]) for peer, count in box.sent_to.items() if count]
    assert box.sent_to[told] == letter.changed.wakes == 10
    for step in range(10):
        for peer in (2, 4):
            open_box.wires[peer, 0].put(message(box, step))
        begins(2)  # both are there
        box.take(step, [x, w])
    box.close()
    wakes = {name: one.changed.wakes for name, one in (*((f"from {a.peer}", a) for a in box._in), *box._out.items())}
    sends = {peer: 1 + 10 * (peer == told) for peer in range(1, N)}  # the last time to say goodbye
    assert wakes == {"from 1": 0, "from 2": 10, "from 3": 0, "from 4": 10} | sends
    assert box._changed.wakes == 0  # nobody has settled


def test_a_lost_rank_gets_no_mass_and_a_settling_does_not_wait_for_its_mail(open_box):
    box, x, w = open_box(0), torch.ones(2), torch.ones((), dtype=torch.float64)
    begins(N - 1)
    assert box.offer(0, [x], [0.1] * (N - 1), 0.1) == [0] * (N - 1)  # no mass would stay
    for letter in (box._in[0], *box._out.values()):
        box._lose(letter, None)
    assert box.offer(1, [x], [0.1] * (N - 1), 0.9) == [0] * (N - 1)
    done = threading.Thread(target=box.take, args=(2, [x, w], {1: 3}), daemon=True)
    done.start()
    done.join(PATIENCE.total_seconds() / 2)
    assert not done.is_alive()
    box.close()


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_left_waiting(open_box, seed):
    """All mail is taken by a settling, as many messages as were sent, and each thread ends with its mailbox."""
    boxes, draw = [open_box(rank) for rank in range(N)], random.Random(seed)
    x, w = torch.ones(2), torch.ones((), dtype=torch.float64)
    for step in range(200):
        rank = draw.randrange(N)
        boxes[rank].take(step, [x, w])
        boxes[rank].offer(step, [x], [0.1] * (N - 1), 0.1 * draw.randrange(N))
    sent = {box.rank: dict(box.sent_to) for box in boxes}
    for box in boxes:
        counts = {peer: sent[peer][box.rank] for peer in box.taken_from}
        settler = threading.Thread(target=box.take, args=(0, [x, w], counts), daemon=True)
        settler.start()
        settler.join(PATIENCE.total_seconds() / 2)
        assert not settler.is_alive() and box.taken_from == counts
    closing = [threading.Thread(target=box.close, daemon=True) for box in boxes]
    for thread in closing:
        thread.start()
    for thread in (*closing, *(one for box in boxes for one in box._threads)):
        thread.join(PATIENCE.total_seconds())
        assert not thread.is_alive()
