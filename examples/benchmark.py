"""Cost of a step: decentfn, DDP, Decent-DP, FSDP2, periodic averaging, and no communication.

    python examples/benchmark.py --workload mlp                             2 ranks of this machine
    python examples/benchmark.py --workload gpt --workers 4 --link-mbit 1000     behind rate-limited links
    python examples/benchmark.py --workload gpt --workers 4 --link-mbit 100 --ranks-per-host 2    a worker is a host
    torchrun --nnodes 2 --nproc-per-node 1 ... examples/benchmark.py        on real hosts
    python examples/benchmark.py --memory | --compile-times | --scaling 1 2 4 | --overhead | --simulator | --checkpoints
    python examples/benchmark.py --simulator --workload tiny --workers 64     these workers in one process

All peers run in one launch, in alternating blocks that end when all messages have arrived (A B A B ...), so their ratios
are reliable on a noisy machine. If a peer cannot run, it is named and the exit code is 1. Floors, written by hand without
any library, are measured too: compute alone, exchange alone (bare receives and sends), and both overlapped. `df.init()`
lets glibc keep freed memory, which helps all peers of the process equally.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarking import launching, measure, peers, report, saving, simulator
from benchmarking.workloads import WORKLOADS, workload
from command_line import start

SCRIPT = str(Path(__file__).resolve())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, help="default: mlp; of the simulator, several multilayer perceptrons")
    add("--small", action="store_true", help="a hundredth of the size, for trying out")
    add("--batch-size", type=int, help="per rank; default: the workload's own")
    add(
        "--peers",
        nargs="+",
        metavar="SPEC",
        help=" ".join((peers.build.__doc__ or "").split()),
    )
    add("--against", nargs="+", metavar="SPEC", help="peers or floors over which ratios are taken; a name: its fastest")
    add("--no-floors", action="store_true", help="only the peers named")
    add(
        "--workers",
        type=int,
        help="to start here; default: 2, and 64 for the simulator (torchrun's number of ranks counts)",
    )
    add("--ranks-per-host", type=int, default=1, help="of which a worker is made; between them no link is slow")
    add("--link-mbit", type=float, help="each worker in a network namespace behind a link of this rate (decentfn lab)")
    add("--blocks", type=int, default=9)
    add("--seconds", type=float, default=2.0, help="about as long is a block")
    add("--steps", type=int, help="steps in a block, in place of --seconds")
    add("--device", choices=["cpu", "cuda"], help="default: GPUs, where every rank has one")
    add("--backend", choices=["gloo", "nccl"], help="default: NCCL on GPUs, gloo on the CPU")
    add("--threads", type=int, help="of torch; default: 1 per rank, and all cores for the simulator")
    add("--memory", action="store_true", help="peak memory per rank, each peer in processes of its own")
    add("--compile-times", action="store_true", help="first step with an empty and with a filled cache")
    add("--scaling", type=int, nargs="+", metavar="N", help="strong and weak scaling over these numbers of workers")
    add("--overhead", action="store_true", help="tiny model, one worker: microseconds over the step by hand")
    add("--simulator", action="store_true", help="many workers in one process")
    add(
        "--checkpoints",
        action="store_true",
        help="what a save adds to --steps steps (50), and how long a restore takes",
    )
    add("--folder", help="where the checkpoints are written; default: the system's for temporary files")
    add("--json", metavar="FILE")
    add("--plot", metavar="FILE")
    add("--single", help=argparse.SUPPRESS)  # one peer in a process of its own, for --memory and --compile-times
    return parser


def checked(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments; what cannot work is said before any process starts."""
    args = parser.parse_args(argv)
    names = ("batch_size", "workers", "ranks_per_host", "blocks", "steps", "threads")
    numbers = [(name, getattr(args, name)) for name in names]
    for name, value in numbers + [("scaling", n) for n in args.scaling or ()]:
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: it is at least 1.")
    for name, value in (("seconds", args.seconds), ("link-mbit", args.link_mbit)):
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name} {value:g}: it is positive and finite.")
    if args.ranks_per_host > 1 and (args.overhead or args.simulator or args.checkpoints):
        parser.error(
            f"--ranks-per-host {args.ranks_per_host}: --overhead, --simulator and --checkpoints are of one rank each."
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; leave the option out for the CPU.")
    if (args.device, args.backend) in (("cpu", "nccl"), ("cuda", "gloo")):
        parser.error(f"--device {args.device} --backend {args.backend}: NCCL moves what is on GPUs, gloo what is not.")
    args.workers = args.workers or (64 if args.simulator else 2)
    args.workload = args.workload or (None if args.simulator else "mlp")
    args.peers = args.peers or list(peers.PEERS if args.ranks_per_host == 1 else peers.PEERS_OF_HOSTS)
    for spec in args.peers:
        if spec.partition(":")[0] not in peers.BUILDERS:
            parser.error(f"--peers {spec}: known are {', '.join(peers.BUILDERS)}.")
    compared = compared_peers(args, args.workers)
    for spec in args.against or ():
        if not any(report.is_named(spec, peer) for peer in compared):
            parser.error(f"--against {spec}: it is none of the peers compared, {', '.join(compared)}.")
    return args


def compared_peers(args: argparse.Namespace, workers: int) -> list[str]:
    return args.peers if args.no_floors else peers.with_floors(args.peers, workers)


def as_rank(args: argparse.Namespace) -> None:
    """One rank's part, under torchrun or under our own launcher."""
    try:
        world = start(args.device, args.backend, processes_per_worker=args.ranks_per_host)
    except ValueError as error:
        raise SystemExit(f"benchmark: --ranks-per-host {args.ranks_per_host}: {error}") from None
    chosen = workload(args.workload, small=args.small, batch_size=args.batch_size, device=world.device.type)
    if args.single:
        result = measure.memory(args.single, chosen, world.rank, world.size, steps=8)
    elif args.checkpoints:
        blocks = {"blocks": args.blocks, "steps": args.steps or 50, "folder": args.folder}
        result = saving.measure(chosen, world.rank, world.size, **blocks)
    elif args.memory or args.compile_times or args.scaling:
        raise SystemExit("--memory, --compile-times and --scaling start processes of their own: run without torchrun.")
    else:
        specs = compared_peers(args, world.num_workers)
        times = {"blocks": args.blocks, "seconds": args.seconds, "steps": args.steps}
        result = measure.compare(specs, chosen, world.rank, world.size, **times)
        against = args.against or ["decent-dp" if args.ranks_per_host == 1 else "hsdp"]
        result = report.add_ratios(result, args.link_mbit, against)
    if world.rank == 0:
        if "BENCHMARK_RESULT" in os.environ:
            Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(result))
        else:
            show(args, result, summary(args, result))


