"""Everyday calls beside the plain PyTorch that does the same: `python -m tests.costs`, a table for docs/performance.md.

CPU time of one thread, interleaved medians, one process; outside CI, which counts instead (tests/test_costs.py).
"""

import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, use, world
from decentfn.elastic.generation import generation_of
from decentfn.elastic.joining import wait_for_run
from decentfn.testing import on_ranks
from tests.allocations import peak_of

ROUNDS = 15
WIDTHS = {"10M": (512, 2050), "50k": (64, 160)}


def network(size: str) -> nn.Module:
    d, h = WIDTHS[size]
    inner = [layer for _ in range(2) for layer in (nn.Linear(h, h), nn.ReLU())]
    return nn.Sequential(nn.Linear(d, h), nn.ReLU(), *inner, nn.Linear(h, 1))


def batch_of(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, WIDTHS[size][0]), torch.randn(32, 1)


def plain_step(size: str, **options: Any) -> Callable[[], Any]:
    module, (x, y) = network(size), batch_of(size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **options)

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(module(x), y).backward()
        optimizer.step()

    return step


def our_step(
    size: str,
    optimizer: Any,
    transform: Any = lambda step: step,
    around: Any = None,
    of: Any = None,
    batch: Any = None,
) -> Any:
    params, buffers, loss_fn = df.functional(network(size), mse_loss)
    algorithm = df.adapt_while_communicate(of(loss_fn) if of else loss_fn, optimizer, df.topology("complete", 1))
    init, step = around(algorithm) if around else algorithm
    state, step, t = init(params, buffers), transform(step), 0
    batch = batch or batch_of(size)

    def one() -> None:
        nonlocal state, t
        state, _ = step(state, batch, t)
        t += 1

    return one


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(3 + ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number >= 3:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(its) for name, its in times.items()}


def print_rows(calls: dict[str, Callable[[], Any]], beside: str) -> None:
    found = medians(calls)
    for name, ms in found.items():
        if name != beside:
            print(f"| {name} | {ms:.3g} | {beside} {found[beside]:.3g} | {ms / found[beside]:.2f} |", flush=True)


def steps(size: str) -> None:
    fused = lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)  # noqa: E731
    compiled = {
        f"`df.from_torch(AdamW(fused=True))`, {size}, compiled": our_step(size, df.from_torch(fused), df.compile),
        f"`df.adamw`, {size}, compiled": our_step(size, df.adamw(1e-3), df.compile),
        "fused AdamW loop": plain_step(size, fused=True),
    }
    print_rows(compiled, "fused AdamW loop")
    eager = {
        f"`df.adamw`, {size}, eager": our_step(size, df.adamw(1e-3)),
        f"the same, `df.donate`, {size}": our_step(size, df.adamw(1e-3), df.donate),
        "AdamW loop": plain_step(size),
    }
    print_rows(eager, "AdamW loop")
    around = {
        f"`df.guard`, {size}, eager": our_step(size, df.adamw(1e-3), around=df.guard),
        f"`df.dynamic_loss_scale`, {size}, eager": our_step(size, df.adamw(1e-3), of=df.dynamic_loss_scale),
        "the step without": our_step(size, df.adamw(1e-3)),
    }
    print_rows(around, "the step without")


def batches() -> None:
    """Accumulation over four batches, and one of 1,024 samples: the loss runs as often as in the loop."""
    module, four, size = network("10M"), [batch_of("10M") for _ in range(4)], "10M"
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def loop(batches: Any) -> None:
        optimizer.zero_grad()
        for x, y in batches:
            (mse_loss(module(x), y) / len(batches)).backward()
        optimizer.step()

    def ours(batch: Any, of: Any) -> Callable[[], Any]:
        return our_step(size, df.adamw(1e-3), of=of, batch=batch)

    calls = {
        "accumulation over four, 10M, traced, eager": ours(four, df.accumulate),
        "accumulation over four, 10M, by autograd, eager": ours(four, lambda loss: df.accumulate(df.autograd(loss))),
        "AdamW loop over four": lambda: loop(four),
    }
    print_rows(calls, "AdamW loop over four")
    large = torch.randn(1024, WIDTHS[size][0]), torch.randn(1024, 1)
    calls = {
        "a batch of 1,024, 10M, traced, eager": ours(large, None),
        "a batch of 1,024, 10M, by autograd, eager": ours(large, df.autograd),
        "AdamW loop of 1,024": lambda: loop([large]),
    }
    print_rows(calls, "AdamW loop of 1,024")


