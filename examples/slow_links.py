"""A language model on four hosts with slow links: held-out bits per byte against time and bytes, for this library and its peers.

    python examples/slow_links.py                               every method, two seeds; what the folder holds is not run again
    python examples/slow_links.py --methods "DDP, bf16" GASLoC --seeds 0 --steps 50 --out runs/try
    python examples/slow_links.py --methods DiLoCo GASLoC --slower 4 --out runs/uneven_links
    python examples/slow_links.py --tune 1e-3 2e-3 4e-3         DDP's held-out bits per byte for these peaks, simulated
    python examples/slow_links.py --only-report                 the table and the picture of the folder, nothing else

Each host is a network namespace behind a link of --mbit Mbit/s (`decentfn lab`). All methods start from the
same parameters, draw the same batches, and use AdamW with the same schedule over their --steps and a peak that was tuned
for DDP. Those with rare messages, and so short steps, take more of them (STEPS). The clock stops while the mean over workers is
evaluated, and starts after the first step, which compiles all graphs.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from benchmarking import launching, measure
from benchmarking.peers import rounded_to_bf16
from byte_transformer import Transformer, Windows, read_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader

import decentfn as df

SEQ_LEN, DIM, LAYERS, HEADS, BATCH = 128, 192, 4, 4, 2
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.99)


class Method(NamedTuple):
    """A way to train."""

    step: Callable[[tuple[Tensor, Tensor], int], Any]
    mean: Callable[[], dict[str, Tensor]]
    """The workers' mean, with which the model is evaluated; collective."""


def model() -> Transformer:
    return Transformer(SEQ_LEN, DIM, LAYERS, HEADS)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def scale_at(count: int, warmup: int, steps: int) -> float:
    """Return the learning rate over its peak, as `df.schedules.warmup_cosine`."""
    if count < warmup:
        return count / warmup
    return 0.5 * (1 + math.cos(math.pi * (count - warmup) / (steps - warmup)))


