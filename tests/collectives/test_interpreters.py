"""One step, two interpreters: what gloo ranks compute, vmap computes."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, use
from decentfn.core import trees
from decentfn.testing import on_ranks
from tests import contract, network

pytestmark = pytest.mark.thorough

STEPS = 5
ON_TWO, ON_FOUR, ON_EIGHT = (
    ("ring", "one-peer-exp"),
    ("complete", "alternating-exp-ring"),
    ("ring",),
)
"""Topologies of the core algorithms; the contract runs each of its rows on four ranks, on the first two, too."""


def assert_same(ranks_results, simulated, local=1, sums_are_rounded=False):
    """Sums of bfloat16 numbers depend on their order; nothing else differs by more than float32's rounding."""
    leaves, losses = simulated
    close = {"atol": 5e-3, "rtol": 0.02} if sums_are_rounded else {"atol": 1e-6, "rtol": 1e-5}
    for rank, (mine, my_losses) in enumerate(ranks_results):
        rows = slice(rank * local, (rank + 1) * local) if local > 1 else rank
        assert len(mine) == len(leaves)
        for got, expected in zip(mine, leaves, strict=True):
            torch.testing.assert_close(got, expected[rows], **close)
        torch.testing.assert_close(torch.stack(my_losses), torch.stack(losses)[:, rows], **close)


def on_processes(ranks, n, row, local=1, backend=None, **options):
    return ranks(n).run(functools.partial(network.on_this_rank, row, STEPS, local, backend, **options))


SIZES = [
    (n, f"{name} on {topology}")
    for n, some in ((2, ON_TWO), (4, ON_FOUR))
    for name in network.CORE
    for topology in some
]


@pytest.mark.parametrize(("n", "row"), SIZES)
def test_gloo_ranks_agree_with_vmap(ranks, n, row):
    assert_same(on_processes(ranks, n, row), network.simulated(row, n, STEPS))


@pytest.mark.parametrize("row", contract.FAMILIES)
def test_one_algorithm_of_each_family_agrees_on_processes(ranks, row):
    assert_same(on_processes(ranks, 4, row), network.simulated(row, 4, STEPS))


@pytest.mark.parametrize("name", network.CORE)
def test_eight_ranks_agree_with_vmap(name):
    """Threads: to start so many processes takes longer than all else here."""
    results = on_ranks(8, lambda rank: network.on_this_rank(f"{name} on ring", STEPS))
    assert_same(results, network.simulated(f"{name} on ring", 8, STEPS))


@pytest.mark.parametrize("row", ["adapt_while_communicate on ring", "all_reduce on complete"])
def test_a_narrow_wire_agrees_with_vmap(ranks, row):
    wire = {"wire_dtype": torch.bfloat16}
    simulated = network.simulated(row, 4, STEPS, **wire)
    assert_same(on_processes(ranks, 4, row, **wire), simulated, sums_are_rounded="all_reduce" in row)


@pytest.mark.parametrize("row", ["adapt_while_communicate on ring", "adapt_then_combine on alternating-exp-ring"])
@pytest.mark.slow
def test_compiled_gloo_ranks_agree_with_vmap(ranks, row):
    n = 4 if "alternating" in row else 2
    assert_same(on_processes(ranks, n, row, backend="inductor"), network.simulated(row, n, STEPS))


def two_steps_of_small_buckets(rank, change):
    def loss_fn(params, x):
        return ((torch.tanh(x @ params["w"]) + params["b"]) ** 2).mean() * (1 + params["c"])

    topology = df.topology("one-peer-exp", 2)
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), topology, bucket_mb=1e-4)
    state, step = init({"w": torch.ones(4, 5), "b": torch.ones(5), "c": torch.ones(())}), change(step)
    for t in range(2):
        state, _ = step(state, torch.full((3, 4), rank + 1.0), t)
    return df.params(state)


def test_compiled_code_keeps_what_it_sends_until_it_has_arrived():
    """Inductor made a copy of what it computes for each operator, and later wrote over the one of `post`."""
    compiled = on_ranks(2, two_steps_of_small_buckets, df.compile)
    torch.testing.assert_close(compiled, on_ranks(2, two_steps_of_small_buckets, lambda step: step))


def two_steps_of_a_batch(rank, sizes, change):
    def loss_fn(params, x):
        for w in params:
            x = torch.tanh(x @ w)
        return (x**2).mean()

    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", 2), bucket_mb=7e-5)
    state, step = init([0.1 + torch.eye(4) * (1 + i) for i in range(3)]), change(step)
    for t in range(2):
        state, _ = step(state, torch.full((sizes[rank], 4), rank + 1.0), t)
    return df.params(state)


def test_ranks_whose_batches_differ_in_size_send_the_same_buckets():
    """Inductor posted them in an order that depends on the size of the batch, and buckets changed places."""
    sizes = (2, 6)
    compiled = on_ranks(2, two_steps_of_a_batch, sizes, df.compile)
    torch.testing.assert_close(compiled, on_ranks(2, two_steps_of_a_batch, sizes, lambda step: step))


@pytest.mark.slow
@pytest.mark.parametrize("row", contract.ROWS)
def test_every_row_compiled_on_processes_agrees_with_vmap(ranks, row):
    assert_same(on_processes(ranks, 4, row, backend="inductor"), network.simulated(row, 4, STEPS))


@pytest.mark.parametrize("row", ["adapt_while_communicate on ring", "adapt_then_combine on complete"])
def test_workers_packed_in_processes_agree_with_vmap(ranks, row):
    assert_same(on_processes(ranks, 2, row, local=2), network.simulated(row, 4, STEPS), local=2)


@pytest.mark.parametrize("row", ["adapt_while_communicate on ring", "adapt_then_combine on one-peer-exp"])
def test_pairwise_mixing_is_bitwise_the_same(ranks, row):
    simulated, _ = network.simulated(row, 4, STEPS)
    for rank, (mine, _) in enumerate(on_processes(ranks, 4, row)):
        assert all(torch.equal(got, expected[rank]) for got, expected in zip(mine, simulated, strict=True))


def traced(built, rank):
    """Return the traced code and constants of a step on one of two processes with two workers each."""
    init, step = built
    state, batch, step = df.stack(init(network.params()), 2), network.batches(2, 0), df.simulate(step, 2)
    leaves, template = trees.leaves(state), trees.enumerate_leaves(state)

    def run(leaves, batch, t):
        return trees.leaves(step(trees.fill(template, leaves), batch, t))

    with use(World(Channels(Identity.of(rank, 2)))):
        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(leaves, batch, torch.tensor(3))
    return graph.code, [constant.tolist() for _, constant in sorted(graph.named_buffers())]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("row", contract.ROWS)
def test_what_is_traced_does_not_know_the_rank(row):
    """Ranks share compiled code, found by the graph that Dynamo sees; a rank in it would be that of who compiled first."""
    built = network.build(row, 4)
    assert traced(built, rank=0) == traced(built, rank=1)
