"""A worker's processes, in each of the ways in which they can share its parameters, beside the simulator of whole workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import decentfn as df
from decentfn import collectives, compressors, trees
from decentfn.buckets import Buckets
from decentfn.collectives import World
from decentfn.fingerprint import compare
from decentfn.replicas import digest

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
    try:
        yield df.init(processes_per_worker=size)
    finally:
        df.init(processes_per_worker=1)


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


def tensor_parallel(world, module):
    return parallelize_module(module, world.mesh["shard"], {"first": ColwiseParallel(), "second": RowwiseParallel()})


class Inside(NamedTuple):
    """One way to share: the network, what PyTorch does with it, and how its gradient is taken."""

    network: Callable[[], Any]
    place: Callable[[Any, nn.Module], nn.Module] = lambda world, module: module
    loss: Callable[[Any], Any] = df.autograd


KINDS = {
    "sharded": Inside(Network, sharded),
    "replicated": Inside(Network),
    "traced": Inside(Network, loss=lambda loss_fn: loss_fn),
    "tensor": Inside(Hidden, tensor_parallel),
}


class Case(NamedTuple):
    """What is tried together."""

    kind: str
    algorithm: str
    processes: int
    compiled: bool
    accumulates: bool
    clips: bool


SMALL = tuple(
    Case(
        kind,
        name,
        processes=3 if i == (j + 1) % 4 else 2,
        compiled=i == j % 4,
        accumulates=(i // 2 + j) % 2 == 1,
        clips=(i + j // 3) % 2 == 1,
    )
    for i, kind in enumerate(KINDS)
    for j, name in enumerate(ALGORITHMS)
)
"""Every pair of two values of two fields, once at least, but that none of six processes is compiled: that takes longest."""
ALL = tuple(
    Case(*values)
    for values in itertools.product(KINDS, ALGORITHMS, (2, 3), (False, True), (False, True), (False, True))
)


def batch(worker, process, t):
    draw = torch.Generator().manual_seed(1000 * t + 10 * worker + process)
    x = torch.randn(4, 7, generator=draw)
    return x, torch.sin(x[:, :3]) + worker


def whole_batch(worker, processes, t):
    """What the processes of a worker have together."""
    return tuple(map(torch.cat, zip(*(batch(worker, s, t) for s in range(processes)), strict=True)))


def cut(tree, processes, cut_at):
    """The tree with every leaf in parts, as PyTorch cuts it, by process; and what is not cut."""
    parts: dict[str, dict[str, Any]] = {str(s): {} for s in range(processes)}
    for name, leaf in tree.items():
        if (dim := cut_at.get(name, 0)) is None:
            parts.setdefault("common", {})[name] = leaf.clone()
            continue
        chunks = [*leaf.chunk(processes, dim), *[leaf.narrow(dim, 0, 0)] * processes][:processes]
        for s, chunk in enumerate(chunks):
            parts[str(s)][name] = chunk.clone()
    return parts


def joined(parts, processes, cut_at, first=0):
    """The tree that was cut; `first` is how many axes stand before a leaf's own."""
    names = parts["0"]
    cuts = {
        name: torch.cat([parts[str(s)][name] for s in range(processes)], first + (cut_at.get(name) or 0))
        for name in names
    }
    return cuts | parts.get("common", {})


def optimizer(clips=True, masks=()):
    parts = [df.transforms.masked(df.transforms.scale(1.0), mask) for mask in masks]
    clip = [df.clip_by_global_norm(CLIP)] if clips else []
    return df.chain(*parts, *clip, df.sgd(0.1, momentum=0.9))


class Simulated(NamedTuple):
    metrics: Any
    params: dict[str, torch.Tensor]
    distance: torch.Tensor