def adamw(params: Any, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, learning_rate, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def averaged(x: Tensor) -> Tensor:
    """Return the mean over ranks, computed in float64; collective."""
    total = x.detach().double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(x.dtype)


def optimizer(learning_rate: float, warmup: int, steps: int) -> df.Transform:
    schedule = df.schedules.warmup_cosine(learning_rate, warmup, steps)
    return df.adamw(schedule, b1=BETAS[0], b2=BETAS[1], weight_decay=WEIGHT_DECAY)


def muon(learning_rate: float, warmup: int, steps: int) -> df.Transform:
    """Muon for the blocks' matrices, with three iterations, which cost less than the gradient; AdamW for the rest."""
    schedule = df.schedules.warmup_cosine(10 * learning_rate, warmup, steps)
    matrices = df.transforms.muon(schedule, weight_decay=WEIGHT_DECAY, steps=3)
    others = optimizer(learning_rate, warmup, steps)
    return df.transforms.partition(
        {True: matrices, False: others}, lambda name, shape: "blocks" in name and len(shape) == 2
    )


def module_mean(module: nn.Module) -> dict[str, Tensor]:
    return {name: averaged(x) for name, x in module.named_parameters()}


def ddp(hook: str, learning_rate: float, warmup: int, steps: int) -> Method:
    """PyTorch's DistributedDataParallel, gradients in bfloat16 or compressed by PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    module = model()
    # PowerSGD's messages of two buckets would meet in another order on another rank: one bucket.
    bucket_mb = None if hook == "bf16" else 100
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if hook == "bf16":
        wrapped.register_comm_hook(None, rounded_to_bf16)
    else:
        start = max(2, warmup)  # its authors' advice: not during the warm-up
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
    return _loop(wrapped, module, adamw(module.parameters(), learning_rate), warmup, steps)


def _loop(wrapped: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> Method:
    forward = torch.compile(wrapped)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(scale_at, warmup=warmup, steps=steps))

    def step(batch: tuple[Tensor, Tensor], t: int) -> None:
        loss_of(forward(batch[0]), batch[1]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return Method(step, partial(module_mean, module))


def decent_dp(learning_rate: float, warmup: int, steps: int) -> Method:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    module = model()
    wrapped = DecentralizedDataParallel(
        torch.compile(module),
        lambda named: adamw([p for _, p in named], learning_rate),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, partial(scale_at, warmup=warmup, steps=steps)),
        topology="one-peer-exp",
        _local_world_size=1,
    )

    def step(batch: tuple[Tensor, Tensor], t: int) -> None:
        loss_of(wrapped(batch[0]), batch[1]).backward()

    def mean() -> dict[str, Tensor]:
        for work in wrapped._comm_ops:
            if work is not None:
                work.wait()
        return module_mean(module)

    return Method(step, mean)


def ours(
    algorithm: Any,
    topology: str,
    learning_rate: float,
    warmup: int,
    steps: int,
    every: int = 1,
    inner: Callable[..., df.Transform] = optimizer,
    peak: float = 1.0,
    **hyperparameters: Any,
) -> Method:
    params, _, loss_fn = df.functional(model(), loss_of)
    schedule = df.topologies.every(every, df.topology(topology, df.init().num_workers))
    init, step = algorithm(loss_fn, inner(peak * learning_rate, warmup, steps), schedule, **hyperparameters)
    step, held = df.compile(step), [init(params)]

    def take(batch: tuple[Tensor, Tensor], t: int) -> None:
        if t == 0:  # steps with messages and steps without are two graphs: compile both
            for other in (1, hyperparameters.get("inner_steps", 1) - 1):
                step(init(params), batch, other)
        held[0], _ = step(held[0], batch, t)

    return Method(take, lambda: df.consensus_mean(held[0]))


METHODS: dict[str, Callable[..., Method]] = {
    "DDP, bf16": partial(ddp, "bf16"),
    "DDP, PowerSGD": partial(ddp, "powersgd"),
    "Decent-DP": decent_dp,
    "one-peer gossip": partial(ours, df.adapt_while_communicate, "one-peer-exp"),
    "one-peer gossip, bf16": partial(ours, df.adapt_while_communicate, "one-peer-exp", wire_dtype=torch.bfloat16),
    "one-peer gossip every 4 steps, bf16": partial(
        ours, df.adapt_while_communicate, "one-peer-exp", every=4, wire_dtype=torch.bfloat16
    ),
    "CHOCO, 8 bits": partial(ours, df.choco_sgd, "static-exp", compressor=df.compressors.quantize(8), gamma=0.7),
    "DiLoCo": partial(ours, df.diloco, "complete", inner_steps=16),
    "DiLoCo, 4 bits": partial(
        ours, df.diloco, "complete", inner_steps=16, compressor=df.compressors.quantize(4), error_decay=0.95
    ),
    "MuLoCo, 2 bits": partial(
        ours,
        df.diloco,
        "complete",
        inner_steps=8,
        inner=muon,
        peak=2.0,
        outer_learning_rate=1.0,
        outer_momentum=0.0,
        compressor=df.compressors.quantize(2),
        error_decay=0.95,
    ),
    "SPARTA": partial(ours, df.sparta, "complete"),
    "SPARTA and DiLoCo": partial(ours, df.diloco, "complete", inner_steps=16, fraction=0.005),
    "K-GT": partial(ours, df.k_gt, "static-exp", inner_steps=16),
    "all-reduce, Muon, bf16": partial(ours, df.all_reduce, "complete", inner=muon, peak=2.0, wire_dtype=torch.bfloat16),
    "streaming DiLoCo": partial(
        ours, df.streaming_diloco, "complete", inner_steps=16, num_fragments=4, wire_dtype=torch.bfloat16
    ),
    "GASLoC": partial(
        ours,
        df.gasloc,
        "random-matching",
        inner_steps=16,
        wire_dtype=torch.bfloat16,
        outer_learning_rate=0.7,  # DiLoCo's, as its momentum
        outer_momentum=0.9,
        gossip_step=0.25,
    ),
    "Factored Gossip DiLoCo": partial(
        ours, df.factored_gossip_diloco, "random-matching", inner_steps=16, wire_dtype=torch.bfloat16
    ),
}


STEPS: dict[str, float] = {
    "one-peer gossip every 4 steps, bf16": 2,
    "DiLoCo": 2,
    "DiLoCo, 4 bits": 2,
    "MuLoCo, 2 bits": 0.64,
    "SPARTA": 2,
    "SPARTA and DiLoCo": 2,
    "K-GT": 2,
    "all-reduce, Muon, bf16": 0.64,
    "streaming DiLoCo": 2,
    "GASLoC": 2,
    "Factored Gossip DiLoCo": 2,
}
"""Steps of a method in units of --steps, if not 1: with rare messages, twice the steps take less time than DDP's."""


def batches(seed: int, rank: int, size: int, steps: int, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    pieces = Windows(text, SEQ_LEN)
    shards = df.data.shards(len(pieces), size, BATCH, seed)
    return iter(DataLoader(pieces, batch_sampler=df.data.batch_sampler(shards, [rank], 0, steps=steps)))


def train(method: str, seed: int, steps: int, learning_rate: float, evaluations: int) -> list[dict[str, float]]:
    """Train on this rank, and return (step, seconds, bytes sent by a host, bits per byte) where the mean was evaluated."""
    world = df.init()
    torch.manual_seed(seed)
    text, held_out_text, _ = read_corpus()
    chosen = METHODS[method](learning_rate=learning_rate, warmup=max(1, steps // 10), steps=steps)
    held_out = Windows(held_out_text, SEQ_LEN)
    picked = torch.linspace(0, len(held_out) - 1, 256).long().unique()[world.rank :: world.size]
    inputs, targets = (torch.stack(half) for half in zip(*(held_out[int(i)] for i in picked), strict=True))
    judge, interface = model(), measure.Interface()
    curve, seconds, sent = [], 0.0, 0.0
    wanted = {round(steps * i / evaluations) - 1 for i in range(1, evaluations + 1)}
    started, before = time.perf_counter(), interface.sent() or 0.0
    for t, (x, y) in enumerate(batches(seed, world.rank, world.size, steps, text)):
        chosen.step((x, y), t)
        if t == 0:
            dist.barrier()
            started, before = time.perf_counter(), interface.sent() or 0.0
        if t in wanted:
            dist.barrier()
            seconds += time.perf_counter() - started
            sent += (interface.sent() or 0.0) - before
            judge.load_state_dict(chosen.mean())
            with torch.no_grad():
                nats = averaged(loss_of(judge(inputs), targets))
            curve.append({"step": t + 1, "s": seconds, "bytes": sent, "bits_per_byte": float(nats) / math.log(2)})
            dist.barrier()
            started, before = time.perf_counter(), interface.sent() or 0.0
    return curve


def tune(rates: tuple[float, ...], steps: int, hosts: int) -> None:
    """Print the held-out bits per byte of a simulated all-reduce, which computes what DDP does, for each peak."""
    text, held_out_text, _ = read_corpus()
    held_out = Windows(held_out_text, SEQ_LEN)
    picked = torch.linspace(0, len(held_out) - 1, 256).long().unique()
    inputs, targets = (torch.stack(half) for half in zip(*(held_out[int(i)] for i in picked), strict=True))
    for rate in rates:
        torch.manual_seed(2)  # neither of the seeds that are compared
        params, _, loss_fn = df.functional(model(), loss_of)
        init, step = df.all_reduce(loss_fn, optimizer(rate, max(1, steps // 10), steps), df.topology("complete", hosts))
        state, step = df.stack(init(params), hosts), df.compile(df.simulate(step, hosts))
        readers = [batches(2, worker, hosts, steps, text) for worker in range(hosts)]
        for t, rows in enumerate(zip(*readers, strict=True)):
            state, _ = step(state, tuple(torch.stack(half) for half in zip(*rows, strict=True)), t)
        nats = df.evaluate(loss_fn, state, [(inputs, targets)])
        print(f"{rate:g}: {float(nats) / math.log(2):.3f}", flush=True)


def report(folder: Path) -> None:
    """Print a row for each run, and draw the picture if there are runs."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise SystemExit(f"{folder}: no run is there yet.")
    ends = {(run["method"], run["seed"]): run["curve"][-1] for run in runs}
    print(
        f"{'method':38}{'seed':>5}{'steps':>7}{'bits/byte':>11}{'to DDP':>8}{'s':>8}{'MB sent':>9}{'sooner than DDP':>17}"
    )
    for run in runs:
        end, peer = run["curve"][-1], ends.get(("DDP, bf16", run["seed"]))
        row = f"{run['method']:38}{run['seed']:5}{end['step']:7}{end['bits_per_byte']:11.3f}"
        if peer:
            row += f"{end['bits_per_byte'] / peer['bits_per_byte'] - 1:8.1%}"
            there = first_below(run["curve"], peer["bits_per_byte"] * 1.005)
        row += f"{end['s']:8.1f}{end['bytes'] / 1e6:9.1f}"
        print(row + (f"{peer['s'] / there['s']:17.2f}" if peer and there else f"{'-':>17}"))
    draw(runs).savefig(folder / "slow_links.png", dpi=150)


def first_below(curve: list[dict[str, float]], bits: float) -> dict[str, float] | None:
    return next((point for point in curve if point["bits_per_byte"] <= bits), None)


def draw(runs: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    names = [name for name in METHODS if any(run["method"] == name for run in runs)]
    for axes, (key, unit, scale) in zip(
        figure.subplots(1, 2, sharey=True), [("s", "seconds", 1), ("bytes", "MB sent by a host", 1e6)], strict=True
    ):
        for run in runs:
            points = run["curve"]
            color = f"C{names.index(run['method'])}"
            axes.plot(
                [point[key] / scale for point in points],
                [point["bits_per_byte"] for point in points],
                color=color,
                alpha=0.9,
                label=f"{run['method']}, {points[-1]['step']} steps" if run["seed"] == 0 else None,
            )
        axes.set_xlabel(unit)
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out bits per byte")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right center")
    return figure


def main(
    methods: tuple[str, ...] = tuple(METHODS),
    seeds: tuple[int, ...] = (0, 1),
    steps: int = 250,
    learning_rate: float = 1e-3,
    evaluations: int = 10,
    hosts: int = 4,
    mbit: float = 100,
    slower: float = 1.0,
    out: Path = Path("runs/slow_links"),
    only_report: bool = False,
    tune_rates: Annotated[tuple[float, ...], tyro.conf.arg(name="tune")] = (),
) -> None:
    """Run what the folder does not hold yet, and report.

    Args:
        methods: names of METHODS.
        seeds: of the start and of the data.
        steps: of DDP; others take a multiple (STEPS).
        learning_rate: the peak.
        evaluations: points of a curve.
        hosts: each of one rank.
        mbit: rate of a host's link; 0: no limit, on this machine's loopback device.
        slower: how many times slower the last host's link is.
        out: folder of the results, one file for each run.
        only_report: run nothing.
        tune_rates: peaks to try for DDP, in this process.
    """
    if "BENCHMARK_RESULT" in os.environ:  # a rank
        torch.set_num_threads(1)
        curve = train(methods[0], seeds[0], steps, learning_rate, evaluations)
        if df.init().rank == 0:
            Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(curve))
        return
    if tune_rates:
        return tune(tune_rates, steps, hosts)
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise SystemExit(f"--methods {unknown[0]}: choose among {'; '.join(METHODS)}.")
    out.mkdir(parents=True, exist_ok=True)
    for seed in () if only_report else seeds:
        for method in methods:
            its_steps = round(STEPS.get(method, 1) * steps)
            path = out / f"{method.replace(', ', '-').replace(' ', '-')}-{its_steps}-{seed}.json"
            if path.exists():
                continue
            options = ["--methods", method, "--seeds", str(seed), "--steps", str(its_steps)]
            options += ["--learning-rate", str(learning_rate), "--evaluations", str(evaluations)]
            curve = launching.launch(__file__, options, hosts, mbit=mbit or None, slower=slower)
            facts = {
                "method": method,
                "seed": seed,
                "mbit": mbit,
                "slower": slower,
                "learning_rate": learning_rate,
                **measure.machine(),
            }
            path.write_text(json.dumps(facts | {"curve": curve}))
            print(f"{method}, seed {seed}: {curve[-1]}", flush=True)
    report(out)


if __name__ == "__main__":
    tyro.cli(main)
