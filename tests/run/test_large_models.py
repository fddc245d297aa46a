"""Workers of several processes: two workers of two gloo processes each are two simulated workers on both processes' batches."""

from __future__ import annotations

import itertools
import operator
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import decentfn as df
from decentfn import compressors
from decentfn.core import trees
from decentfn.core.buckets import flatten
from decentfn.torch_private import inductor
from tests.run.within_worker import (
    ALL,
    ALL_KINDS,
    EIGHT,
    KINDS,
    SMALL,
    WORKERS,
    Case,
    Network,
    assert_as_simulated,
    batch,
    batch_of,
    expected_of,
    made,
    optimizer,
    require_equal_copies,
    sharded,
    simulated,
    trains,
    whole_batch,
    workers,
)

pytestmark = pytest.mark.thorough

SHARDS, STEPS = 2, 6
PAGE = Path(df.__file__).parent.parent / "docs" / "large_models.md"


@pytest.fixture
def four(ranks):
    """Four processes, which are two workers as soon as one of the functions below calls `workers`."""
    return ranks(WORKERS * SHARDS).run


def test_the_small_product_tries_every_pair():
    def pairs(cases):
        return {(a, b, case[a], case[b]) for case in cases for a, b in itertools.combinations(range(len(case)), 2)}

    fields = Case._fields
    six_compiled = (fields.index("processes"), fields.index("compiled"), 3, True)
    assert pairs(ALL) - pairs(SMALL) == {six_compiled}


def tried(ranks, case):
    told = ranks(case.num_workers * case.processes).run(trains, case, expected_of(case))
    for one, alike in zip(told, told[case.processes :], strict=False):
        assert one.code == alike.code  # they hold equal shapes
    for graphs, _, sent, held in told:
        assert len(graphs) == case.compiled
        if case.algorithm == "adapt_while_communicate":
            assert sent == held  # one message to one neighbor: a process sends what it holds
            for graph in graphs:
                where = [graph.index(call) for call in ("post", "gradient", "wait")]
                assert where == sorted(where) and "sum_within_worker" in graph
    if ALL_KINDS[case.kind].tp_size == 1:  # so that no part is held twice
        whole = sum(x.numel() * x.itemsize for x in Network().parameters() if x.requires_grad)
        assert sum(one.held for one in told[: case.processes]) == whole


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.kind}-{case.algorithm}")
def test_workers_of_processes_are_the_simulated_ones(ranks, case):
    tried(ranks, case)


QUICK = {
    ("sharded", "gradient_tracking"),
    ("tensor", "choco_sgd"),
    ("both", "adapt_while_communicate"),
    ("both", "choco_sgd"),
}


@pytest.mark.parametrize(
    "case",
    dict.fromkeys(case._replace(compiled=False) for case in EIGHT if (case.kind, case.algorithm) in QUICK),
    ids=lambda case: f"{case.kind}-{case.algorithm}",
)
@pytest.mark.slow
def test_of_eight_processes_too(ranks, case):
    """Four workers of two; and two of four, sharded and tensor-parallel on a mesh of three axes."""
    tried(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ALL, *EIGHT], ids=str)
