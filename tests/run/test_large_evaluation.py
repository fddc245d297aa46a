"""Workers of several processes: what they hold is evaluated in shards, and loaded from a whole state dict."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn import sharded
from decentfn.errors import RunError
from tests.ranks import Ranks
from tests.run.within_worker import ALL_KINDS, Network, batch, workers

pytestmark = pytest.mark.thorough

MSE = nn.functional.mse_loss


@pytest.fixture
def four(ranks):
    """Four processes, which are two workers as soon as one of the functions below calls `workers`."""
    return ranks(4).run


def started(world, kind="sharded"):
    module = ALL_KINDS[kind].place(world, Network())
    params, buffers, loss_fn = df.functional(module, MSE)
    algorithm = df.adapt_while_communicate(
        df.autograd(loss_fn), df.sgd(0.1, momentum=0.9), df.topology("one-peer-exp", world.num_workers)
    )
    return module, loss_fn, algorithm, algorithm.init(params, buffers)


def data(rank):
    """Unequal shares: three batches, one and a short one, two, one."""
    sizes = [[4, 4, 4], [4, 1], [2, 3], [4]][rank]
    draw = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(n, 7, generator=draw) for n in sizes]
    return [(x, torch.cos(x[:, :3])) for x in inputs]


def of_whole(whole, ranks, network=None):
    """The loss of a network with these weights over the shares of these processes."""
    network = network or Network()
    network.load_state_dict(whole)
    x, y = (torch.cat(half) for half in zip(*[pair for rank in ranks for pair in data(rank)], strict=True))
    with torch.no_grad():
        return MSE(network(x), y).double()


def evaluates():
    with workers() as world:
        module, loss_fn, algorithm, state = started(world)
        for t in range(3):
            state, _ = algorithm.step(state, batch(world.worker, world.process, t), t)
        got = df.evaluate(loss_fn, state, iter(data(world.rank)))
        each = df.evaluate_replicas(df.autograd(loss_fn), state, data(world.rank))
        whole, own = (df.state_dict(module, state, consensus=is_mean) for is_mean in (True, False))
        if world.process == 0:
            torch.testing.assert_close(got, of_whole(whole, range(4)))
            torch.testing.assert_close(each[world.worker], of_whole(own, [world.rank, world.rank + 1]))
        errors = df.functional(
            module, forward=lambda m, b: {"error": (m(b[0]) - b[1]).abs().mean(), "one": torch.ones(())}
        )
        named = df.evaluate(errors[2], state, data(world.rank))
        assert sorted(named) == ["error", "one"] and named["one"] == 1
        state, _ = algorithm.step(state, batch(world.worker, world.process, 3), 3)  # the module trains on
        return got, each


def test_shards_are_evaluated_together_on_unequal_shares(four):
    told = four(evaluates)
    for got, each in told:
        assert torch.equal(got, told[0][0]) and torch.equal(each, told[0][1]) and each.shape == (2,)


def fails_to_evaluate():
    said = {}
    with workers() as world:
        _, loss_fn, _, state = started(world)

        def note(name, batches):
            with pytest.raises(Exception) as caught:
                df.evaluate(loss_fn, state, batches)
            said[name] = str(caught.value)

        def breaks():
            yield data(0)[0]
            if world.rank == 1:
                raise ValueError("no such file")
            yield data(0)[0]

        note("none here", data(0) if world.rank != 3 else [])
        note("none", [])
        note("data", breaks())
    return said


def test_a_process_that_fails_in_an_evaluation_keeps_nobody_waiting(four):
    for said in four(fails_to_evaluate):
        assert "process 1 of worker 1 has no batch" in said["none here"]
        assert "no process has a sample" in said["none"]
        assert "no such file" in said["data"]


def loads():
    """Worker i gets i + 1 times the numbers of the first network, from its process 0 alone."""
    with workers() as world:
        module, _, algorithm, state = started(world)
        state, _ = algorithm.step(state, batch(world.worker, world.process, 0), 0)
        before = [sharded.local(p).clone() for p in module.parameters()]
        given = {name: (world.worker + 1) * x for name, x in Network().state_dict().items()}
        new = df.load_state_dict(module, state, {} if world.process else given)
        for name, x in df.state_dict(module, new).items():
            assert torch.equal(x, given[name]), name
        assert all(map(torch.equal, before, map(sharded.local, module.parameters())))
        algorithm.step(new, batch(0, 0, 1), 1)
        wrong = given | {"first.bias": torch.zeros(6), "second.bias": torch.zeros(5)}
        wrong.pop("last.bias")
        with pytest.raises(RunError, match="rank 2 has failed.*None"):
            df.load_state_dict(module, state, None if world.rank == 2 else given)
        with pytest.raises(RuntimeError) as caught:
            df.load_state_dict(module, state, wrong if world.rank == 2 else given)
        return str(caught.value)


def test_a_whole_state_dict_is_cut_into_shards(four):
    told = four(loads)
    assert len(set(told)) == 1
    for words in ("['last.bias']", "['second.bias']", "first.bias is [6] there and [5] in the module"):
        assert words in told[0]


def averages_buffers():
    """A running statistic that differs on every process, and a frozen parameter that differs between workers."""
    with workers() as world:
        _, _, _, state = started(world)
        own = df.buffers(state)
        buffers = {"seen": torch.tensor(float(world.rank)), "fixed": own["fixed"] + 2 * world.worker}
        mean = df.consensus_buffers(state._replace(local=state.local._replace(buffers=buffers)))
        torch.testing.assert_close(mean["fixed"], own["fixed"] + 1)
        return float(mean["seen"])


def test_the_mean_of_buffers_is_over_all_processes(four):
    assert four(averages_buffers) == [1.5] * 4


# -- a team that runs on one batch ----------------------------------------------------------------------------------------


def evaluates_in_teams(kind, size):
    """Unequal shares of the teams; the processes of one have the same batches."""
    inside = ALL_KINDS[kind]
    with workers(size) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, MSE)
        algorithm = df.adapt_while_communicate(
            df.autograd(loss_fn), df.sgd(0.1), df.topology("one-peer-exp", world.num_workers)
        )
        state = algorithm.init({name: x + world.worker for name, x in params.items()}, buffers)
        tp_size = world.rank // 2
        got = df.evaluate(loss_fn, state, data(tp_size))
        each = df.evaluate_replicas(loss_fn, state, data(tp_size))
        whole, own = (df.state_dict(module, state, consensus=is_mean) for is_mean in (True, False))
        if world.process == 0:
            network = inside.network()
            torch.testing.assert_close(got, of_whole(whole, range(2), network), rtol=1e-5, atol=0)
            theirs = range(size // 2) if size == 4 else [tp_size]
            torch.testing.assert_close(each[world.worker], of_whole(own, theirs, network), rtol=1e-5, atol=0)
        with pytest.raises(ValueError, match="the same batches, and theirs differ; choose them by world") as caught:
            df.evaluate(loss_fn, state, data(world.rank))
        return str(caught.value)


@pytest.mark.parametrize(("kind", "size"), [("tensor", 2), ("both", 4)])
def test_a_tensor_parallel_module_is_evaluated_by_teams(four, kind, size):
    by = {2: "world.worker", 4: "world.rank // 2"}[size]
    assert all(f"choose them by {by}." in said for said in four(evaluates_in_teams, kind, size))


def fails_in_the_forward_pass(kind, size):
    """On one process alone, before the module has gathered its next layer, or added up the last one."""
    inside = ALL_KINDS[kind]
    with workers(size) as world:
        params, buffers, loss_fn = df.functional(inside.place(world, inside.network()), MSE)
        algorithm = df.adapt_while_communicate(
            df.autograd(loss_fn), df.sgd(0.1), df.topology("one-peer-exp", world.num_workers)
        )
        state = algorithm.init(params, buffers)
        if world.rank == 1:
            layer = getattr(loss_fn.module, "middle" if kind == "sharded" else "second")
            layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(df.errors.RunError) as caught:
            df.evaluate(loss_fn, state, data(0))
        own = caught.value.__cause__
        return isinstance(own, ZeroDivisionError), str(caught.value)


def test_an_error_in_one_forward_pass_ends_all():
    """In processes of its own: PyTorch knows a mesh by its ranks, and would go on to use the connections that are closed."""
    four = Ranks(4)
    try:
        for kind, size in (("both", 4), ("sharded", 2)):
            for rank, (is_own, said) in enumerate(four.run(fails_in_the_forward_pass, kind, size)):
                assert is_own == (rank == 1)
                assert "rank 1 has failed: ZeroDivisionError" in said
    finally:
        four.close()
