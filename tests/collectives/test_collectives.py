"""The operators against plain indexing, on real gloo ranks (threads) and under vmap."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.func import vmap

import decentfn as df
from decentfn.comm import collectives, gossip
from decentfn.comm.collectives import exchange, group_mean, look_up, on_device, wait
from decentfn.core.buckets import loose
from decentfn.core.scalars import Numbers
from decentfn.testing import on_ranks
from decentfn.topologies import Round, Topology


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


def schedule(table):
    """The topology of a table of peers; its weights do not matter here."""
    _, _, n, slots = table.shape
    rounds = [Round(*peers, torch.zeros(n, slots + 1, dtype=torch.float64)) for peers in table]
    alone = torch.arange(n)[None, :, None].expand(1, n, slots)
    weights = torch.zeros(1, n, slots + 1, dtype=torch.float64)
    return Topology("mine", n, alone, weights, draw=lambda t: rounds[int(t) % len(rounds)])


def grouped(groups):
    """The topology that averages in these groups, `[P, N]`, in every step."""
    n = groups.shape[1]
    alone, ones = torch.empty(len(groups), n, 0, dtype=torch.int64), torch.ones(len(groups), n, dtype=torch.float64)
    return Topology("mine", n, alone, 0 * ones[..., None], groups, ones)


def exchanged(x, topology, t):
    return wait(exchange(x, look_up(x, topology, torch.tensor(t))))


def averaged(x, topology, t):
    return wait(group_mean(x, look_up(x, topology, torch.tensor(t))))


def heard_by(table, x, t, per_slot):
    """Return the messages that worker i receives, by plain indexing: `[N, K, D]`."""
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
    topology = schedule(table)

    def one(payload):
        return exchanged(payload, topology, t)

    expected = heard_by(table, x, t, per_slot)
    assert torch.equal(vmap(one)(x), expected)
    assert torch.equal(torch.stack(on_ranks(n, lambda rank: one(x[rank]))), expected)


@given(n=st.sampled_from([2, 4]), local=st.sampled_from([1, 2, 3]), per_slot=st.booleans(), seed=st.integers(0, 99))
def test_workers_spread_over_processes_hear_the_same(n, local, per_slot, seed):
    workers = n * local
    random = torch.Generator().manual_seed(seed)
    sources = torch.stack([torch.randperm(workers, generator=random) for _ in range(2)], dim=1)
    table = torch.stack([sources, sources.argsort(0)])[None]
    topology = schedule(table)
    x = torch.randn((workers, 2, 5) if per_slot else (workers, 5), generator=random)

    def mine(rank):
        rows = x[rank * local : (rank + 1) * local]
        return vmap(lambda row: exchanged(row, topology, 0))(rows)

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
    topology = grouped(table)
    x = torch.arange(3 * n, dtype=dtype).view(n, 3) / 7
    row = table[0]
    expected = torch.stack([x[row == row[i]].mean(0) for i in range(n)])

    def mine(rank):
        collectives.make_groups(table)
        rows = x[rank * n // processes : (rank + 1) * n // processes]
        return vmap(lambda r: averaged(r, topology, 0))(rows)

    torch.testing.assert_close(torch.cat(on_ranks(processes, mine)), expected)

    def alone(rank):
        collectives.make_groups(table)
        return averaged(x[rank], topology, 0)

    torch.testing.assert_close(torch.stack(on_ranks(n, alone)), expected)


def test_a_row_is_this_workers_part_of_the_round():
    """On ranks, under vmap and on packed ranks, of messages and of groups: what the tables say."""
    topologies = [df.topology("one-peer-exp", 4), df.topology("alternating-exp-ring", 4, local_world_size=2)]
    topologies += [df.topologies.every(3, df.topology("random-matching", 4)), df.topologies.later(1, topologies[0])]
    token = torch.zeros(4, 3)
    for topology in topologies:
        for t in range(4):
            this = topology.round(t)
            groups = torch.arange(4) if this.groups is None else this.groups
            are_pairs = all(
                j < 0 or (this.sources[j, k] == i and this.weights[j, 1 + k] == this.weights[i, 1 + k])
                for i in range(4)
                for k, j in enumerate(this.sources[i].tolist())
            )

            def one(x, topology=topology, t=t):
                return look_up(x, topology, torch.tensor(t)), on_device(x, torch.tensor(t))

            def flat(found):
                row, number = found
                facts = [row.is_active, row.worker, row.sources, row.group, row.group_size, row.are_pairs, row.given]
                return [x for x in (row.weights, row.mean_weight, *facts, number) if x is not None]

            expected = [
                [
                    this.weights[i],
                    *([] if this.mean_weights is None else [this.mean_weights[i]]),
                    torch.tensor(this.is_active),
                    torch.tensor(i),
                    this.sources[i],
                    groups[i],
                    (groups == groups[i]).sum(),
                    torch.tensor(are_pairs),
                    torch.tensor(
                        [0.0 if j < 0 else this.weights[j, 1 + k] for k, j in enumerate(this.destinations[i])]
                    ).double(),
                    torch.tensor(t),
                ]
                for i in range(4)
            ]
            alone = [flat(found) for found in on_ranks(4, lambda rank, one=one: one(token[rank]))]
            stacked = vmap(lambda x, one=one: flat(one(x)), out_dims=0)(token)
            packed = on_ranks(2, lambda rank, one=one: vmap(lambda x: flat(one(x)))(token[:2]))
            for i in range(4):
                for k, wanted in enumerate(expected[i]):
                    for got in (alone[i][k], stacked[k][i], packed[i // 2][k][i % 2]):
                        assert torch.equal(got, wanted), (topology, t, i, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_values_are_mixed_wide_and_rounded_once(dtype):
    topology, t = df.topology("static-exp", 8), torch.tensor(0)
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = vmap(lambda x: gossip.collect(gossip.post(loose([x]), look_up(x, topology, t)))[0])(x)
    exact = df.topologies.mixing_matrix(topology, 0) @ x.double()
    half_a_unit = torch.finfo(dtype).eps / 2 * exact.abs()
    assert got.dtype == dtype and ((got.double() - exact).abs() <= half_a_unit * 1.001 + 1e-6).all()


def test_numbers_are_where_the_state_is():
    numbers, wanted = Numbers(1, 2, 3), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.equal(numbers.vector(torch.zeros(2)), wanted)
    assert torch.equal(vmap(lambda x: numbers.vector(x) + 0)(torch.zeros(2, 1))[1], wanted)
    meta = numbers.vector(torch.zeros(1, device="meta"))
    assert (meta.device.type, tuple(meta.shape), meta.dtype) == ("meta", (3,), torch.float64)


def test_one_worker_exchanges_with_itself():
    table = torch.zeros(1, 2, 1, 1, dtype=torch.int64)
    x = torch.arange(4.0)
    assert torch.equal(exchanged(x, schedule(table), 5), x[None])


class Backend:
    """A process group of two that says what it was asked for."""

    def __init__(self, refuses=None):
        self.asked, self.refuses = [], refuses

    def _ask(self, what, tensors, rank):
        self.asked.append((what, tensors[0].numel()))
        if what == self.refuses:
            raise RuntimeError("closed")
        return self

    def recv(self, tensors, rank, tag):
        return self._ask("receive", tensors, rank)

    def send(self, tensors, rank, tag):
        return self._ask("send", tensors, rank)

    def wait(self, *timeout):
        pass

    def size(self):
        return 2

    def rank(self):
        return 0


def test_receives_are_posted_before_sends():
    """Or a link carries one way after the other."""
    backend = Backend()
    with collectives.use(collectives.World(collectives.Channels(collectives.Identity.of(0, 2), backend))):
        exchanged(torch.ones(3), df.topology("ring", 2), 0)
    assert backend.asked == [("receive", 3), ("send", 3)]


def test_no_message_is_asked_for_after_one_that_was_refused():
    backend, topology = Backend(refuses="send"), df.topology("ring", 2)
    with (
        collectives.use(collectives.World(collectives.Channels(collectives.Identity.of(0, 2), backend))) as here,
        pytest.raises(df.errors.PeerLost, match="worker 1"),
        collectives.whole_step(0),
    ):
        posted = [exchange(x, look_up(x, topology, torch.tensor(0))) for x in (torch.ones(3), torch.ones(4))]
        assert backend.asked[1:2] == [("send", 3)] and ("send", 4) not in backend.asked
        assert [wait(flight).tolist() for flight in posted] == [[[1.0] * 3], [[1.0] * 4]]
    assert here.session.lost is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_dtype_travels(dtype):
    topology = df.topology("ring", 2)
    x = torch.arange(8).view(2, 4).to(dtype)
    heard = on_ranks(2, lambda rank: exchanged(x[rank], topology, 0))
    assert torch.equal(torch.cat(heard), x.flip(0))


def test_an_empty_bucket_travels_too():
    topology = df.topology("ring", 2)
    heard = on_ranks(2, lambda rank: exchanged(torch.empty(0), topology, 0))
    assert [h.shape for h in heard] == [(1, 0), (1, 0)]


def test_a_dead_peer_is_named():
    class Dead(Backend):
        def wait(self, *timeout):
            raise RuntimeError("Connection closed by peer [10.0.0.1]:1")

    with (
        collectives.use(collectives.World(collectives.Channels(collectives.Identity.of(0, 2), Dead()))),
        pytest.raises(
            df.errors.PeerLost, match=r"t=5 on worker 0: exchange 1 .*\(12 bytes\) with worker 1 in slot 0"
        ) as caught,
    ):
        exchanged(torch.ones(3), df.topology("ring", 2), 5)
    assert caught.match("worker 1 exited: Connection closed")
    assert (caught.value.worker, caught.value.step, caught.value.peer) == (0, 5, 1)


def test_a_world_of_another_size_is_refused():
    topology = df.topology("ring", 4)
    with pytest.raises(ValueError, match=r"num_workers=4.*1 process\(es\) hold 1 worker.*torchrun.*simulate"):
        exchanged(torch.ones(3), topology, 0)
    with pytest.raises(ValueError, match="num_workers=4"):
        vmap(lambda x: exchanged(x, topology, 0))(torch.ones(2, 3))


def test_a_group_that_was_never_made_is_named():
    topology = grouped(torch.tensor([[0, 0, 1, 1]]))

    def mine(rank):
        with pytest.raises(RuntimeError, match=r"over ranks \[\d, \d\]: its process group was never made.*init"):
            averaged(torch.ones(3), topology, 0)

    on_ranks(4, mine)


def test_a_message_nobody_waits_for_is_received_all_the_same():
    """A step that raises between post and wait, or does not wait, leaves none behind; after the former none may follow."""
    topology = df.topology("ring", 2)

    def one(rank):
        x = torch.full((1_000_000,), 5.0)
        with collectives.whole_step(0):
            exchange(x, look_up(x, topology, torch.tensor(0)))
        left = len(collectives.world().session.in_flight)
        with pytest.raises(ZeroDivisionError), collectives.whole_step(1):
            exchange(x, look_up(x, topology, torch.tensor(1)))
            raise ZeroDivisionError
        refused = f"rank {rank} cannot go on, because its step t=1 raised ZeroDivisionError"
        with pytest.raises(RuntimeError, match=refused), collectives.whole_step(2):
            pass
        return left + len(collectives.world().session.in_flight)

    assert on_ranks(2, one) == [0, 0]


def test_a_copy_of_what_travels_is_refused_and_the_message_received_first():
    """If a compiler kept a copy until the wait, it may have written over what travels: an error, and no other numbers."""
    topology = df.topology("ring", 2)

    def one(rank):
        x = torch.full((1_000_000,), 5.0)
        with pytest.raises(RuntimeError, match="kept a copy of what was sent"), collectives.whole_step(0):
            flight = exchange(x, look_up(x, topology, torch.tensor(0)))
            [call] = collectives.world().session.in_flight.values()
            wait(flight._replace(x=x.clone()))
        return len(call.works)

    assert on_ranks(2, one) == [0, 0]


def test_a_step_beside_another_threads_step_is_refused_on_ranks():
    """The order in which two threads step is not that of another rank; a step within a step is in order."""
    world = collectives.World(collectives.Channels(collectives.Identity.of(0, 2), Backend()))

    def beside():
        with collectives.use(world), collectives.whole_step(7):
            pass

    with collectives.use(world), collectives.whole_step(5), collectives.whole_step(5):
        pass
    with ThreadPoolExecutor(1) as thread, collectives.use(world):
        with collectives.whole_step(6):
            refused = thread.submit(beside).exception()
        thread.submit(beside).result()
    assert isinstance(refused, RuntimeError) and "t=7): another thread of rank 0 is in its step t=6" in str(refused)


def test_another_transport_is_given_the_name_of_each_connection():
    made, channels = [], collectives.Channels(collectives.Identity.of(0, 1), None, store=HashStore())
    channels.connect_by(lambda name, store, index, ranks, timeout: made.append((name, index, *ranks)))
    channels.connected("mailbox", range(1))
    channels.outside(range(1))
    assert made == [("mailbox", 0, 0), ("outside 0 1 1", 0, 0)]