def summary(args: argparse.Namespace, result: Any) -> str:
    return saving.table(result) if args.checkpoints else report.table(result)


def show(args: argparse.Namespace, result: Any, text: str) -> None:
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    if args.plot and isinstance(result, dict) and "rows" in result:
        report.plot(result, args.plot)
    elif args.plot and args.scaling:
        report.plot_scaling(result, args.plot)
    failed = report.failures(result)
    if failed:
        raise SystemExit(f"benchmark: could not run {'; '.join(failed)}.")


def single(args: argparse.Namespace, spec: str, **environment: str) -> Any:
    """One peer in processes of its own."""
    return launch(args, [*forwarded(args), "--single", spec], args.workers, **environment)


def launch(args: argparse.Namespace, passed: list[str], workers: int, **environment: str) -> Any:
    return launching.launch(
        SCRIPT, passed, workers, ranks_per_host=args.ranks_per_host, mbit=args.link_mbit, **environment
    )


def forwarded(args: argparse.Namespace) -> list[str]:
    passed = ["--workload", args.workload, "--blocks", str(args.blocks), "--seconds", str(args.seconds)]
    passed += ["--small"] if args.small else []
    passed += ["--no-floors"] if args.no_floors else []
    passed += ["--checkpoints"] if args.checkpoints else []
    for name in ("batch_size", "ranks_per_host", "steps", "threads", "link_mbit", "folder", "device", "backend"):
        if getattr(args, name) is not None:
            passed += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return passed


def memory(args: argparse.Namespace) -> None:
    rows = []
    for spec in args.peers:
        single(args, spec)  # fills the cache: a compiler at work is no part of the peak
        rows.append(single(args, spec))
        print(f"  {spec}: {max(rows[-1]['added_bytes']) / 1e6:.1f} MB {rows[-1]['failure'] or ''}", flush=True)
    show(args, rows, report.memory_table(rows))


def compile_times(args: argparse.Namespace) -> None:
    rows = []
    for spec in args.peers:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (single(args, spec, TORCHINDUCTOR_CACHE_DIR=folder) for _ in range(2))
        rows.append({"peer": spec, "cold": cold, "warm": warm})
    show(args, rows, report.compile_table(rows))


def scaling(args: argparse.Namespace) -> None:
    own = args.batch_size or workload(args.workload, small=args.small).batch_size
    runs = []
    for n in args.scaling:
        for kind in ("weak", "strong"):
            if kind == "strong" and own % n:
                print(f"  strong scaling on {n} workers left out: the batch of {own} does not divide")
                continue
            batch = own if kind == "weak" else own // n
            passed = [*forwarded(args), "--no-floors", "--batch-size", str(batch), "--peers", *args.peers]
            run = launch(args, passed, n)
            runs.append(run | {"scaling": kind, "batch_size": batch})
    show(args, runs, report.scaling_table(runs))


def overhead(args: argparse.Namespace) -> None:
    """On one worker nothing travels, so that what lies over the step by hand is the library's."""
    args.workload, args.no_floors, args.workers, args.peers = "tiny", False, 1, ["decentfn"]
    result = compare(args)
    found = {row["peer"]: 1e6 * row["step_s"]["median"] for row in result["rows"]}
    ours, by_hand = found["decentfn"], found["floor:kind=compute"]
    text = f"decentfn {ours:.0f} µs = the same step compiled by hand {by_hand:.0f} + the library's {ours - by_hand:.0f}"
    show(args, result, report.table(result) + "\n" + text)


def compare(args: argparse.Namespace) -> Any:
    against = ["--against", *args.against] if args.against else []
    return launch(args, [*forwarded(args), "--peers", *args.peers, *against], args.workers)


def main(argv: list[str] | None = None) -> None:
    args = checked(arguments(), argv)
    if args.threads or not args.simulator:
        torch.set_num_threads(args.threads or 1)
    torch.set_flush_denormal(True)  # Adam's moments decay into denormal numbers, which are ten times slower
    if "RANK" in os.environ:
        as_rank(args)
    elif args.simulator:
        device, times = start(args.device, args.backend).device.type, {"blocks": args.blocks, "seconds": args.seconds}
        if args.workload is None:
            found = simulator.compare(SCRIPT, device=device, small=args.small, **times)
        else:
            net = workload(args.workload, small=args.small, batch_size=args.batch_size, device=device)
            found = simulator.one(net, args.workers, **times)
        show(args, found | {"machine": measure.machine()}, simulator.table(found))
    elif args.memory:
        memory(args)
    elif args.compile_times:
        compile_times(args)
    elif args.scaling:
        scaling(args)
    elif args.overhead:
        overhead(args)
    else:
        result = compare(args)
        show(args, result, summary(args, result))


if __name__ == "__main__":
    main(sys.argv[1:])