def test_all_workers_of_processes_are_the_simulated_ones(ranks, case):
    tried(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_keeps_posts_first_and_waits_last(ranks, kind):
    case = Case(kind, "adapt_while_communicate", SHARDS, compiled=True, accumulates=False, clips=True)
    told = ranks(WORKERS * SHARDS).run(trains, case, expected_of(case), "inductor")
    assert [one.code for one in told[:SHARDS]] == [one.code for one in told[SHARDS:]]
    for one in told:
        (code,) = one.code
        calls = re.findall(r"torch\.ops\.decentfn\.(\w+)\.default\(", code[code.index("def call(") :])
        posts, waits = ([i for i, call in enumerate(calls) if call == name] for name in ("exchange", "complete"))
        between = [i for i, call in enumerate(calls) if call == "gradient"]
        assert len(posts) == len(waits) > 0 and between
        assert max(posts) < min(between) and max(between) < min(waits)


def guarded_and_compiled(backend):
    """Values that are bad on one process alone: a NaN among the targets of a linear layer reaches one row's gradient."""

    def bad(worker, process, t):
        x, y = batch(worker, process, t)
        y[0, 2] = float("nan") if (worker, process, t) == (1, 0, 2) else y[0, 2]
        return x, y

    def make(loss_fn, optimizer):
        return df.guard(df.adapt_while_communicate(loss_fn, optimizer, df.topology("one-peer-exp", WORKERS)))

    def network():
        torch.manual_seed(5)
        return nn.Linear(7, 3)

    with workers(SHARDS) as world:
        module = fully_shard(network(), mesh=world.mesh["shard"])
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        init, step = make(df.dynamic_loss_scale(df.autograd(loss_fn), 8.0), optimizer())
        step = df.compile(step, backend=backend) if backend else step
        state = init(params, buffers)
        for t in range(STEPS):
            if t == 4 and world.rank == 1:
                state.params[0][0] = float("inf")
            state, metrics = step(state, bad(world.worker, world.process, t), t)
        return (
            [int(count) for count in metrics.guard],
            float(state.local.scale.scale),
            all(bool(torch.isfinite(b).all()) for b in state.params),
        )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_what_is_bad_on_one_process_is_bad_on_its_worker(four, backend):
    per_rank = four(guarded_and_compiled, backend)
    (skipped, replaced, _), scale, _ = per_rank[0]
    assert per_rank[0] == per_rank[1] and per_rank[2] == per_rank[3]
    assert all(is_finite for *_, is_finite in per_rank)
    assert replaced == 1 and skipped <= 1 and scale == 4.0
    assert per_rank[2] == ([1, 0, 0], 4.0, True)


def seen_by_all(state, metrics, expected):
    torch.testing.assert_close(df.gather(state, metrics).loss, expected[0].loss)
    torch.testing.assert_close(df.mean(state, metrics).loss, expected[0].loss.double().mean())
    with pytest.raises(df.errors.ReplicaMismatch, match="worker 1 differs from worker 0"):
        df.check_replicas(state)
    df.check_replicas(state, df.broadcast(df.params(state)))


def accumulates():
    with workers(SHARDS) as world:
        module = sharded(world, Network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        make = made("adapt_while_communicate")
        init, step = make(df.accumulate(df.autograd(loss_fn)), optimizer())
        state = init(params, buffers)
        for t in range(3):
            halves = tuple(x.view(2, 2, -1) for x in batch(world.worker, world.process, t))
            state, metrics = step(state, halves, t)
        # Micro-batches of equal size: their mean is the batch's.
        expected = simulated(make, "sharded", SHARDS, steps=3)
        case = Case("sharded", "adapt_while_communicate", SHARDS, False, True, True)
        assert_as_simulated(world, case, module, state, metrics, expected)
        seen_by_all(state, metrics, expected)

        with torch.no_grad():  # an evaluation
            data = batch(world.worker, world.process, 0)
            loss, _ = loss_fn(df.params(state), df.buffers(state), data)
            whole = {name: rows[world.worker] for name, rows in expected[1].items()}
            plain = torch.func.functional_call(Network(), whole, (data[0],))
            torch.testing.assert_close(loss, nn.functional.mse_loss(plain, data[1]))
        state, _ = step(state, halves, t + 1)  # though the module has gathered its parameters, and keeps them
        assert sorted(df.state_dict(module, state)) == ([] if world.process else sorted(Network().state_dict()))


def test_gradients_accumulate_and_a_sharded_state_is_looked_at(four):
    four(accumulates)


def draws_of(kind):
    """A random number that the loss draws."""
    inside = KINDS[kind]
    with workers(SHARDS) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(
            module, forward=lambda m, b: (nn.functional.mse_loss(m(b[0]), b[1]), torch.rand(()))
        )
        init, step = made("adapt_while_communicate")(df.autograd(loss_fn), optimizer())
        _, metrics = step(init(params, buffers), batch(0, 0, 0), 0)
        return float(metrics.aux)


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_a_batch_of_its_own_draws_numbers_of_its_own(four, kind):
    drawn = four(draws_of, kind)
    assert drawn[0] != drawn[2]
    assert (drawn[0] == drawn[1], drawn[2] == drawn[3]) == (kind == "tensor",) * 2


class Routed(nn.Module):
    """One of two layers of one size, by the batch's sign; or both, times 0 or 1."""

    def __init__(self, takes_both):
        super().__init__()
        torch.manual_seed(3)
        self.plus, self.minus, self.takes_both = nn.Linear(7, 3), nn.Linear(7, 3), takes_both

    def forward(self, x):
        gate = float(x.sum() > 0)
        if self.takes_both:
            return gate * self.plus(x) + (1 - gate) * self.minus(x)
        return self.plus(x) if gate else self.minus(x)


def routes(takes_both, many, by_worker):
    """Take two steps; return the parameters, or what the step says."""

    def signed(i, t):
        x, y = batch(0, i, t)
        return (x.abs() if i % 2 else -x.abs()), y

    with workers(SHARDS) as world:
        module = Routed(takes_both)
        for layer in module.children():
            fully_shard(layer, mesh=world.mesh["shard"])
        params, buffers, loss_fn = df.functional(fully_shard(module, mesh=world.mesh["shard"]), nn.functional.mse_loss)
        loss_fn = df.accumulate(df.autograd(loss_fn)) if many else df.autograd(loss_fn)
        init, step = df.adapt_while_communicate(loss_fn, df.sgd(1.0), df.topologies.idle(WORKERS))
        state, i = init(params, buffers), world.worker if by_worker else world.process
        try:
            for t in range(2):
                given = [signed(i, t), signed(i + 1, t)] if many else signed(i, t)
                state, _ = step(state, given, t)
        except df.errors.StepMismatch as error:
            return str(error)
        return {name: x.tolist() for name, x in df.state_dict(module, state).items()}


@pytest.mark.parametrize("many", [False, True])
def test_a_worker_whose_processes_take_other_layers_is_refused(four, many):
    """PyTorch would add the gradients of one layer to those of the other: it pairs them by their order."""
    first, second = four(routes, False, many, False)[:2]
    assert "processes 0 and 1 took gradients of different parameters (process 0: of all" in first
    assert ("of all but ['minus.bias', 'minus.weight']" in second) != many


def test_its_two_ways_out_train_as_the_layers_do(four):
    per_rank = four(routes, False, False, True)
    assert per_rank[0]["plus.weight"] == Routed(False).plus.weight.tolist() != per_rank[2]["plus.weight"]
    both, separate = four(routes, True, False, False)[0], Routed(True)
    rate = torch.optim.SGD(separate.parameters(), lr=1.0)
    for t in range(2):
        rate.zero_grad()
        for process in range(SHARDS):
            x, y = batch(0, process, t)
            loss = nn.functional.mse_loss(separate(x.abs() if process else -x.abs()), y)
            (loss / SHARDS).backward()
        rate.step()
    for name, x in separate.state_dict().items():
        torch.testing.assert_close(torch.tensor(both[name]), x)


def keeps_copies(name, number):
    with workers(SHARDS) as world:
        inside, compressor = KINDS["tensor"], getattr(compressors, name)(number)
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        algorithm = df.choco_sgd(
            df.autograd(loss_fn), optimizer(), df.topology("static-ring", WORKERS), compressor=compressor, gamma=0.2
        )
        state = algorithm.init(params, buffers)
        for t in range(4):
            state, _ = algorithm.step(state, whole_batch(world.worker, SHARDS, t), t)
        require_equal_copies(state)


@pytest.mark.parametrize("compressor", [("random_k", 0.3), ("qsgd", 64), ("low_rank", 1)])
def test_what_all_processes_hold_stays_equal_whatever_is_compressed(four, compressor):
    four(keeps_copies, *compressor)


def test_what_all_processes_hold_comes_first():
    """Whatever the other buckets' sizes, which differ between processes, so that its place, and what is drawn for it, do not."""
    for numel in (1, 100):
        x = flatten({"cut": torch.ones(numel), "norm": torch.ones(10)}, processes=2, common=frozenset({"norm"}))
        assert [bucket.is_common for bucket in x.plan.buckets] == [True, False]


def looked_at():
    """`with_params`, `consensus_mean` and `ema_params` of shards."""
    inside = KINDS["sharded"]
    with workers(SHARDS) as world:
        params, buffers, loss_fn = df.functional(inside.place(world, inside.network()), nn.functional.mse_loss)
        algorithm = df.ema(made("adapt_while_communicate")(df.autograd(loss_fn), optimizer()))
        state = algorithm.init(params, buffers)
        torch.testing.assert_close(df.params(state), params, atol=0, rtol=0)
        torch.testing.assert_close(df.ema_params(state), params, atol=0, rtol=0)
        other = {name: leaf + world.worker for name, leaf in params.items()}
        state = df.with_params(state, other)
        torch.testing.assert_close(df.params(state), other, atol=0, rtol=0)
        torch.testing.assert_close(df.consensus_mean(state), {name: leaf + 0.5 for name, leaf in params.items()})
        loss, _ = loss_fn(df.params(state), df.buffers(state), batch(0, 0, 0))
        return float(loss)


def test_a_sharded_state_is_looked_at_in_shards(four):
    told = four(looked_at)
    assert told[0] == told[1] != told[2] == told[3]


def as_torch_alone():
    """One worker of four processes, in bfloat16, with checkpointed activations, beside a loop of PyTorch's own."""
    with workers(4) as world:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def network():
            module = Network()
            apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, nn.Linear) and m.out_features == 3)
            return fully_shard(module, mesh=world.mesh["shard"], mp_policy=policy, reshard_after_forward=False)

        module, other = network(), network()
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        init, step = df.all_reduce(df.autograd(loss_fn), df.adamw(1e-2), df.topology("complete", 1))
        state = init(params, buffers)
        adamw = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], 1e-2)
        for t in range(4):
            state, metrics = step(state, batch(0, world.process, t), t)
            x, y = batch(0, world.process, t)
            loss = nn.functional.mse_loss(other(x), y)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
        for name, p in other.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(df.params(state)[name], p.to_local().detach(), atol=1e-6, rtol=1e-5)
        assert float(df.consensus_distance(state)) == 0


