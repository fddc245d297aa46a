"""A worker's processes, in each of the ways in which they can share its parameters, beside the simulator of whole workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import decentfn as df
from decentfn import compressors
from decentfn.comm import collectives
from decentfn.comm.collectives import Channels, Identity, World
from decentfn.comm.fingerprint import compare, digest
from decentfn.core import trees
from decentfn.core.buckets import Buckets

WORKERS, STEPS, CLIP = 2, 5, 0.1
ALGORITHMS = {
    "adapt_while_communicate": ("one-peer-exp", {}),
    "stochastic_gradient_push": ("one-peer-exp", {}),
    "gradient_tracking": ("static-ring", {}),
    "choco_sgd": ("static-ring", {"compressor": compressors.top_k(0.3), "gamma": 0.3}),
    "diloco": ("complete", {"inner_steps": 2}),
    "relay_sgd": ("chain", {}),
}
"""One of each family."""


@contextmanager
def workers(size=2):
    yield df.init(processes_per_worker=size)
    df.init(processes_per_worker=1)


class Tied(nn.Module):
    """A tied weight, a buffer, and a linear layer that `torch.compile` wraps in one of the tests."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class Network(nn.Module):
    """Five rows over two shards are three and two, one row is one and none; a tied weight, a frozen one and a buffer."""

    cut_at: dict[str, int | None] = {}

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


