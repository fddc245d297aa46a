"""Many workers in one process: the cost of stacking, compared with alternatives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import decentfn as df
from benchmarking import launching
from benchmarking.report import columns
from benchmarking.workloads import LEARNING_RATE, MLP, Workload, workload

BUCKET_MB = 0.02
"""Nothing travels, so that small buckets cost nothing, and gradients are not copied together."""

MOMENTUM = 0.9
REPLAYED = {"mode": "reduce-overhead"}
LOOPED = 64
"""So many workers at most step in a Python loop."""

Sizes = tuple[int, ...]
Timed = Callable[[], Any]


def network(sizes: Sizes, batch_size: int, device: str) -> Workload:
    """A multilayer perceptron on random classes."""
    like = workload("tiny")

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(n, sizes[0], generator=generator), torch.randint(sizes[-1], (n,), generator=generator)

    return Workload("-".join(map(str, sizes)), lambda: MLP(*sizes), draw, like.criterion, batch_size, device)


def optimizer(momentum: float) -> df.Transform:
    return df.sgd(LEARNING_RATE, momentum=momentum) if momentum else df.sgd(LEARNING_RATE)


def algorithm(
    net: Workload, topology: df.Topology, momentum: float, gradient: str = "traced"
) -> tuple[df.Algorithm, dict[str, Tensor]]:
    module = net.module()
    params = {name: p.detach() for name, p in module.named_parameters()}
    loss_fn = net.loss_fn(module)
    loss_fn = df.autograd(loss_fn) if gradient == "autograd" else loss_fn
    return df.adapt_while_communicate(loss_fn, optimizer(momentum), topology, bucket_mb=BUCKET_MB), params


def stacked(net: Workload, workers: int, momentum: float = MOMENTUM, *, gradient: str = "traced", **how: Any) -> Timed:
    """One call steps all workers, compiled as `how` says."""
    topology = df.topology("one-peer-exp", num_workers=workers)
    (init, step), params = algorithm(net, topology, momentum, gradient)
    step, state = df.compile(df.simulate(step, workers), **how), df.stack(init(params), workers)
    batches = [tuple(torch.stack(part) for part in zip(*some, strict=True)) for some in _batches(net, workers)]
    return _stepper(step, state, batches)


def alone(net: Workload, momentum: float = MOMENTUM) -> Timed:
    """One worker."""
    (init, step), params = algorithm(net, df.topology("complete", num_workers=1), momentum)
    return _stepper(df.compile(step), init(params), [some[0] for some in _batches(net, 1)])


def one_large_batch(net: Workload, workers: int, momentum: float = MOMENTUM) -> Timed:
    """One worker whose batch is as large as all of theirs."""
    return alone(replace(net, batch_size=net.batch_size * workers), momentum)


def loop(net: Workload, workers: int, momentum: float = MOMENTUM, *, mixing: bool = False) -> Timed:
    """A Python loop over single compiled steps, one per worker, and without or with averaging pairs by hand."""
    (init, step), params = algorithm(net, df.topology("complete", num_workers=1), momentum)
    compiled, batches, states = df.compile(step), _batches(net, workers), [init(params) for _ in range(workers)]
    steppers = [_stepper(compiled, state, [some[i] for some in batches]) for i, state in enumerate(states)]
    between = [torch.empty_like(bucket) for bucket in states[0].params]
    t = [0]

    def run() -> None:
        for stepper in steppers:
            stepper()
        distance = 1 << t[0] % (workers.bit_length() - 1)
        t[0] += 1
        for i in range(workers) if mixing else ():
            if i < i ^ distance:
                for mean, a, b in zip(between, states[i].params, states[i ^ distance].params, strict=True):
                    torch.lerp(a, b, 0.5, out=mean)
                    a.copy_(mean), b.copy_(mean)

    return run


def processes(workers: int, script: str) -> float:
    """Seconds per step of as many processes as workers, each with the `tiny` workload (64-128-10, batch 32)."""
    passed = ["--workload", "tiny", "--no-floors", "--peers", "decentfn", "--blocks", "3", "--steps", "5"]
    launching.launch(script, passed, 2)  # fills the cache of compiled code
    return launching.launch(script, passed, workers)["rows"][0]["step_s"]["median"]


def _batches(net: Workload, workers: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        inputs, targets = net.draw(net.batch_size, generator)
        return inputs.to(net.device), targets.to(net.device)

    return [[draw() for _ in range(workers)] for _ in range(4)]


def _stepper(step: Any, state: Any, batches: list[Any]) -> Timed:
    held, t = [state], [0]

    def run() -> None:
        held[0], _ = step(held[0], batches[t[0] % len(batches)], t[0])
        t[0] += 1

    return run


def timed(run: Timed, calls: int) -> float:
    """Seconds of these calls, until their kernels have ended."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Timed], *, blocks: int, seconds: float) -> dict[str, float]:
    """Median seconds per call, the runs taking turns."""
    lengths = {}
    for name, run in runs.items():
        timed(run, 2)
        lengths[name] = max(1, int(seconds / max(timed(run, 1), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            times[name].append(timed(run, lengths[name]) / lengths[name])
    return {name: statistics.median(values) for name, values in times.items()}


def compare(script: str, *, blocks: int, seconds: float, device: str, small: bool = False) -> dict[str, Any]:
    """All cases of the simulator; `small` shrinks the numbers of workers for trying out."""
    many, most = (8, 32) if small else (64, 1024)
    cases = [((64, 128, 10), 0.0), ((64, 128, 10), 0.9), ((256, 512, 512, 10), 0.0), ((256, 512, 512, 10), 0.9)]
    found: dict[str, Any] = {"cases": []}
    for sizes, momentum in cases:
        this = (network(sizes, 32, device), many, momentum)
        runs = {
            "stacked": stacked(*this),
            "stacked, not donated": stacked(*this, donate=False),
            "one large batch": one_large_batch(*this),
            "loop of steps": loop(*this),
            "loop and mixing": loop(*this, mixing=True),
        }
        if device == "cuda":
            runs["stacked, replayed"] = stacked(*this, **REPLAYED)
        times = interleaved(runs, blocks=blocks, seconds=seconds)
        name = "-".join(map(str, sizes)) + (", momentum" if momentum else "")
        found["cases"].append({"network": name, "workers": many, "batch": 32, "seconds": times})
    counts = [n for n in (64, 256, 1024) if n <= most] or [most]
    net = network((8, 16, 4), 8, device)
    tiny = {str(n): stacked(net, n) for n in counts}
    if device == "cuda":
        tiny |= {f"{n}, replayed": stacked(net, n, **REPLAYED) for n in counts}
    found["tiny"] = interleaved(tiny, blocks=blocks, seconds=seconds)
    if device == "cpu":
        found["processes"] = {"workers": many, "seconds": processes(many, script)}
    return found


def one(net: Workload, workers: int, *, blocks: int, seconds: float) -> dict[str, Any]:
    """One network: many workers in each way, beside one."""
    runs = {
        "one worker": alone(net),
        "one large batch": one_large_batch(net, workers),
        "stacked": stacked(net, workers),
    }
    if net.device == "cuda":
        runs["stacked, replayed"] = stacked(net, workers, **REPLAYED)
    if workers <= LOOPED:
        runs["stacked, by autograd"] = stacked(net, workers, gradient="autograd")
        runs["loop of steps"] = loop(net, workers)
    times = interleaved(runs, blocks=blocks, seconds=seconds)
    return {"cases": [{"network": net.name, "workers": workers, "batch": net.batch_size, "seconds": times}]}


def table(found: dict[str, Any]) -> str:
    if "tiny" not in found:
        (case,) = found["cases"]
        lines = [(f"{case['workers']} workers, {case['network']}", "ms per step", "/one worker", "/stacked")]
        seconds = case["seconds"]
        for name, s in seconds.items():
            ratios = [f"{s / seconds[other]:.2f}" for other in ("one worker", "stacked")]
            lines.append((name, f"{1e3 * s:.4g}", *ratios))
        return "\n".join(columns(lines))
    lines = [("network, ms per step of all workers", *found["cases"][0]["seconds"])]
    ratios = [("ratios", "large batch / stacked", "stacked / loop", "stacked / loop and mixing")]
    for case in found["cases"]:
        s = case["seconds"]
        best = min(s["stacked"], s["stacked, not donated"])
        lines.append((case["network"], *(f"{1e3 * seconds:.4g}" for seconds in s.values())))
        over = [s["one large batch"] / best, best / s["loop of steps"], best / s["loop and mixing"]]
        ratios.append((case["network"], *(f"{ratio:.2f}" for ratio in over)))
    tiny = [("8-16-4, workers", "ms per step", "µs per worker")]
    tiny += [(n, f"{1e3 * s:.4g}", f"{1e6 * s / int(n.split(',')[0]):.3f}") for n, s in found["tiny"].items()]
    printed = "\n".join([*columns(lines), "", *columns(ratios), "", *columns(tiny)])
    if "processes" not in found:
        return printed
    apart, together = found["processes"]["seconds"], found["cases"][0]["seconds"]["stacked"]
    last = f"{found['processes']['workers']} processes: {1e3 * apart:.4g} ms per step, {apart / together:.1f} times stacked"
    return f"{printed}\n\n{last}"
