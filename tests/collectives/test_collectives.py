"""The operators against plain indexing, on real gloo ranks (threads) and under vmap."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

import decentfn as df
from decentfn import collectives
from decentfn.collectives import exchange, group_mean, wait, worker_index
from decentfn.collectives.messages import Flight, Part
from decentfn.testing import on_ranks


@st.composite
def peer_tables(draw, max_workers=5):
    """`[P, 2, N, K]`: random permutations, some links silent."""
    n, slots, phases = draw(st.integers(1, max_workers)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    table = torch.empty(phases, 2, n, slots, dtype=torch.int64)
    for p in range(phases):
        for k in range(slots):
            sources = torch.tensor(draw(st.permutations(range(n))))
            destinations = sources.argsort()
            for i in range(n):
                if draw(st.integers(0, 3)) == 0:
                    destinations[sources[i]] = -1
                    sources[i] = -1
            table[p, 0, :, k], table[p, 1, :, k] = sources, destinations
    return table


def heard_by(table, x, t, per_slot):
    """What worker i hears, by plain indexing: `[N, K, D]`."""
    sources = table[t % len(table), 0]
    n, slots = sources.shape
    rows = [
        [
            torch.zeros(x.shape[-1], dtype=x.dtype)
            if sources[i, k] < 0
            else (x[sources[i, k], k] if per_slot else x[sources[i, k]])
            for k in range(slots)
        ]
        for i in range(n)
    ]
    return torch.stack([torch.stack(row) for row in rows])


@given(table=peer_tables(), t=st.integers(0, 7), per_slot=st.booleans(), seed=st.integers(0, 99))
def test_exchange_hears_exactly_the_named_peers(table, t, per_slot, seed):
    _, _, n, slots = table.shape
    shape = (n, slots, 7) if per_slot else (n, 7)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    step = torch.tensor(t)

    def one(payload):
        return wait(exchange(payload, table, step, per_slot=per_slot))

    expected = heard_by(table, x, t, per_slot)
    assert torch.equal(vmap(one)(x), expected)
    assert torch.equal(torch.stack(on_ranks(n, lambda rank: one(x[rank]))), expected)


@given(n=st.sampled_from([2, 4]), local=st.sampled_from([1, 2, 3]), per_slot=st.booleans(), seed=st.integers(0, 99))
def test_workers_spread_over_processes_hear_the_same(n, local, per_slot, seed):
    workers = n * local
    random = torch.Generator().manual_seed(seed)
    sources = torch.stack([torch.randperm(workers, generator=random) for _ in range(2)], dim=1)
    table = torch.stack([sources, sources.argsort(0)])[None]
    x = torch.randn((workers, 2, 5) if per_slot else (workers, 5), generator=random)

    def mine(rank):
        rows = x[rank * local : (rank + 1) * local]
        return vmap(lambda row: wait(exchange(row, table, torch.tensor(0), per_slot=per_slot)))(rows)

    assert torch.equal(torch.cat(on_ranks(n, mine)), heard_by(table, x, 0, per_slot))


@given(
    groups=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    processes=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_group_mean_is_the_mean_over_the_group(groups, processes, dtype):
    groups = groups * 2 if len(groups) % 2 else groups
    groups = [groups.index(group) for group in groups]  # numbers below N
    table, n = torch.tensor([groups]), len(groups)
    x = torch.arange(3 * n, dtype=dtype).view(n, 3) / 7
    row = table[0]
    expected = torch.stack([x[row == row[i]].mean(0) for i in range(n)])

    def mine(rank):
        collectives.make_groups(table)
        rows = x[rank * n // processes : (rank + 1) * n // processes]
        return vmap(lambda r: wait(group_mean(r, table, torch.tensor(0))))(rows)

    torch.testing.assert_close(torch.cat(on_ranks(processes, mine)), expected)

    def alone(rank):
        collectives.make_groups(table)
        return wait(group_mean(x[rank], table, torch.tensor(0)))

    torch.testing.assert_close(torch.stack(on_ranks(n, alone)), expected)


def test_worker_index_counts_workers_through_processes():
    token = torch.zeros(3)
    assert [int(i) for i in on_ranks(3, lambda rank: worker_index(token))] == [0, 1, 2]
    stacked = on_ranks(2, lambda rank: vmap(worker_index)(token.expand(3, 3)).tolist())
    assert stacked == [[0, 1, 2], [3, 4, 5]]


def test_one_worker_exchanges_with_itself():
    table = torch.zeros(1, 2, 1, 1, dtype=torch.int64)
    x = torch.arange(4.0)
    assert torch.equal(wait(exchange(x, table, torch.tensor(5))), x[None])


@pytest.mark.parametrize(
    ("local", "size", "threads", "expected"),
    [
        (None, None, 64, ["receive", "send"]),
        ("2", "2", 64, ["send", "receive"]),
        ("2", "4", 64, ["receive", "send"]),
        ("1", "1", 0, ["receive", "send"]),
    ],
    ids=["not by torchrun", "cores all busy", "other machines", "cores to spare"],
)
def test_what_is_posted_first(local, size, threads, expected, monkeypatch):
    """Receives, or a link carries one way after the other; sends where all processes share this machine's cores."""
    order = []
    for name, value in {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": size}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    class Recorder:
        def recv(self, tensors, rank, tag):
            order.append("receive")
            return Done()

        def send(self, tensors, rank, tag):
            order.append("send")
            return Done()

    class Done:
        def wait(self):
            pass

    table = df.topology("ring", 2).peers
    with collectives.use(collectives.World(Recorder(), 0, 2)):
        wait(exchange(torch.ones(3), table, torch.tensor(0)))
    assert order == expected


def test_who_posts_does_not_wait_for_gloo():
    """Whose locks may be held for milliseconds; who takes the messages waits until they were posted, in their order."""
    order, free = [], threading.Event()

    class Busy:
        def recv(self, tensors, rank, tag):
            assert free.wait(60)
            order.append(("receive", tensors[0].numel()))
            return self

        def send(self, tensors, rank, tag):
            order.append(("send", tensors[0].numel()))
            return self

        def wait(self):
            pass

    table = df.topology("ring", 2).peers
    with collectives.use(collectives.World(Busy(), 0, 2)):
        posted = [exchange(torch.ones(size), table, torch.tensor(0)) for size in (3, 4)]
        assert not order
        free.set()
        wait(posted[1])
        assert order == [(kind, size) for size in (3, 4) for kind in ("receive", "send")]
        wait(posted[0])


def test_no_message_is_asked_for_after_one_that_was_refused():
    """Whichever is waited for first, it is the refused one's peer that is named."""
    asked = []

    class Refuses:
        def send(self, tensors, rank, tag):
            asked.append(rank)
            if rank == 1:
                raise RuntimeError("closed")

    here = collectives.World(Refuses(), 0, 3)
    flights = [Flight(here, None, [Part(torch.ones(1), None, rank)]) for rank in (2, 1, 2)]
    for flight in flights:
        flight.ask(here.group, 0, 1)
    assert asked == [2, 1] and [len(flight.works) for flight in flights] == [1, 0, 0]
    assert [flight.refused and flight.refused[1].rank for flight in flights] == [None, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_dtype_travels(dtype):
    table = df.topology("ring", 2).peers
    x = torch.arange(8).view(2, 4).to(dtype)
    heard = on_ranks(2, lambda rank: wait(exchange(x[rank], table, torch.tensor(0))))
    assert torch.equal(torch.cat(heard), x.flip(0))


def test_an_empty_bucket_travels_too():
    table = df.topology("ring", 2).peers
    heard = on_ranks(2, lambda rank: wait(exchange(torch.empty(0), table, torch.tensor(0))))
    assert [h.shape for h in heard] == [(1, 0), (1, 0)]


def test_a_dead_peer_is_named():
    table = df.topology("ring", 2).peers

    class Dead:
        def recv(self, *args):
            return self

        send = recv

        def wait(self, *timeout):
            raise RuntimeError("Connection closed by peer [10.0.0.1]:1")

        def size(self):
            return 2

        def rank(self):
            return 0

    with (
        collectives.use(collectives.World(Dead(), 0, 2)),
        pytest.raises(
            df.errors.PeerLost, match=r"t=5 on worker 0: exchange 1 .*\(12 bytes\) with worker 1 in slot 0"
        ) as caught,
    ):
        wait(exchange(torch.ones(3), table, torch.tensor(5)))
    assert caught.match("worker 1 has died, or has left: Connection closed")
    assert (caught.value.worker, caught.value.step, caught.value.peer) == (0, 5, 1)


def test_a_world_of_another_size_is_refused():
    table = df.topology("ring", 4).peers
    with pytest.raises(ValueError, match=r"num_workers=4.*1 process\(es\) hold 1 worker.*torchrun.*simulate"):
        exchange(torch.ones(3), table, torch.tensor(0))
    with pytest.raises(ValueError, match="num_workers=4"):
        vmap(lambda x: wait(exchange(x, table, torch.tensor(0))))(torch.ones(2, 3))


def test_a_group_that_was_never_made_is_named():
    table = torch.tensor([[0, 0, 1, 1]])

    def mine(rank):
        with pytest.raises(RuntimeError, match=r"over ranks \[\d, \d\]: its process group was never made.*init"):
            group_mean(torch.ones(3), table, torch.tensor(0))

    on_ranks(4, mine)


def test_vmap_over_something_else_than_workers_is_refused():
    table = torch.zeros(1, 2, 1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="the peers and t must not"):
        vmap(lambda t: exchange(torch.ones(3), table, t))(torch.tensor([0, 1]))


def test_what_arrives_takes_the_memory_of_what_was_used_up_and_no_other():
    """Ranks use two messages of a step, keep a third, and let go of the first two: their memory, and only theirs."""
    table = torch.tensor([1, 0]).view(1, 1, 2, 1).expand(1, 2, 2, 1)

    def receive(rank, value):
        return exchange(torch.full((1000,), float(value + rank)), table, torch.tensor(0))

    def one(rank):
        first, second = receive(rank, 0), receive(rank, 10)
        view = second[0, 1:]
        places = first.data_ptr(), second.data_ptr()
        wait(first), wait(second)
        del first, second  # a view of the second lives on
        third, fourth = receive(rank, 20), receive(rank, 30)
        heard = [wait(message)[0, 0].item() - (1 - rank) for message in (third, fourth)]
        again = third.data_ptr() == places[0], fourth.data_ptr() in places
        return again, heard, (view == 10.0 + 1 - rank).all().item()

    assert on_ranks(2, one) == [((True, False), [20.0, 30.0], True)] * 2


def test_a_message_nobody_waits_for_still_arrives():
    """Worker 0 only tells: what it posted stays posted though it drops the result, and the next message is another one."""
    table = torch.tensor([[-1, 0], [1, -1]]).view(1, 2, 2, 1)

    def one(rank):
        inboxes = []
        time.sleep(0.3 * rank)  # worker 0 has dropped both results before anybody takes the messages
        for value in (5.0, 6.0):
            inbox = exchange(torch.full((1_000_000,), value), table, torch.tensor(0))
            if rank == 1:
                inboxes.append(inbox)
            del inbox
        return [wait(inbox)[0, 0].item() for inbox in inboxes]

    assert on_ranks(2, one, timeout=timedelta(seconds=20)) == [[], [5.0, 6.0]]


def test_memory_that_other_processes_see_is_not_written_again():
    table = torch.tensor([1, 0]).view(1, 1, 2, 1).expand(1, 2, 2, 1)

    def one(rank):
        first = exchange(torch.ones(1000), table, torch.tensor(0))
        wait(first)
        place = first.share_memory_().data_ptr()
        del first
        second = exchange(torch.ones(1000), table, torch.tensor(0))
        wait(second)
        return second.data_ptr() != place and not second.is_shared()

    assert on_ranks(2, one) == [True, True]
