"""Steps in the lab beside what `df.plan` and `df.clock` say: `python -m tests.plan_against_lab [NETWORK ...]`.

In each network of hosts (`decentfn lab`), gloo ranks measure the links as `decentfn links` does, and the computation of
each setting without messages, then its steps. What a compressed method computes depends on what it receives, so its
computation is what its own steps take without the seconds that `df.profiling.communication` counts as waiting.
The plan and the clock know the file of the links, and that computation.
Computation is eight layers that sleep, a third of the time in the forward pass, so two cores are enough for four hosts.
A compressor does not sleep, so there are only two hosts for it, with a core each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from decentfn.cli.links import links
from decentfn.compressors import sign, top_k
from decentfn.planning import Cluster
from decentfn.planning.methods import Work, _buckets
from decentfn.timing import Exchange

N, LAYERS = int(os.environ.get("WORLD_SIZE", "4")), 8
COMPLETE = df.topology("complete", N)
NEVER = df.topologies.every(200, df.topology("static-ring", N))


class Setting(NamedTuple):
    """A way to train.

    make: `(loss, topology) -> algorithm`, None for DDP; on `topology`, as exchanged in every `every`-th step.
    mb: of the parameters, float32. seconds: of sleep per step, of each host. sent: share of these bytes that a message has.
    exchange: of the clock, beside topology and bytes. plan: method of the plan's row, and what it is told.
    """

    name: str
    is_held_out: bool
    make: Callable[[Any, Any], Any] | None
    topology: str
    mb: float
    seconds: float | list[float]
    sent: float = 1.0
    exchange: dict[str, Any] = {}
    plan: tuple[str, dict[str, Any]] | None = None
    period: int = 2
    periods: int = 10
    is_compressed: bool = False


def gossip(**options):
    return lambda loss, topology: df.adapt_while_communicate(loss, df.sgd(0.01), topology, **options)


def outer(name, **options):
    return lambda loss, topology: getattr(df, name)(loss, df.sgd(0.01), COMPLETE, **options)


def compressed(name, compressor, gamma):
    return lambda loss, topology: getattr(df, name)(loss, df.sgd(0.01), topology, compressor=compressor, gamma=gamma)


def all_reduced(loss, topology):
    return df.all_reduce(loss, df.sgd(0.01), topology)


def pushed(loss, topology):
    return df.asynchronous_gradient_push(loss, df.sgd(0.01), topology)


AWC, DDP = ("adapt_while_communicate", {}), ("DDP", {})
NARROW, AFTER, ALONE = {"wire_dtype": torch.bfloat16}, {"begins": 1.0}, {"is_awaited": False}
# A CHOCO worker adds its own message to its public copy while it travels: 12 and 6 % of a step's computation in a profile.
ADDED_SIGNS, ADDED_ENTRIES = {"begins": 0.88}, {"begins": 0.94}


NETWORKS = {
    "100 Mbit/s, 5 ms": (
        ["-n", "4", "--mbit", "100", "--delay-ms", "5"],
        [
            Setting("D-PSGD", False, gossip(), "ring", 4, 0.1, plan=AWC),
            Setting("all-reduce", True, all_reduced, "complete", 4, 0.2, 1, AFTER),
            Setting("D-PSGD, bf16 wire", False, gossip(**NARROW), "base", 8, 0.1, 0.5, {}, (AWC[0], NARROW)),
        ],
    ),
    "1,000 Mbit/s": (
        ["-n", "4", "--mbit", "1000"],
        [
            Setting("DDP", False, None, "complete", 16, 0.2, 1, AFTER, DDP),
            Setting("DDP", True, None, "complete", 60, 0.4, 1, AFTER, DDP),
            Setting("D-PSGD", True, gossip(), "static-exp", 4, 0.5, plan=AWC),
            Setting("D-PSGD, one slow", False, gossip(), "one-peer-exp", 4, [0.1, 0.1, 0.1, 0.3]),
            Setting("asynchronous, one slow", True, pushed, "one-peer-exp-directed", 4, [0.1, 0.1, 0.1, 0.3], 1, ALONE),
        ],
    ),
    "60 Mbit/s, 15 ms": (
        ["-n", "4", "--mbit", "60", "--delay-ms", "15"],
        [
            Setting("DDP", False, None, "complete", 2, 0.1, 1, AFTER, DDP),
            Setting("D-PSGD", True, gossip(), "hypercube", 1.5, 0.12, plan=AWC),
            Setting("D-PSGD", True, gossip(), "one-peer-exp-directed", 3, 0.2, plan=AWC),
        ],
    ),
    "20 Mbit/s, 40 ms": (
        ["-n", "4", "--mbit", "20", "--delay-ms", "40"],
        [
            Setting(
                "DiLoCo, H = 10",
                False,
                outer("diloco", inner_steps=10),
                "complete",
                2,
                0.1,
                1,
                AFTER,
                ("diloco", {"inner_steps": 10}),
                10,
                4,
            ),
            Setting(
                "streaming DiLoCo, H = 10, 2 parts",
                True,
                outer("streaming_diloco", inner_steps=10, num_fragments=2),
                "complete",
                2,
                0.1,
                0.5,
                {"every": 5},
                None,
                10,
                4,
            ),
            Setting("D-PSGD, bf16 wire", True, gossip(**NARROW), "ring", 1, 0.1, 0.5, {}, (AWC[0], NARROW)),
        ],
    ),
    "200 Mbit/s, one 50; 1 ms, one 20": (
        ["-n", "4", "--mbit", "200", "200", "200", "50", "--delay-ms", "1", "1", "1", "20"],
        [
            Setting("D-PSGD", False, gossip(), "ring", 4, 0.1, plan=AWC),
            Setting("D-PSGD", True, gossip(), "one-peer-exp", 4, 0.1, plan=AWC),
            Setting("all-reduce", True, all_reduced, "complete", 4, 0.2, 1, AFTER),
            Setting(
                "asynchronous",
                False,
                pushed,
                "one-peer-exp-directed",
                2,
                0.2,
                1,
                ALONE,
                ("asynchronous_gradient_push", {}),
            ),
        ],
    ),
    "500 Mbit/s, 10 ms": (
        ["-n", "4", "--mbit", "500", "--delay-ms", "10"],
        [Setting("D-PSGD", False, gossip(), "one-peer-exp", 16, 0.2, plan=AWC)],
    ),
    "300 Mbit/s, 3 ms": (
        ["-n", "4", "--mbit", "300", "--delay-ms", "3"],
        [
            Setting("D-PSGD", True, gossip(), "static-ring", 6, 0.15, plan=AWC),
            Setting("D-PSGD, compute-bound", True, gossip(), "ring", 1, 0.3, plan=AWC),
            Setting("DDP", True, None, "complete", 12, 0.2, 1, AFTER, DDP),
            Setting("DDP", True, None, "complete", 40, 0.3, 1, AFTER, DDP),
        ],
    ),
    "150 Mbit/s, one 60; 8 ms, one 25": (
        ["-n", "4", "--mbit", "150", "60", "150", "150", "--delay-ms", "8", "8", "25", "8"],
        [
            Setting("D-PSGD", True, gossip(), "base", 2, 0.1, plan=AWC),
            Setting("D-PSGD, bf16 wire", True, gossip(**NARROW), "static-exp", 3, 0.05, 0.5, {}, (AWC[0], NARROW)),
            Setting(
                "DiLoCo, H = 5",
                True,
                outer("diloco", inner_steps=5),
                "complete",
                3,
                0.1,
                1,
                AFTER,
                ("diloco", {"inner_steps": 5}),
                5,
                4,
            ),
        ],
    ),
    "two hosts, 100 Mbit/s, 5 ms": (
        ["-n", "2", "--mbit", "100", "--delay-ms", "5"],
        [
            Setting(
                "deep_squeeze, top_k(0.05)",
                True,
                compressed("deep_squeeze", top_k(0.05), 0.5),
                "one-peer-exp",
                16,
                0.1,
                0.1,
                AFTER,
                ("deep_squeeze", {"sent": 0.1}),
                is_compressed=True,
            ),
            Setting(
                "CHOCO-SGD, sign",
                False,
                compressed("choco_sgd", sign(), 0.3),
                "static-ring",
                16,
                0.1,
                1 / 32,
                ADDED_SIGNS,
                is_compressed=True,
            ),
        ],
    ),
    "two hosts, 300 Mbit/s, 3 ms": (
        ["-n", "2", "--mbit", "300", "--delay-ms", "3"],
        [
            Setting(
                "CHOCO-SGD, top_k(0.02)",
                True,
                compressed("choco_sgd", top_k(0.02), 0.3),
                "static-exp",
                12,
                0.1,
                0.04,
                ADDED_ENTRIES,
                is_compressed=True,
            ),
        ],
    ),
    "two hosts, 150 Mbit/s, one 60; 8 ms, one 25": (
        ["-n", "2", "--mbit", "150", "60", "--delay-ms", "8", "25"],
        [
            Setting(
                "deep_squeeze, sign",
                True,
                compressed("deep_squeeze", sign(), 0.5),
                "static-ring",
                8,
                0.1,
                1 / 32,
                AFTER,
                ("deep_squeeze", {"sent": 1 / 32}),
                is_compressed=True,
            ),
        ],
    ),
}


class Layer(torch.autograd.Function):
    """x + the mean of w; sleeps in both passes."""

    @staticmethod
    def forward(ctx, x, w, seconds):
        ctx.seconds, ctx.n = seconds, w.numel()
        time.sleep(seconds / 3 / LAYERS)
        return x + w[0]

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(ctx.seconds * 2 / 3 / LAYERS)
        return grads[0], grads[0].expand(ctx.n), None


class Layers(nn.Module):
    def __init__(self, mb, seconds):
        super().__init__()
        self.w = nn.ParameterList(torch.zeros(round(mb * 1e6 / 4 / LAYERS)) for _ in range(LAYERS))
        self.seconds = seconds

    def forward(self, x):
        for w in self.w:
            x = Layer.apply(x, w, self.seconds)
        return x


def stepper(setting, seconds, topology):
    module = Layers(setting.mb, seconds)
    if setting.make is None:
        ddp = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.01)

        def ddp_step(t):
            optimizer.zero_grad()
            if topology is None:
                with ddp.no_sync():
                    ddp(torch.ones(())).backward()
            else:
                ddp(torch.ones(())).backward()
            optimizer.step()

        return ddp_step, lambda: None

    @df.autograd
    def loss(params, batch):
        x = batch
        for w in params:
            x = Layer.apply(x, w, seconds)
        return x

    init, step = (setting.make if topology else gossip())(loss, topology or NEVER)
    state = init([p.detach().clone() for p in module.w])

    def take(t):
        nonlocal state
        state, _ = step(state, torch.ones(()), t)

    return take, lambda: df.settle(state) if topology and setting.exchange == ALONE else None


def timed(setting, seconds, topology, period, periods):
    """Seconds per step of this rank, and those in which it does not wait."""
    step, end = stepper(setting, seconds, topology)
    dist.barrier()
    with df.profiling.communication() as counted:
        times, waited = [time.perf_counter()], [0.0]
        for t in range(period * (periods + 1)):
            step(t)
            times.append(time.perf_counter())
            waited.append(counted.seconds_waited)
    dist.barrier()
    end()
    computing = [now - its for now, its in zip(times, waited, strict=True)]
    return per_step(times, period), per_step(computing, period)


def per_step(times, period):
    """Seconds per step from the times when steps end, beginning with the start: the median of periods, after one."""
    ends = [t for t in times if not np.isnan(t)][::period]
    return median(b - a for a, b in zip(ends[1:], ends[2:], strict=False)) / period


def predictions(setting, path, seconds):
    """Of the plan, where it has such a row, and of the clock."""
    topology, every = df.topology(setting.topology, N), setting.exchange.get("every", 1)
    cluster, nbytes = Cluster.measured(path), setting.mb * 1e6
    planned = None
    if setting.plan:
        method, told = setting.plan
        on = None if method not in (AWC[0], "deep_squeeze") else [topology]
        rows = df.plan(cluster, round(nbytes / 4), compute_seconds=median(seconds), topologies=on, **told).predictions
        planned = next(row.seconds for row in rows if row.method == method)
    every = setting.period if setting.name.startswith("DiLoCo") else every
    on = df.topologies.every(every, topology) if every > 1 else topology
    how = {name: x for name, x in setting.exchange.items() if name != "every"}
    steps = setting.period * (setting.periods + 1)
    sends: list[tuple[float, dict[str, Any]]] = [(nbytes * setting.sent, how)]
    if setting.make is None:  # DDP's first bucket of 1 MiB leaves first, and the others when they are full
        buckets = _buckets(Work(round(nbytes / 4), median(seconds), 4, 4))
        sends = [(nbytes * share, {"begins": begins, "parts": parts}) for begins, share, parts in buckets]
    clock = df.clock(seconds, Cluster.measured(path))
    lines = [clock.timeline(Exchange(on, sent, **options), steps) for sent, options in sends]
    fast = [i for i in range(N) if seconds[i] < 1.5 * min(seconds)] if how == ALONE else list(range(N))
    of_each = [np.mean([per_step([0.0, *line.end[:, i]], setting.period) for i in fast]) for line in lines]
    return planned, float(max(of_each)), fast


def of_each_rank(setting, is_alone, periods):
    """Seconds per step of all ranks, without messages or with them, and those in which a rank does not wait."""
    rank, everyone = dist.get_rank(), [(0.0, 0.0)] * N
    seconds = setting.seconds[rank] if isinstance(setting.seconds, list) else setting.seconds
    topology = None if is_alone else df.topology(setting.topology, N)
    dist.all_gather_object(everyone, timed(setting, seconds, topology, setting.period, periods))
    return map(list, zip(*everyone, strict=True))


def on_ranks(network, folder):
    path = Path(folder, "links.json")
    links(out=path)
    here = df.init()
    dist.barrier()
    for setting in NETWORKS[network][1]:
        alone = [] if setting.is_compressed else next(of_each_rank(setting, True, 5))
        taken, computing = of_each_rank(setting, False, setting.periods)
        if here.rank == 0:
            alone = alone or computing
            planned, clocked, fast = predictions(setting, path, alone)
            row = {"network": network, "setting": f"{setting.name}, {setting.topology}, {setting.mb} MB"}
            row |= {"held out": setting.is_held_out, "compute": median(alone), "plan": planned, "clock": clocked}
            row |= {"measured": sum(taken[i] for i in fast) / len(fast), "sleep": setting.seconds}
            say(row)


def say(row):
    def against(x):
        return "-" if x is None else f"{x * 1e3:.0f} ({x / row['measured']:.2f})"

    numbers = (
        f"{row['compute'] * 1e3:.0f} | {row['measured'] * 1e3:.0f} | {against(row['plan'])} | {against(row['clock'])}"
    )
    print(f"| {row['network']} | {row['setting']}{' *' if row['held out'] else ''} | {numbers} |", flush=True)


def main(names):
    print(
        "| network | setting (*: not used to build the model) | compute, ms | measured | plan | clock |\n|" + "---|" * 6
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NETWORKS:
            lab = [sys.executable, "-m", "decentfn", "lab", *NETWORKS[name][0], "--"]
            subprocess.run([*lab, sys.executable, "-m", "tests.plan_against_lab", "--ranks", name, folder], check=True)


if __name__ == "__main__":
    on_ranks(*sys.argv[2:]) if sys.argv[1:2] == ["--ranks"] else main(sys.argv[1:])