class Hidden(nn.Module):
    """Six hidden units over two processes or three; a bias that is a DTensor on each, and layers that no plan names."""

    cut_at: dict[str, int | None] = {
        "first.weight": 0,
        "first.bias": 0,
        "second.weight": 1,
        "second.bias": None,
        "norm.weight": None,
        "norm.bias": None,
        "last.weight": None,
        "last.bias": None,
    }

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.norm, self.last = (
            nn.Linear(7, 6),
            nn.Linear(6, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        return self.last(self.norm(self.second(torch.tanh(self.first(x)))))


def sharded(world, module):
    for part in list(module.children())[:1]:
        fully_shard(part, mesh=world.mesh["shard"])
    return fully_shard(module, mesh=world.mesh["shard"])


def tensor_parallel(world, module, mesh=None):
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(module, mesh or world.mesh["shard"], plan)


@cache
def three_axes(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("worker", "shard", "tensor"))


def both(world, module):
    """Tensor parallel over pairs of processes, and sharded over the pairs, as PyTorch's own page does it."""
    mesh = three_axes(world.num_workers, world.processes_per_worker // 2, 2)
    tensor_parallel(world, module, mesh["tensor"])
    fully_shard(module.norm, mesh=mesh["shard"])
    return fully_shard(module, mesh=mesh["shard"])


class WithinWorker(NamedTuple):
    """One way to share: the network, and what PyTorch does with it."""

    network: Callable[[], Any]
    place: Callable[[Any, nn.Module], nn.Module]
    tp_size: int | None = 1
    """Number of processes that share one batch; None: all of a worker's."""

    def team_of(self, processes):
        return self.tp_size or processes


KINDS = {
    "sharded": WithinWorker(Network, sharded),
    "tensor": WithinWorker(Hidden, tensor_parallel, tp_size=None),
}
"""Each on any number of processes."""
ALL_KINDS = KINDS | {"both": WithinWorker(Hidden, both, tp_size=2)}


class Case(NamedTuple):
    """Combination of features to try."""

    kind: str
    algorithm: str
    processes: int
    compiled: bool
    accumulates: bool
    clips: bool
    num_workers: int = WORKERS


SMALL = tuple(
    Case(
        kind,
        name,
        processes=3 if i == (j + 1) % 4 else 2,
        compiled=i == j % 4,
        accumulates=(i // 2 + j) % 2 == 1,
        clips=(i + j // 3) % 2 == 1,
    )
    for i, kind in enumerate([*KINDS, *KINDS])
    for j, name in enumerate(ALGORITHMS)
)
"""Every pair of two values of two fields, once at least, but that none of six processes is compiled: that takes longest."""
ALL = tuple(
    Case(*values)
    for values in itertools.product(KINDS, ALGORITHMS, (2, 3), (False, True), (False, True), (False, True))
)
EIGHT = (
    *(case._replace(processes=2, num_workers=4) for case in SMALL),
    *(
        Case("both", name, 4, compiled=compiled, accumulates=j % 3 == 0, clips=j in (0, 1, 5))
        for j, name in enumerate(ALGORITHMS)
        for compiled in (False, True)
    ),
)
"""Cases of eight processes: four workers of two, and two of four that are sharded and tensor-parallel."""


def batch(worker, process, t):
    draw = torch.Generator().manual_seed(1000 * t + 10 * worker + process)
    x = torch.randn(4, 7, generator=draw)
    return x, torch.sin(x[:, :3]) + worker


def whole_batch(worker, processes, t, batch=batch):
    """Return the concatenated batch of a worker's processes, or of the given ones."""
    named = range(processes) if isinstance(processes, int) else processes
    return tuple(map(torch.cat, zip(*(batch(worker, s, t) for s in named), strict=True)))


def batch_of(world, tp_size, t, batch=batch):
    """Return this process's batch: its own, or that of its tensor-parallel group."""
    first = world.process // tp_size * tp_size
    return whole_batch(world.worker, range(first, first + tp_size), t, batch)


def chunks(leaf, n, dim=0):
    return [*leaf.chunk(n, dim), *[leaf.narrow(dim, 0, 0)] * n][:n]


def cut(tree, processes, inside):
    """The tree with every leaf in parts, as PyTorch cuts it, by process; and what a team does not cut, by team.

    First over a team's processes, then what each has of it over the teams.
    """
    tp_size = inside.team_of(processes)
    parts: dict[str, dict[str, Any]] = {f"{s}": {} for s in range(processes)}
    parts |= {f"common {i}": {} for i in range(processes // tp_size)} if None in inside.network.cut_at.values() else {}
    for name, leaf in tree.items():
        dim = inside.network.cut_at.get(name, 0)
        for j, piece in enumerate([leaf] if dim is None else chunks(leaf, tp_size, dim)):
            for i, part in enumerate(chunks(piece, processes // tp_size)):
                parts[f"common {i}" if dim is None else f"{i * tp_size + j}"][name] = part.clone()
    return parts


def own_part(parts, process, tp_size):
    return parts[f"{process}"] | parts.get(f"common {process // tp_size}", {})


def joined(parts, processes, inside, first=0):
    """The tree that was cut; `first` is how many axes stand before a leaf's own."""
    tp_size = inside.team_of(processes)

    def over_teams(key, name):
        return torch.cat([parts[key(i)][name] for i in range(processes // tp_size)], first)

    tree = {name: over_teams(lambda i: f"common {i}", name) for name in parts.get("common 0", ())}
    for name in parts["0"]:
        pieces = [over_teams(lambda i, j=j: f"{i * tp_size + j}", name) for j in range(tp_size)]
        tree[name] = torch.cat(pieces, first + inside.network.cut_at.get(name, 0))
    return tree


def optimizer(clips=True, masks=()):
    parts = [df.transforms.masked(df.transforms.scale(1.0), mask) for mask in masks]
    clip = [df.clip_by_global_norm(CLIP)] if clips else []
    return df.chain(*parts, *clip, df.sgd(0.1, momentum=0.9))


class Simulated(NamedTuple):
    metrics: Any
    params: dict[str, torch.Tensor]
    distance: torch.Tensor


def simulated(make, kind, processes, *, batch=batch, steps=STEPS, clips=True, is_sharded=False, num_workers=WORKERS):
    """Workers of one process on all batches: the last metrics, their parameters and their distance.

    With `is_sharded` of the tree cut into parts, each in buckets of its own, as a compressor sees them.
    """
    inside = ALL_KINDS[kind]
    with collectives.use(World(Channels(Identity.of(0, 1)))):
        params, buffers, whole_loss = df.functional(inside.network(), nn.functional.mse_loss)
        loss_fn, masks = whole_loss, []
        if is_sharded:
            params = cut(params, processes, inside)
            masks = [lambda name, shape, key=key: name.startswith(f"{key}.") for key in params]

            def loss_fn(tree, buffers, batch):
                return whole_loss(joined(tree, processes, inside), buffers, batch)

        init, step = make(df.autograd(loss_fn), optimizer(clips, masks))
        state, step = df.stack(init(params, buffers), num_workers), df.simulate(step, num_workers)
        for t in range(steps):
            rows = [whole_batch(w, processes, t, batch) for w in range(num_workers)]
            state, metrics = step(state, tuple(map(torch.stack, zip(*rows, strict=True))), t)
        tree = df.params(state)
        tree = joined(tree, processes, inside, 1) if is_sharded else tree
        return Simulated(metrics._replace(aux=None), tree, df.consensus_distance(state))


def made(name, num_workers=WORKERS):
    topology, hyperparameters = ALGORITHMS[name]

    def make(loss_fn, optimizer, **options):
        schedule = df.topology(topology, num_workers)
        return getattr(df, name)(loss_fn, optimizer, schedule, **hyperparameters, **options)

    return make


def expected_of(case):
    """Return the expected result of `trains`."""
    is_sharded = case.algorithm == "choco_sgd"
    make = made(case.algorithm, case.num_workers)
    return simulated(
        make, case.kind, case.processes, clips=case.clips, is_sharded=is_sharded, num_workers=case.num_workers
    )


class Counting:
    """A backend of torch.compile that keeps what it was given, and compiles by AOTAutograd."""

    def __init__(self):
        self.graphs, self.code = [], []

    def __call__(self, graph, inputs):
        self.graphs.append(
            [str(node.target).removeprefix("decentfn.").removesuffix(".default") for node in graph.graph.nodes]
        )
        self.code.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def told_code(step, counting, *arguments):
    if counting.code:  # what tells the code forgets what was compiled
        return step(*arguments)
    from torch._inductor.utils import run_and_get_code  # takes seconds

    result, code = run_and_get_code(step, *arguments)
    counting.code += code
    return result


class Told(NamedTuple):
    """By one process."""

    graphs: list[list[str]]
    code: list[str]
    sent: float  # bytes in a step
    held: int  # bytes of the parameters


def trains(case, expected, backend=None):
    """On every process of workers of such: what the simulator expects."""
    inside = ALL_KINDS[case.kind]
    with workers(case.processes) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        loss_fn = df.autograd(loss_fn)
        if case.accumulates:
            loss_fn = df.accumulate(loss_fn)
        init, step = made(case.algorithm, case.num_workers)(loss_fn, optimizer(case.clips))
        counting = Counting()
        if case.compiled:
            step = df.compile(step, backend=backend or counting)
        if backend == "inductor":
            step = partial(told_code, step, counting)
        state = init(params, buffers)
        with df.profiling.communication() as counted:
            for t in range(STEPS):
                data = batch_of(world, inside.team_of(case.processes), t)
                if case.accumulates:
                    data = tuple(x.unflatten(0, (2, -1)) for x in data)
                state, metrics = step(state, data, t)
        assert_as_simulated(world, case, module, state, metrics, expected)
        return Told(counting.graphs, counting.code, counted.bytes_sent / STEPS, state.params.plan.nbytes)


def assert_as_simulated(world, case, module, state, metrics, expected):
    close = {"atol": 1e-6, "rtol": 1e-5}
    i, inside = world.worker, ALL_KINDS[case.kind]
    torch.testing.assert_close(metrics.loss, expected.metrics.loss[i])
    torch.testing.assert_close(metrics.grad_norm, expected.metrics.grad_norm[i], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(df.consensus_distance(state), expected.distance, atol=1e-6, rtol=1e-4)
    rows = {name: leaf[i] for name, leaf in expected.params.items()}
    whole = df.state_dict(module, state)
    if world.process:
        assert whole == {}
    else:
        torch.testing.assert_close({name: whole[name] for name in rows}, rows, **close)
    # On the process itself, what the worker's others do not have.
    own = own_part(cut(rows, case.processes, inside), world.process, inside.team_of(case.processes))
    torch.testing.assert_close(state.params.tree(), own, **close)
    torch.testing.assert_close(df.params(state), own, **close)
    require_equal_copies(state)


def require_equal_copies(state):
    """Require bitwise equal states in a tensor-parallel group, including optimizer state and algorithm memory."""
    found = []
    trees.map_nodes(Buckets, lambda x: found.append(x) or x, state)
    common = [b for x in found for b, one in zip(x, x.plan.buckets, strict=True) if one.is_common]
    compare("copies", [], "are equal", of_tp_group=[digest(b) for b in common], tp_size=state.params.plan.tp_size)