def test_one_worker_is_pytorch_with_its_policies(four):
    four(as_torch_alone)


def in_narrow_numbers(reduce_dtype):
    """This worker's parameters, whole, and its loss; with activations computed again, inside what is sharded and around it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    with workers(SHARDS) as world:
        module = Network()
        apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, nn.Linear) and m is not module.middle)
        fully_shard(module.first, mesh=world.mesh["shard"], mp_policy=policy)
        fully_shard(module, mesh=world.mesh["shard"], mp_policy=policy)
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        init, step = made("adapt_while_communicate")(df.autograd(loss_fn), optimizer())
        state = init(params, buffers)
        for t in range(STEPS):
            state, metrics = step(state, batch(world.worker, world.process, t), t)
        assert all(b.dtype == torch.float32 for b in state.params)
        whole = df.state_dict(module, state)
        return {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in whole.items()}, metrics.loss


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_policy_is_the_simulator_within_its_rounding(four, reduce_dtype):
    """Errors are relative to the distance that the parameters moved."""
    expected = simulated(made("adapt_while_communicate"), "sharded", SHARDS, steps=STEPS)
    start = df.functional(Network(), nn.functional.mse_loss)[0]
    far = max(float((rows - start[name]).abs().max()) for name, rows in expected.params.items())
    told, away = four(in_narrow_numbers, reduce_dtype), []
    for rank, (whole, loss) in enumerate(told):
        torch.testing.assert_close(loss, expected.metrics.loss[rank // SHARDS], rtol=2**-8, atol=2**-8)
        away += [
            float((whole[name] - rows[rank // SHARDS]).abs().max()) for name, rows in expected.params.items() if whole
        ]
    assert 1e-6 < max(away) < 2**-8 * far


# -- what is less usual ---------------------------------------------------------------------------------------------------


def late(loss_fn, optimizer):
    return df.stochastic_gradient_push(loss_fn, optimizer, df.topology("one-peer-exp", WORKERS), delay=1)


def pushes_late(kind, expected):
    inside = KINDS[kind]
    with workers(SHARDS) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        init, step = late(df.autograd(loss_fn), optimizer())
        state = init(params, buffers)
        for t in range(STEPS):
            state, metrics = step(state, batch_of(world, inside.team_of(SHARDS), t), t)
        case = Case(kind, "", SHARDS, compiled=False, accumulates=False, clips=True)
        assert_as_simulated(world, case, module, state, metrics, expected)


@pytest.mark.parametrize("kind", ["sharded", "tensor"])
def test_late_messages_are_those_of_the_simulator(four, kind):
    four(pushes_late, kind, simulated(late, kind, SHARDS, steps=STEPS))


NUMBERS = {"cast": torch.bfloat16, "dct_top_k": 2, "identity": (), "low_rank": 1, "qsgd": 64, "quantize": 4}
NUMBERS |= {"chunk_top_k": 2, "random_k": 0.3, "sign": (), "top_k": 0.3}


def compresses_nothing():
    """Process 1 holds no value of a layer with one row."""
    with workers(SHARDS) as world:
        for name, number in NUMBERS.items():
            compressor = getattr(compressors, name)(*[number] if number != () else [])
            module = fully_shard(nn.Linear(5, 1), mesh=world.mesh["shard"])
            params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
            ring = df.topology("static-ring", WORKERS)
            init, step = df.choco_sgd(df.autograd(loss_fn), optimizer(), ring, compressor=compressor, gamma=0.2)
            state = init(params, buffers)
            assert state.params[0].numel() == (0 if world.process else 6)
            for t in range(2):
                x, y = batch(world.worker, world.process, t)
                state, metrics = step(state, (x[:, :5], y[:, :1]), t)
            assert torch.isfinite(metrics.grad_norm)


def test_a_process_may_hold_nothing_of_a_bucket(four):
    assert sorted(NUMBERS) == sorted(name for name in compressors.__all__ if name.islower())
    four(compresses_nothing)


def runs_the_page(directory):
    script = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    before = os.getcwd()
    os.chdir(directory)
    try:
        names = {}
        exec(script.replace("df.compile(decent_step)", "decent_step"), names)
        assert names["parts"]["0.weight"].shape == (32, 32) and names["quarters_loss"].partition.tp_size == 2
        return sorted(names["weights"]), float(names["metrics"].loss)
    finally:
        os.chdir(before)
        df.init(processes_per_worker=1)


def test_the_pages_script_runs(four, tmp_path):
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    told = four(runs_the_page, str(tmp_path))
    assert [keys for keys, _ in told] == [names, [], names, []]
    assert told[0][1] == told[1][1] < 0.5
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    module.load_state_dict(torch.load(tmp_path / "model.pt"))


# -- the worlds ---------------------------------------------------------------------------------------------------------


def places(size):
    with workers(size) as world:
        names = "rank", "size", "worker", "num_workers", "process", "processes_per_worker"
        again = df.init()
        assert again is world and list(world.workers(2)) == [2 * world.worker, 2 * world.worker + 1]
        assert world.mesh is None or world.mesh.mesh_dim_names == ("worker", "shard")
        inside = [world.rank] if world.mesh is None else world.mesh["shard"].mesh.tolist()
        return [getattr(world, name) for name in names], inside


def test_ranks_of_a_worker_are_adjacent(four):
    assert four(places, 2) == [([r, 4, r // 2, 2, r % 2, 2], [r // 2 * 2, r // 2 * 2 + 1]) for r in range(4)]
    assert four(places, 4) == [([r, 4, 0, 1, r, 4], [0, 1, 2, 3]) for r in range(4)]
    assert four(places, 1) == [([r, 4, r, 4, 0, 1], [r]) for r in range(4)]


def there_and_back():
    with workers(2) as first:
        pass
    threads = len(os.listdir("/proc/self/task"))
    with workers(2) as again:
        assert again is first
    return threads == len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where Linux lists them")
def test_the_groups_of_a_number_are_made_once(four):
    assert four(there_and_back) == [True] * 4


def init_raises(values, local="2"):
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if local:
        os.environ["LOCAL_WORLD_SIZE"] = local
    try:
        with pytest.raises(ValueError) as caught:
            df.init(processes_per_worker=values[dist.get_rank()])
        return str(caught.value)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


@pytest.mark.parametrize(
    ("values", "local", "says"),
    [
        ([3] * 4, "", "init(processes_per_worker=3): the number must divide 4, the number of processes"),
        ([0] * 4, "", "init(processes_per_worker=0)"),
        ([True] * 4, "", "init(processes_per_worker=True)"),
        (["nodes"] * 4, "", "init(processes_per_worker='nodes')"),
        (["node"] * 4, "", "LOCAL_WORLD_SIZE is not set on rank 0"),
        ([2, 2, 4, 2], "", "be the same on all (rank 2: 4, rank 0: 2)"),
        ([2, 2, 3, 2], "", "init(processes_per_worker=3)"),
    ],
)
def test_numbers_that_do_not_fit_are_said_on_every_rank(four, values, local, says):
    told = four(init_raises, values, local)
    assert says in told[0] and len(set(told)) == 1


def by_node():
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        with workers("node") as world:
            return world.processes_per_worker
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_a_node_is_what_torchrun_says(four):
    assert four(by_node) == [2] * 4


def test_one_process_is_one_worker():
    assert df.init(processes_per_worker=1).mesh is None
    with pytest.raises(ValueError, match=r"init\(processes_per_worker=2\): the number must divide 1"):
        df.init(processes_per_worker=2)


def test_ranks_that_are_threads_are_a_worker_each():
    with pytest.raises(ValueError, match="are a worker each"):
        df.testing.on_ranks(2, lambda rank: df.init(processes_per_worker=2))


# -- what is refused ----------------------------------------------------------------------------------------------------


def mistakes():
    said = {}

    def note(name, function, *arguments):
        with pytest.raises(ValueError) as caught:
            function(*arguments)
        said[name] = str(caught.value)

    loss = nn.functional.mse_loss
    ring = df.topology("complete", WORKERS)
    with workers(SHARDS) as world:
        make = df.adapt_while_communicate
        params, buffers, loss_fn = df.functional(Network(), loss)
        plain_loss = loss_fn
        note("plain", make, df.autograd(loss_fn), optimizer(), ring)
        inside = KINDS["tensor"]
        params, buffers, loss_fn = df.functional(inside.place(world, inside.network()), loss)
        note("tensor", make, loss_fn, optimizer(), ring)
        algorithm = make(df.autograd(loss_fn), optimizer(), ring)
        note("start", algorithm.init, {name: leaf + world.process for name, leaf in params.items()}, buffers)
        note("batch", algorithm.step, algorithm.init(params, buffers), batch(world.worker, world.process, 0), 0)
        apart = parallelize_module(
            nn.Sequential(nn.Linear(7, 4)), world.mesh["shard"], {"0": ColwiseParallel(use_local_output=False)}
        )
        in_parts = df.functional(apart, lambda predictions, targets: predictions.square().mean())
        made = make(df.autograd(in_parts[2]), optimizer(), ring)
        note("DTensor", made.step, made.init(*in_parts[:2]), batch(world.worker, 0, 0), 0)
        norm = {"0": ColwiseParallel(), "1": SequenceParallel()}
        strange = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        note("strange", df.functional, parallelize_module(strange, world.mesh["shard"], norm), loss)
        everyone = init_device_mesh("cpu", (4,))
        note("mesh", df.functional, fully_shard(Network(), mesh=everyone), loss)
        rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
        note("2-D", df.functional, fully_shard(Network(), mesh=rows), loss)
        part = Network()
        fully_shard(part.first, mesh=world.mesh["shard"])
        note("part", df.functional, part, loss)
        outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))  # tensor-parallel over workers
        turned = inside.place(world, inside.network(), outer["tensor"])
        note("outer", df.functional, fully_shard(turned, mesh=outer["shard"]), loss)

        module = fully_shard(Network(), mesh=rows["shard"])  # a mesh of one's own over the same processes is as good
        params, buffers, loss_fn = df.functional(module, loss)
        note("traced", make, loss_fn, optimizer(), ring)
        sharded_loss = df.autograd(loss_fn)
        by_leaf = df.transforms.by_leaf(df.transforms.identity())
        note("by_leaf", make(sharded_loss, df.chain(by_leaf, df.sgd(0.1)), ring).init, params, buffers)
        algorithm = make(sharded_loss, df.sgd(0.1), ring)
        state = algorithm.init(params, buffers)
        compiled = df.compile(algorithm.step, backend="eager", donate=False)
        compiled(state, batch(0, 0, 0), 0)
        note("buffers", df.average_buffers, algorithm)
        note("evaluate", df.evaluate, lambda params, buffers, batch: 0.0, state, [])
        note("weights", df.state_dict, Network(), state)
        note("load", df.load_state_dict, Network(), state, {})
        note("resize", df.resize, df.stack(state, 1), algorithm)
        note(
            "DDP",
            df.functional,
            nn.parallel.DistributedDataParallel(Network(), process_group=world.channels.intra_worker),
            loss,
        )
        note("compiled", df.functional, torch.compile(module), loss)
        note(
            "FSDP1",
            df.functional,
            FullyShardedDataParallel(nn.Linear(4, 4), world.channels.intra_worker, device_id=world.device),
            loss,
        )
        every = make(sharded_loss, optimizer(), df.topology("one-peer-exp", world.size))
        for name, step in {"size": every.step, "size compiled": df.compile(every.step, backend="eager")}.items():
            note(name, step, every.init(params, buffers), batch(0, 0, 0), 0)
        note("three", make(sharded_loss, optimizer(), df.topology("complete", 3)).init, params, buffers)

        rate = 0.1 if world.process else 0.2
        note("rate", make(sharded_loss, df.sgd(rate), ring).init, params, buffers)
        uneven = df.functional(sharded(world, nn.Linear(3 + world.worker, 4)), loss)
        note("shapes", make(df.autograd(uneven[2]), df.sgd(0.1), ring).init, *uneven[:2])
    note("one", df.functional, module, loss)
    for name, function in {"params": df.params, "mean": df.consensus_mean, "distance": df.consensus_distance}.items():
        note(name, function, state)
    note("built", algorithm.init, params, buffers)
    whole_loss = make(plain_loss, optimizer(), df.topology("complete", 4))
    for name, step in {
        "before": algorithm.step,
        "others": whole_loss.step,
        "others compiled": df.compile(whole_loss.step),
    }.items():
        note(name, step, state, batch(0, 0, 0), 0)
    note("compiled before", compiled, state, batch(0, 0, 0), 0)
    return said


def test_what_is_not_there_is_said_on_every_rank(four):
    per_rank = four(mistakes)
    for name, words in {
        "start": "the processes of a worker start equal",
        "plain": "a worker is 2 processes, and PyTorch shards a module over them: fully_shard(module, ",
        "tensor": "the gradient of a sharded module is PyTorch's own; write df.autograd(loss_fn)",
        "batch": "compute one batch together: draw it by world.worker",
        "DTensor": "make them whole before the loss: predictions.full_tensor()",
        "strange": "are DTensors",
        "mesh": "is sharded over processes [0, 1, 2, 3]",
        "2-D": "(a mesh of 2 axes)",
        "part": "is whole on every process and others are sharded",
        "outer": "is sharded over processes [0, 2, 1, 3] (a mesh of 2 axes)",
        "traced": "write df.autograd(loss_fn)",
        "by_leaf": "by_leaf(transform): it needs whole leaves, but a worker is 2 processes",
        "buffers": "average_buffers(algorithm): a worker is 2 processes",
        "evaluate": "the state is of a sharded module, and this is of a plain one",
        "weights": "the state is of a sharded module, and this is of a plain one",
        "load": "the state is of a sharded module, and this is of a plain one",
        **dict.fromkeys(
            ("params", "mean", "distance", "before", "others", "others compiled"),
            "a state of workers of 2 processes, but df.init(processes_per_worker=1)",
        ),
        "built": "was built for workers of 2 processes, and now they have 1",
        "resize": "4 processes each hold a part",
        "rate": "ranks disagree",
        "shapes": "Rank 0 (process 0 of worker 0) has",
        "one": "the module is sharded, but a worker is one process",
        "compiled before": "a state of workers of 2 processes, but df.init(processes_per_worker=1)",
        "DDP": "pass the module that it wraps",
        "compiled": "compile that in place, module.compile()",
        "FSDP1": "is FSDP1; call torch.distributed.fsdp.fully_shard",
        "size": "num_workers=4, but 4 processes run, 2 for each worker; make it with df.topology(name, world.num_workers), here 2",
        "size compiled": "num_workers=4, but 4 processes run, 2 for each worker; make it with df.topology(name, world.num_workers)",
        "three": "num_workers=3, but 4 processes run, 2 for each worker; make it with df.topology(name, world.num_workers), here 2",
    }.items():
        assert all(words in said[name] for said in per_rank), (name, [said[name] for said in per_rank])


# -- one order for all processes of a worker ------------------------------------------------------------------------------


def test_what_a_worker_waits_for_stays_in_one_order():
    """Two sums and a gradient that need nothing of one another: Inductor must not order them by the size of shards."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    ops = torch.ops.decentfn
    first = graph.call_function(ops.sum_within_worker.default, (x, 2, None))
    gradient = graph.call_function(ops.gradient.default, (x, None))
    gradient.meta["val"] = [torch.zeros(()), torch.zeros(2)]
    last = graph.call_function(ops.sum_within_worker.default, (x, 2, None))
    graph.output((first, gradient, last))
    inductor._chain(graph)
    graph.lint()
    assert first.args == (x, 2, None) and gradient.args == (x, first)
    assert last.args[2].target is operator.getitem and last.args[2].args == (gradient, 0)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def comes_back(kind, size, directory):
    inside = ALL_KINDS[kind]
    with workers(size) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        algorithm = made("gradient_tracking", world.num_workers)(df.autograd(loss_fn), optimizer())
        state = algorithm.init(params, buffers)
        state, _ = algorithm.step(state, batch_of(world, inside.team_of(size), 0), 0)
        with df.checkpoint.Saver(directory) as saver:
            saver.save(state, 1)
        back = df.checkpoint.restore(directory, algorithm.init(params, buffers)).state
        torch.testing.assert_close(trees.leaves(back), trees.leaves(state), atol=0, rtol=0)
        return df.state_dict(module, state)


@pytest.mark.parametrize(("kind", "size"), [("sharded", 2), ("tensor", 2), ("both", 4)])
def test_a_checkpoint_of_each_kind_comes_back_and_is_read_by_whole_workers(four, tmp_path, kind, size):
    told = four(comes_back, kind, size, str(tmp_path))
    num_workers = 4 // size
    params, buffers, loss_fn = df.functional(ALL_KINDS[kind].network(), nn.functional.mse_loss)
    init, _ = made("gradient_tracking", num_workers)(loss_fn, optimizer())
    state = df.checkpoint.restore(tmp_path, df.stack(init(params, buffers), num_workers)).state
    for i in range(num_workers):
        for name, rows in df.params(state).items():
            assert torch.equal(rows[i], told[i * size][name]), name