def simulated(make, kind, processes, *, batch=batch, steps=STEPS, clips=True, is_cut=False):
    """Workers of one process on all batches: the last metrics, their parameters and their distance.

    With `is_cut` of the tree cut into parts, each in buckets of its own, as a compressor sees them.
    """
    inside, cut_at = KINDS[kind], KINDS[kind].network.cut_at
    with collectives.use(World(None, 0, 1)):
        params, buffers, whole_loss = df.functional(inside.network(), nn.functional.mse_loss)
        loss_fn, masks = whole_loss, []
        if is_cut:
            params = cut(params, processes, cut_at)
            masks = [lambda name, shape, s=s: name.startswith(f"{s}.") for s in range(processes)]

            def loss_fn(tree, buffers, batch):
                return whole_loss(joined(tree, processes, cut_at), buffers, batch)

        init, step = make(inside.loss(loss_fn), optimizer(clips, masks))
        state, step = df.stack(init(params, buffers), WORKERS), df.simulate(step, WORKERS)
        for t in range(steps):
            rows = [
                [torch.cat(x) for x in zip(*(batch(w, s, t) for s in range(processes)), strict=True)]
                for w in range(WORKERS)
            ]
            state, metrics = step(state, tuple(map(torch.stack, zip(*rows, strict=True))), t)
        tree = df.params(state)
        tree = joined(tree, processes, cut_at, 1) if is_cut else tree
        return Simulated(metrics._replace(aux=None), tree, df.consensus_distance(state))


def made(name):
    topology, hyperparameters = ALGORITHMS[name]

    def make(loss_fn, optimizer, **options):
        schedule = df.topology(topology, WORKERS)
        return getattr(df, name)(loss_fn, optimizer, schedule, **hyperparameters, **options)

    return make


def expected_of(case):
    """What `trains` must come to."""
    is_cut = case.algorithm == "choco_sgd"
    return simulated(made(case.algorithm), case.kind, case.processes, clips=case.clips, is_cut=is_cut)


class Counting:
    """A backend of torch.compile that keeps what it was given, and compiles by AOTAutograd."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([str(node.target).removeprefix("decentfn.") for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def trains(case, expected, backend=None):
    """On every process of workers of such: what the simulator expects. Returns the graphs, and bytes and values of the state."""
    inside = KINDS[case.kind]
    with workers(case.processes) as world:
        module = inside.place(world, inside.network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        loss_fn = inside.loss(loss_fn)
        if case.accumulates:
            loss_fn = df.accumulate(loss_fn)
        init, step = made(case.algorithm)(loss_fn, optimizer(case.clips))
        counting = Counting()
        if case.compiled:
            step = df.compile(step, backend=backend or counting)
        state = init(params, buffers)
        with df.profiling.communication() as counted:
            for t in range(STEPS):
                data = batch(world.worker, world.process, t)
                if case.kind == "tensor":  # whose processes compute one batch together
                    data = whole_batch(world.worker, case.processes, t)
                if case.accumulates:
                    data = tuple(x.unflatten(0, (2, -1)) for x in data)
                state, metrics = step(state, data, t)
        assert_as_simulated(world, case, module, state, metrics, expected)
        return counting.graphs, counted.bytes_sent / STEPS, state.params.plan.nbytes


def assert_as_simulated(world, case, module, state, metrics, expected):
    close = {"atol": 1e-6, "rtol": 1e-5}
    i, cut_at = world.worker, KINDS[case.kind].network.cut_at
    torch.testing.assert_close(metrics.loss, expected.metrics.loss[i])
    torch.testing.assert_close(metrics.grad_norm, expected.metrics.grad_norm[i], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(df.consensus_distance(state), expected.distance, atol=1e-6, rtol=1e-4)
    rows = {name: leaf[i] for name, leaf in expected.params.items()}
    whole, replicated = df.state_dict(module, state), case.kind in ("replicated", "traced")
    if world.process and not replicated:
        assert whole == {}
    else:
        torch.testing.assert_close({name: whole[name] for name in rows}, rows, **close)
    # On the process itself, what the worker's others do not have.
    parts = cut(rows, case.processes, cut_at)
    own = parts[str(world.process)] | parts.get("common", {})
    torch.testing.assert_close(state.params.tree(), own, **close)
    torch.testing.assert_close(df.params(state), rows if replicated else own, **close)
    require_equal_copies(state)


def require_equal_copies(state):
    """What all processes of a worker hold is equal, bit for bit, the optimizer's state and the algorithm's memory too."""
    found = []
    trees.map_nodes(Buckets, lambda x: found.append(x) or x, state)
    common = [b for x in found for b, one in zip(x, x.plan.buckets, strict=True) if one.is_common]
    compare("copies", [], "are equal", of_worker=[digest(b) for b in common])
