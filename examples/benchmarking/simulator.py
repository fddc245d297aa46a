"""Many workers in one process: what stacking costs beside what else one could do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import decentfn as df
from benchmarking.report import columns
from benchmarking.workloads import LEARNING_RATE, Workload, mlp, workload

Sizes = tuple[int, ...]
Timed = Callable[[], Any]


def network(sizes: Sizes, batch_size: int) -> Workload:
    """A multilayer perceptron on random classes."""
    like = workload("tiny")

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(n, sizes[0], generator=generator), torch.randint(sizes[-1], (n,), generator=generator)

    return Workload("-".join(map(str, sizes)), lambda: mlp(*sizes), draw, like.criterion, batch_size)


def algorithm(net: Workload, topology: df.Topology, **options: Any) -> tuple[df.Algorithm, dict[str, Tensor]]:
    module = net.module()
    params = {name: p.detach() for name, p in module.named_parameters()}
    optimizer = df.sgd(LEARNING_RATE, momentum=0.9)
    return df.adapt_while_communicate(net.loss_fn(module), optimizer, topology, **options), params


def stacked(sizes: Sizes, workers: int, batch_size: int, topology: str = "one-peer-exp", **options: Any) -> Timed:
    """One call steps all workers."""
    net = network(sizes, batch_size)
    (init, step), params = algorithm(net, df.topology(topology, num_workers=workers), **options)
    step, state = df.compile(df.simulate(step, workers)), df.stack(init(params), workers)
    batches = [tuple(torch.stack(part) for part in zip(*some, strict=True)) for some in _batches(net, workers)]
    return _stepper(step, state, batches)


def one_large_batch(sizes: Sizes, workers: int, batch_size: int) -> Timed:
    """One worker whose batch is as large as all of theirs."""
    net = network(sizes, batch_size * workers)
    (init, step), params = algorithm(net, df.topology("complete", num_workers=1))
    return _stepper(df.compile(step), init(params), [some[0] for some in _batches(net, 1)])


def loop(sizes: Sizes, workers: int, batch_size: int) -> Timed:
    """A Python loop over single compiled steps, one per worker, that do not communicate."""
    net = network(sizes, batch_size)
    (init, step), params = algorithm(net, df.topology("complete", num_workers=1))
    compiled, batches = df.compile(step), _batches(net, workers)
    steppers = [_stepper(compiled, init(params), [some[i] for some in batches]) for i in range(workers)]

    def run() -> None:
        for stepper in steppers:
            stepper()

    return run


def _batches(net: Workload, workers: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return [[net.draw(net.batch_size, generator) for _ in range(workers)] for _ in range(4)]


def _stepper(step: Any, state: Any, batches: list[Any]) -> Timed:
    held, t = [state], [0]

    def run() -> None:
        held[0], _ = step(held[0], batches[t[0] % len(batches)], t[0])
        t[0] += 1

    return run


def interleaved(runs: dict[str, Timed], *, blocks: int, seconds: float) -> dict[str, float]:
    """Median seconds per call, the runs taking turns."""
    lengths = {}
    for name, run in runs.items():
        run()
        run()
        start = time.perf_counter()
        run()
        lengths[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(lengths[name]):
                run()
            times[name].append((time.perf_counter() - start) / lengths[name])
    return {name: statistics.median(values) for name, values in times.items()}


def compare(*, blocks: int, seconds: float, small: bool = False) -> dict[str, Any]:
    """All cases of the simulator; `small` shrinks the numbers of workers for trying out."""
    many, most = (8, 32) if small else (64, 1024)
    cases = [
        ("64-128-10", (64, 128, 10), many, 32),
        ("256-512-512-10", (256, 512, 512, 10), 4 if small else 64, 32),
    ]
    found: dict[str, Any] = {"cases": []}
    for name, sizes, workers, batch_size in cases:
        times = interleaved(
            {
                "stacked": stacked(sizes, workers, batch_size),
                "one large batch": one_large_batch(sizes, workers, batch_size),
                "loop of steps": loop(sizes, workers, batch_size),
            },
            blocks=blocks,
            seconds=seconds,
        )
        found["cases"].append({"network": name, "workers": workers, "batch": batch_size, "seconds": times})
    tiny = (8, 16, 4)
    counts = [n for n in (64, 256, 1024) if n <= most] or [most]
    runs = {str(n): stacked(tiny, n, 8) for n in counts}
    found["tiny"] = interleaved(runs, blocks=blocks, seconds=seconds)
    return found


def table(found: dict[str, Any]) -> str:
    lines = [("network, workers", "stacked ms", "large batch ms", "throughput of it", "loop ms", "over the loop")]
    for case in found["cases"]:
        s = case["seconds"]
        ratios = [s["one large batch"] / s["stacked"], s["stacked"] / s["loop of steps"]]
        ms = [1e3 * s[key] for key in ("stacked", "one large batch", "loop of steps")]
        cells = (f"{ms[0]:.4g}", f"{ms[1]:.4g}", f"{ratios[0]:.2f}", f"{ms[2]:.4g}", f"{ratios[1]:.2f}")
        lines.append((f"{case['network']}, {case['workers']}", *cells))
    tiny = [("8-16-4, workers", "ms per step", "µs per worker")]
    tiny += [(n, f"{1e3 * s:.4g}", f"{1e6 * s / int(n):.3f}") for n, s in found["tiny"].items()]
    return "\n".join([*columns(lines), "", *columns(tiny)])