def distances() -> None:
    for n, size in ((1, 9_462_801), (64, 62_561)):
        init, _ = df.adapt_then_combine(lambda p, b: p["w"].sum(), df.sgd(0.1), df.topology("base", n))
        state = init({"w": torch.randn(size)})
        state = state if n == 1 else df.stack(state, n)
        name = f"`df.consensus_distance`, {n} x {size:.2g} parameters"
        print_rows({name: partial(df.consensus_distance, state), "clone": state.params[0].clone}, "clone")


def logs() -> None:
    params, buffers, loss_fn = df.functional(network("10M"), mse_loss)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(1e-3), df.topology("complete", 1))
    state, metrics = step(init(params, buffers), batch_of("10M"), 0)

    def line() -> tuple[float, float]:
        return df.mean(state, metrics).loss.item(), df.consensus_distance(state).item()

    calls = {
        "mean loss and distance, 10M": line,
        "`df.distance_in_steps`, 10M": partial(df.distance_in_steps, state, metrics),
        "clone": lambda: [b.clone() for b in state.params],
    }
    print_rows(calls, "clone")
    with tempfile.TemporaryDirectory() as folder, df.logs.JSONLines(Path(folder) / "log.jsonl") as log:
        values = {"loss": 0.1, "distance": 0.2}
        with (Path(folder) / "plain").open("ab", buffering=0) as file:
            calls = {
                "`JSONLines.write`, 100 lines": lambda: [log.write(values, t) for t in range(100)],
                "json": lambda: [file.write(json.dumps({"step": t, **values}).encode() + b"\n") for t in range(100)],
            }
            print_rows(calls, "json")


def states() -> None:
    """Export, and another number of workers."""
    module = network("10M")
    params, buffers, loss_fn = df.functional(module, mse_loss)
    init, step = df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("complete", 1))
    state, _ = step(init(params, buffers), batch_of("10M"), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        calls = {
            "`df.checkpoint.export`, 10M": partial(df.checkpoint.export, path, module, state),
            "save_file": lambda: save_file({k: x.clone() for k, x in module.state_dict().items()}, path),
        }
        print_rows(calls, "save_file")
    four = df.stack(state, 4)
    algorithm = df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("complete", 2))
    leaves = [*four.params, *four.local.opt[0].mu, *four.local.opt[0].nu]
    calls = {
        "`df.resize` from 4 to 2, 10M": partial(df.resize, four, algorithm),
        "means in float64": lambda: [x.double().mean(0).float().repeat(2, 1) for x in leaves],
    }
    print_rows(calls, "means in float64")


def joining() -> None:
    """How long three gloo ranks stop for a fourth, 10M with Adam; beside a new group and a broadcast of the state."""
    params = [p.detach() for p in network("10M").parameters()]
    stops: list[float] = []

    def train(step: Any, state: Any, t: int, end: int | None = None) -> None:
        times = [time.perf_counter()]
        while t != end:
            state, _ = step(state, torch.ones(()), t)
            t += 1
            times.append(time.perf_counter())
            if end is None and len(generation_of(world()).members.seats) == 4:
                end = t + 3
        taken = [b - a for a, b in itertools.pairwise(times)]
        stops.append(1e3 * (max(taken) - statistics.median(taken)))

    def made() -> tuple[Any, Any]:
        topology = df.topology("base", 3)
        init, step = df.adapt_while_communicate(
            lambda x, batch: sum(p.sum() for p in x) * batch, df.adam(0.1), topology
        )
        return init(params), df.survive(step, patience=timedelta(seconds=60))

    def come(store: Any) -> None:
        with use(wait_for_run(World(Channels(Identity.of(0, 1))), store, timedelta(seconds=60))):
            state, step = made()
            state, first = df.join(step, state, torch.ones(()))
            for t in range(first, first + 4):
                state, _ = step(state, torch.ones(()), t)

    def on_a_member(rank: int) -> None:
        state, step = made()
        newcomer = threading.Thread(target=come, args=(world().channels.store,))
        if rank == 0:
            newcomer.start()
        train(step, state, 0)
        if rank == 0:
            newcomer.join()

    def broadcast(rank: int) -> float:
        of_state = [torch.zeros(sum(p.numel() for p in params)) for _ in range(3)]
        start = time.perf_counter()
        group = world().channels.connected("plain", tuple(range(4)))
        for x in of_state:
            group.broadcast(x, 0).wait()
        taken = 1e3 * (time.perf_counter() - start)
        group.barrier().wait()
        return taken

    found: list[float] = []
    for _ in range(5):
        on_ranks(3, on_a_member)
        found.append(statistics.median(on_ranks(4, broadcast)))
    here, plain = statistics.median(stops), statistics.median(found)
    name = "the members' longest step beyond the median while one joins, 10M with Adam (wall)"
    print(f"| {name} | {here:.3g} | group and broadcast {plain:.3g} | {here / plain:.2f} |", flush=True)


