"""Workers of several processes: two workers of two gloo processes each are two simulated workers on both processes' batches."""

from __future__ import annotations

import operator
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import decentfn as df
from decentfn import collectives, compressors
from decentfn.collectives import World
from decentfn.torch_private import inductor

WORKERS, SHARDS, STEPS = 2, 2, 6
CLIP = 0.1
PAGE = Path(df.__file__).parent.parent / "docs" / "large_models.md"
ALGORITHMS = {
    "adapt_while_communicate": ("one-peer-exp", {}),
    "stochastic_gradient_push": ("one-peer-exp", {}),
    "gradient_tracking": ("static-ring", {}),
    "choco_sgd": ("static-ring", {"compressor": compressors.top_k(0.3), "gamma": 0.3}),
    "diloco": ("complete", {"inner_steps": 2}),
    "relay_sgd": ("chain", {}),
}
"""One of each family."""


@pytest.fixture
def four(ranks):
    """Four processes, which are two workers as soon as one of the functions below calls `workers`."""
    return ranks(WORKERS * SHARDS).run


@contextmanager
def workers(size=SHARDS):
    try:
        yield df.init(processes_per_worker=size)
    finally:
        df.init(processes_per_worker=1)


class Network(nn.Module):
    """Five rows over two shards are three and two, one row is one and none; a tied weight, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 3)
        self.same = nn.Linear(5, 1)
        self.same.weight = self.middle.weight
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(h)) + self.same(h)) + self.fixed


def sharded(world, module):
    for part in list(module.children())[:1]:
        fully_shard(part, mesh=world.mesh["shard"])
    return fully_shard(module, mesh=world.mesh["shard"])


def batch(worker, process, t):
    draw = torch.Generator().manual_seed(1000 * t + 10 * worker + process)
    x = torch.randn(4, 7, generator=draw)
    return x, torch.sin(x[:, :3]) + worker


def both_batches(batch, t):
    pairs = [[batch(w, s, t) for s in range(SHARDS)] for w in range(WORKERS)]
    return tuple(torch.stack([torch.cat([pair[k] for pair in its]) for its in pairs]) for k in range(2))


def cut(tree):
    """The tree with every leaf in two, as `fully_shard` does it."""
    parts = {name: [*leaf.chunk(SHARDS), *[leaf[:0]] * SHARDS][:SHARDS] for name, leaf in tree.items()}
    return {str(s): {name: part[s].clone() for name, part in parts.items()} for s in range(SHARDS)}


def joined(tree):
    return {name: torch.cat([tree[str(s)][name] for s in range(SHARDS)]) for name in tree["0"]}


def optimizer(masks=()):
    parts = [df.transforms.masked(df.scale(1.0), mask) for mask in masks]
    return df.chain(*parts, df.clip_by_global_norm(CLIP), df.sgd(0.1, momentum=0.9))


def simulated(make, module, batch, steps=STEPS, is_cut=False, wrap=lambda loss_fn: loss_fn):
    """Two workers of one process: the last metrics, their parameters and their distance."""
    with collectives.use(World(None, 0, 1)):
        params, buffers, whole_loss = df.functional(module, nn.functional.mse_loss)
        loss_fn, masks = whole_loss, ()
        if is_cut:
            params, masks = cut(params), [lambda name, shape: name.startswith("0.")]

            def loss_fn(tree, buffers, batch):
                return whole_loss(joined(tree), buffers, batch)

        init, step = make(wrap(df.autograd(loss_fn)), optimizer(masks))
        state, step = df.stack(init(params, buffers), WORKERS), df.simulate(step, WORKERS)
        for t in range(steps):
            state, metrics = step(state, both_batches(batch, t), t)
        tree = df.params(state)
        return metrics, joined_rows(tree) if is_cut else tree, df.consensus_distance(state), state


def joined_rows(tree):
    return {name: torch.cat([tree[str(s)][name] for s in range(SHARDS)], 1) for name in tree["0"]}


def assert_as_simulated(world, module, state, metrics, expected):
    theirs, tree, distance, stacked = expected
    i = world.worker
    torch.testing.assert_close(metrics.loss, theirs.loss[i])
    torch.testing.assert_close(metrics.grad_norm, theirs.grad_norm[i])
    torch.testing.assert_close(df.consensus_distance(state), distance, atol=1e-6, rtol=1e-4)
    whole = df.state_dict(module, state)
    if world.process:
        assert whole == {}
    else:
        for name, rows in tree.items():
            torch.testing.assert_close(whole[name], rows[i], atol=1e-6, rtol=1e-5)
    # On the process itself, what the worker's others do not have.
    own = df.params(state)
    for name, rows in tree.items():
        torch.testing.assert_close(own[name], cut({name: rows[i]})[str(world.process)][name], atol=1e-6, rtol=1e-5)


def made(name):
    topology, hyperparameters = ALGORITHMS[name]

    def make(loss_fn, optimizer, **options):
        schedule = df.topology(topology, WORKERS)
        return getattr(df, name)(loss_fn, optimizer, schedule, **hyperparameters, **options)

    return make


class Counting:
    """A backend of torch.compile that keeps what it was given, and compiles by AOTAutograd."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([str(node.target).removeprefix("decentfn.") for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def trains_as_simulated(name, traced, backend="counting"):
    with workers() as world:
        module = sharded(world, Network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        init, step = made(name)(df.autograd(loss_fn), optimizer())
        counting = Counting()
        if traced:
            step = df.compile(step, backend=counting if backend == "counting" else backend)
        state = init(params, buffers)
        for t in range(STEPS):
            state, metrics = step(state, batch(world.worker, world.process, t), t)
        expected = simulated(made(name), Network(), batch, is_cut=name == "choco_sgd")
        assert_as_simulated(world, module, state, metrics, expected)
        return counting.graphs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sharded_workers_are_the_simulated_ones(four, name):
    four(trains_as_simulated, name, False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_traced_too_in_one_graph(four, name):
    for graphs in four(trains_as_simulated, name, True):
        assert len(graphs) == 1
        if name == "adapt_while_communicate":
            where = [graphs[0].index(call) for call in ("exchange", "gradient", "wait")]
            assert where == sorted(where) and "sum_inside" in graphs[0]


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

    with workers() as world:
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


def accumulates_and_draws():
    with workers() as world:
        module = sharded(world, Network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        make = made("adapt_while_communicate")
        init, step = make(df.accumulate(df.autograd(loss_fn)), optimizer())
        state = init(params, buffers)
        for t in range(3):
            halves = tuple(x.view(2, 2, -1) for x in batch(world.worker, world.process, t))
            state, metrics = step(state, halves, t)
        # Micro-batches of equal size: their mean is the batch's.
        expected = simulated(make, Network(), batch, 3)
        assert_as_simulated(world, module, state, metrics, expected)
        seen_by_all(state, metrics, expected)

        with torch.no_grad():  # an evaluation
            data = batch(world.worker, world.process, 0)
            loss, _ = loss_fn(df.params(state), df.buffers(state), data)
            whole = {name: rows[world.worker] for name, rows in expected[1].items()}
            plain = torch.func.functional_call(Network(), whole, (data[0],))
            torch.testing.assert_close(loss, nn.functional.mse_loss(plain, data[1]))
        state, _ = step(state, halves, t)  # though the module has gathered its parameters, and keeps them
        assert sorted(df.state_dict(module, state)) == ([] if world.process else sorted(Network().state_dict()))

        params, buffers, loss_fn = df.functional(
            module, forward=lambda m, b: (nn.functional.mse_loss(m(b[0]), b[1]), torch.rand(()))
        )
        init, step = make(df.autograd(loss_fn), optimizer())
        _, metrics = step(init(params, buffers), batch(0, 0, 0), 0)
        return float(metrics.aux)


def test_gradients_accumulate_and_every_process_draws_numbers_of_its_own(four):
    assert len(set(four(accumulates_and_draws))) == 4


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


def runs_the_page(directory):
    script = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    before = os.getcwd()
    os.chdir(directory)
    try:
        names = {}
        exec(script.replace("df.compile(decent_step)", "decent_step"), names)
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
        ([3] * 4, "", "init(processes_per_worker=3): a worker is so many processes of 4; give a divisor"),
        ([0] * 4, "", "init(processes_per_worker=0)"),
        ([True] * 4, "", "init(processes_per_worker=True)"),
        (["nodes"] * 4, "", "init(processes_per_worker='nodes')"),
        (["node"] * 4, "", "LOCAL_WORLD_SIZE is not set on rank 0"),
        ([2, 2, 4, 2], "", "init(processes_per_worker=4): 4 on rank 2, but 2 on rank 0"),
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
    with pytest.raises(ValueError, match=r"init\(processes_per_worker=2\): a worker is so many processes of 1"):
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
    with workers() as world:
        make = df.adapt_while_communicate
        note("whole", make, df.autograd(df.functional(Network(), loss)[2]), optimizer(), ring)
        note("plain", make, lambda params, batch: params.sum(), optimizer(), ring)
        everyone = init_device_mesh("cpu", (4,))
        note("mesh", df.functional, fully_shard(Network(), mesh=everyone), loss)
        rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
        note("2-D", df.functional, fully_shard(Network(), mesh=rows), loss)
        part = Network()
        fully_shard(part.first, mesh=world.mesh["shard"])
        note("part", df.functional, part, loss)

        module = fully_shard(Network(), mesh=rows["shard"])  # a mesh of one's own over the same processes is as good
        params, buffers, loss_fn = df.functional(module, loss)
        note("traced", make, loss_fn, optimizer(), ring)
        sharded_loss = df.autograd(loss_fn)
        for name, transform in {
            "by_leaf": df.transforms.by_leaf(df.transforms.identity()),
            "bucket": df.transforms.clip_by_bucket_norm(1.0),
        }.items():
            note(name, make(sharded_loss, transform, ring).init, params, buffers)
        algorithm = make(sharded_loss, df.sgd(0.1), ring)
        state = algorithm.init(params, buffers)
        note("buffers", df.average_buffers, algorithm)
        note("evaluate", df.evaluate, lambda params, buffers, batch: 0.0, state, [])
        note("resize", df.resize, df.stack(state, 1), algorithm)

        rate = 0.1 if world.process else 0.2
        note("rate", make(sharded_loss, df.sgd(rate), ring).init, params, buffers)
        uneven = df.functional(sharded(world, nn.Linear(3 + world.worker, 4)), loss)
        note("shapes", make(df.autograd(uneven[2]), df.sgd(0.1), ring).init, *uneven[:2])
    note("one", df.functional, module, loss)
    return said


def test_what_is_not_there_is_said_on_every_rank(four):
    per_rank = four(mistakes)
    for name, words in {
        "whole": "processes share a worker's parameters, but this loss is not of a module under fully_shard",
        "plain": "processes share a worker's parameters, but this loss is not of a module under fully_shard",
        "mesh": "is sharded over processes [0, 1, 2, 3]",
        "2-D": "(a mesh of 2 axes)",
        "part": "is whole on every process and others are sharded",
        "traced": "write df.autograd(loss_fn)",
        "by_leaf": "by_leaf(transform): it looks at whole leaves, but a worker is 2 processes",
        "bucket": "clip_by_bucket_norm: a bucket's norm",
        "buffers": "average_buffers(algorithm): a worker is 2 processes",
        "evaluate": "the state holds shards, and this is not of the sharded module",
        "resize": "4 processes hold a part",
        "rate": "ranks disagree",
        "shapes": "Rank 0 (process 0 of worker 0) has",
        "one": "the module is sharded, but a worker is one process",
    }.items():
        assert all(words in said[name] for said in per_rank), (name, per_rank)


# -- one order for all processes of a worker ------------------------------------------------------------------------------


def test_what_a_worker_waits_for_stays_in_one_order():
    """Two sums and a gradient that need nothing of one another: Inductor must not order them by the size of shards."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    ops = torch.ops.decentfn
    first = graph.call_function(ops.sum_inside.default, (x, None))
    gradient = graph.call_function(ops.gradient.default, (x, None))
    gradient.meta["val"] = [torch.zeros(()), torch.zeros(2)]
    last = graph.call_function(ops.sum_inside.default, (x, None))
    graph.output((first, gradient, last))
    inductor._chain(graph)
    graph.lint()
    assert first.args == (x, None) and gradient.args == (x, first)
    assert last.args[1].target is operator.getitem and last.args[1].args == (gradient, 0)