def simulations() -> None:
    params, buffers, loss_fn = df.functional(network("50k"), mse_loss)
    batch, plain, made = [torch.stack([x] * 8) for x in batch_of("50k")], [plain_step("50k") for _ in range(8)], {}
    for name, of in (("traced", lambda loss: loss), ("by autograd", df.autograd)):
        init, step = df.adapt_while_communicate(of(loss_fn), df.adamw(1e-3), df.topology("one-peer-exp", 8))
        state, step, ts = df.stack(init(params, buffers), 8), df.donate(df.simulate(step, 8)), itertools.count()
        made[f"`df.simulate`, 8 x 50k, {name}, eager"] = lambda step=step, state=state, ts=ts: step(
            state, batch, next(ts)
        )
    print_rows(made | {"8 AdamW loops": lambda: [one() for one in plain]}, "8 AdamW loops")


def tiny_simulations() -> None:
    """64 workers of 1,386 parameters, and 8 runs of 8: beside the step by hand, with `vmap`, leaf by leaf."""
    from torch.func import functional_call, grad_and_value, vmap

    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4), nn.Linear(4, 1), nn.Flatten(0))
    params, buffers, loss_fn = df.functional(net, mse_loss)
    batch = torch.randn(64, 8, 16), torch.randn(64, 8)
    gradient = vmap(grad_and_value(lambda p, x, y: mse_loss(functional_call(net, p, (x,)), y)))

    def by_hand(n: int) -> Callable[[], Any]:
        x = {name: p.expand(64, *p.shape).contiguous() for name, p in params.items()}
        left = torch.arange(64).view(-1, n).roll(1, 1).view(-1)

        def one() -> Any:
            nonlocal x
            g, loss = gradient(x, *batch)
            norm = torch.stack([v.flatten(1).square().sum(1) for v in g.values()]).sum(0).sqrt()
            x = {k: 0.5 * v + 0.5 * v[left] - 0.01 * g[k] for k, v in x.items()}
            return loss, norm

        return one

    def ours(n: int) -> Callable[[], Any]:
        init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.01), df.topology("one-peer-exp", n))
        state, step, ts, given = df.stack(init(params, buffers), n), df.simulate(step, n), itertools.count(), batch
        if n < 64:
            state, step = df.stack_runs([state] * (64 // n)), df.sweep(step, 64 // n)
            given = tuple(x.unflatten(0, (64 // n, n)) for x in batch)
        return lambda: step(state, given, next(ts))

    print_rows({"`df.simulate`, 64 tiny, eager": ours(64), "by hand, `vmap`": by_hand(64)}, "by hand, `vmap`")
    print_rows({"`df.sweep`, 8 x 8 tiny, eager": ours(8), "by hand, `vmap`": by_hand(8)}, "by hand, `vmap`")


def evaluations() -> None:
    block = partial(nn.TransformerEncoderLayer, 64, 4, 128, 0.0, batch_first=True, norm_first=True)
    deep = nn.Sequential(nn.Linear(16, 64), *[block() for _ in range(12)], nn.Linear(64, 1))
    for name, module, shape in (("12 layers", deep, (8, 16, 16)), ("50k", network("50k"), (32, 64))):
        batches = [(torch.randn(shape), torch.randn(*shape[:-1], 1)) for _ in range(20)]
        params, buffers, loss_fn = df.functional(module, mse_loss)
        init, _ = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1))

        def plain(module: nn.Module = module, batches: Any = batches) -> float:
            module.eval()
            with torch.no_grad():
                total = sum(mse_loss(module(x), y) * len(x) for x, y in batches)
            module.train()
            return float(total)

        ours = partial(df.evaluate, loss_fn, init(params, buffers), batches)
        print_rows({f"`df.evaluate`, {name}, 20 batches": ours, "plain loop": plain}, "plain loop")
        replicas = partial(df.evaluate_replicas, loss_fn, df.stack(init(params, buffers), 4), batches)
        calls: dict[str, Any] = {f"`df.evaluate_replicas`, {name}, 4 replicas": replicas}
        calls["4 loops"] = lambda plain=plain: [plain() for _ in range(4)]
        print_rows(calls, "4 loops")


def epochs() -> None:
    data = TensorDataset(torch.randn(50_000, 64), torch.randint(0, 10, (50_000,)))
    shards, fixed = df.data.shards(50_000, 1, 32), df.data.fixed_shards([torch.arange(50_000)], 32)

    def read(loader: Callable[[], DataLoader[Any]]) -> Callable[[], int]:
        return lambda: sum(1 for _ in loader())

    def ours(dealt: Any, dataset: Any = data) -> Callable[[], int]:
        sampler = partial(df.data.batch_sampler, dealt, 0, steps=shards.steps_per_epoch)
        return read(lambda: DataLoader(dataset, batch_sampler=sampler()))

    calls = {
        "an epoch of 50,000 samples, `shards`": ours(shards),
        "`fixed_shards`": ours(fixed),
        "`seeded`": ours(shards, df.data.seeded(data)),
        "DataLoader": read(lambda: DataLoader(data, batch_size=32, shuffle=True, drop_last=True)),
    }
    print_rows(calls, "DataLoader")


def restoring() -> None:
    import hashlib

    init, _ = df.adapt_then_combine(lambda p, b: p["w"].sum(), df.adam(0.1), df.topology("complete", 1))
    state = init({"w": torch.randn(10_000_000)})
    with tempfile.TemporaryDirectory() as folder:
        df.checkpoint.save(folder, state, 0)
        file = max(Path(folder).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        calls = {
            "`df.checkpoint.restore`, 120 MB": partial(df.checkpoint.restore, folder, state),
            "reading and hashing": lambda: hashlib.sha256(file.read_bytes()).digest(),
        }
        print_rows(calls, "reading and hashing")


def memory() -> None:
    """Peak of a step beside what was there before, the state among it, in copies of the parameters."""
    kinds = {"eager": lambda step: step, "`df.donate`": df.donate, "compiled": df.compile}
    for kind, transform in kinds.items():
        step = our_step("10M", df.adamw(1e-3), transform)
        for _ in range(3):
            step()
        copies = peak_of(step) / sum(4 * p.numel() for p in network("10M").parameters())
        print(f"| memory that a step of Adam adds to its state, 10M, {kind} | {copies:.1f} copies | | |", flush=True)


def simulated() -> None:
    """A simulated, compiled step beside the same in PyTorch, compiled, leaf by leaf: time, and peak beside the state."""
    from torch.func import functional_call, grad_and_value, vmap

    n, net = 64, nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    params, buffers, loss_fn = df.functional(net, nn.functional.cross_entropy)
    batch, peers = (torch.randn(n, 32, 64), torch.randint(10, (n, 32))), torch.arange(n) ^ 1
    left, right = (torch.arange(n) + 1) % n, (torch.arange(n) - 1) % n
    gradient = vmap(grad_and_value(lambda p, x, y: nn.functional.cross_entropy(functional_call(net, p, (x,)), y)))
    x = {name: p.expand(n, *p.shape).contiguous() for name, p in params.items()}
    flat = torch.cat([p.flatten(1) for p in x.values()], 1)

    def metrics(g: Any, loss: Any) -> Any:
        return loss, torch.stack([v.flatten(1).square().sum(1) for v in g.values()]).sum(0).sqrt()

    def d_psgd(state: Any) -> Any:
        (x,), (g, loss) = state, gradient(state[0], *batch)
        return ({k: 0.5 * x[k] + 0.5 * x[k][peers] - 0.01 * g[k] for k in x},), metrics(g, loss)

    def tracking(state: Any) -> Any:
        x, y, old = state
        g, loss = gradient(x, *batch)
        y = {k: 0.5 * y[k] + 0.5 * y[k][peers] + g[k] - old[k] for k in x}
        return ({k: 0.5 * x[k] + 0.5 * x[k][peers] - 0.01 * y[k] for k in x}, y, g), metrics(g, loss)

    def inner(state: Any) -> Any:
        x, m = state
        g, loss = gradient(x, *batch)
        m = {k: 0.9 * m[k] + g[k] for k in x}
        return ({k: x[k] - 0.01 * m[k] for k in x}, m), metrics(g, loss)

    def choco(state: Any) -> Any:
        x, public, pull = state
        leaves = x.split([p.numel() for p in params.values()], 1)
        g, loss = gradient({k: v.view(n, *params[k].shape) for k, v in zip(params, leaves, strict=True)}, *batch)
        x = x - 0.01 * torch.cat([v.flatten(1) for v in g.values()], 1)
        places = (x - public).abs().topk(x.shape[1] // 100, 1)[1]
        q = torch.zeros_like(x).scatter_(1, places, (x - public).gather(1, places))
        pull = pull + (q[left] + q[right] - 2 * q) / 3
        return (x + 0.3 * pull, public + q, pull), metrics(g, loss)

    def by_hand(step: Any, *state: Any) -> Callable[[], Any]:
        compiled = torch.compile(step, fullgraph=True)

        def one() -> None:
            nonlocal state
            state, _ = compiled(state)

        return one

    def ours(algorithm: Any, optimizer: Any, topology: str, **more: Any) -> Callable[[], Any]:
        init, step = algorithm(loss_fn, optimizer, df.topology(topology, n), **more)
        state, step, t = df.stack(init(params, buffers), n), df.compile(df.simulate(step, n)), 0

        def one() -> None:
            nonlocal state, t
            state, _ = step(state, batch, t)
            t += 1

        return one

    top_k, rows = df.compressors.top_k(0.01), {}
    rows["D-PSGD"] = (
        ours(df.adapt_while_communicate, df.sgd(0.01), "one-peer-exp"),
        by_hand(d_psgd, x),
    )
    rows["gradient tracking"] = (
        ours(df.gradient_tracking, df.sgd(0.01), "one-peer-exp", form="awc"),
        by_hand(tracking, x, x, x),
    )
    rows["DiLoCo, inner step"] = (
        ours(df.diloco, df.sgd(0.01, momentum=0.9), "complete", inner_steps=10_000),
        by_hand(inner, x, x),
    )
    rows["CHOCO, `top_k`"] = (
        ours(df.choco_sgd, df.sgd(0.01), "static-ring", compressor=top_k, gamma=0.3),
        by_hand(choco, flat, flat, flat),
    )
    for name, (mine, theirs) in rows.items():
        print_rows(
            {f"`df.simulate`, {name}, 64 workers, compiled": mine, "by hand, compiled": theirs}, "by hand, compiled"
        )
        a, b = (peak_of(step) / (4 * flat.numel()) for step in (mine, theirs))
        print(f"| peak beside the state, {name} | {a:.2f} copies | {b:.2f} copies | {a / b:.2f} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    df.init()
    print("| call | here, ms | plain PyTorch, ms | ratio |\n|---|---:|---:|---:|")
    for size in WIDTHS:
        steps(size)
    for part in (
        batches,
        distances,
        logs,
        evaluations,
        simulations,
        tiny_simulations,
        epochs,
        restoring,
        states,
        joining,
        memory,
    ):
        part()


if __name__ == "__main__":
    main()
