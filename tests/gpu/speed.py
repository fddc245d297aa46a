"""Times and memory on a GPU: what `examples/benchmark.py` measures there, the goals, and the tables for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

import decentfn as df

PLAIN = "alone:mode=eager alone:mode=compiled"
TRACED = "decentfn decentfn:mode=donated"
AUTOGRAD = "decentfn:gradient=autograd decentfn:gradient=regions decentfn:mode=donated,gradient=autograd"
STEP = "--workers 1 --no-floors --blocks 7 --seconds 0.3 --peers"
SIMULATOR = "--simulator --blocks 7 --seconds 0.2"
NARROW = "wire=bfloat16"
FLOORS = f"floor:kind=compute floor:kind=exchange floor:kind=exchange,{NARROW}"
RANKS = (
    f"--workload gpt --batch-size 64 --no-floors --blocks 5 --seconds 0.3 --against decent-dp --peers {FLOORS} alone:mode=eager "
    f"decentfn decentfn:gradient=autograd decentfn:gradient=autograd,{NARROW} "
    "decentfn:gradient=autograd,algorithm=deep_squeeze,compressor=top_k(0.01),gamma=0.1 "
    "decentfn:gradient=autograd,algorithm=diloco,inner_steps=8 "
    "decent-dp ddp:view=True ddp:mode=compiled,view=True ddp:view=True,hook=bf16 periodic:every=8"
)
HOSTS = (
    "--workload gpt --batch-size 64 --ranks-per-host 2 --no-floors --blocks 5 --seconds 0.3 --against hsdp --peers "
    f"{FLOORS} decentfn:inside=sharded decentfn:inside=sharded,{NARROW} hsdp hsdp:{NARROW} fsdp2"
)
HIDING = {
    "decentfn": ("floor:kind=compute", "floor:kind=exchange"),
    "decentfn:gradient=autograd": ("alone:mode=eager", "floor:kind=exchange"),
    f"decentfn:gradient=autograd,{NARROW}": ("alone:mode=eager", f"floor:kind=exchange,{NARROW}"),
    "decentfn:inside=sharded": ("floor:kind=compute", "floor:kind=exchange"),
    f"decentfn:inside=sharded,{NARROW}": ("floor:kind=compute", f"floor:kind=exchange,{NARROW}"),
}
"""Peers whose messages travel during the gradient: what computes as they do and sends nothing, and the messages alone."""
PARAMETERS = 124_475_904
"""Of gpt124m."""


class Part(NamedTuple):
    """A run of `examples/benchmark.py`."""

    arguments: str
    seconds: float
    """Time that it takes on a card, a guess."""
    ranks: int = 0
    """Ranks that share the card; 0: one process."""


PARTS = {
    "gpt124m": Part(f"--workload gpt124m {STEP} {PLAIN} {TRACED} {AUTOGRAD}", 110),
    "simulator-64": Part(f"{SIMULATOR} --workload tiny --workers 64", 45),
    "ranks-2": Part(RANKS, 110, ranks=2),
    "hosts": Part(HOSTS, 60, ranks=4),
    "mlp": Part(f"--workload mlp --batch-size 256 {STEP} {PLAIN} {TRACED} {AUTOGRAD}", 45),
    "ranks-4": Part(RANKS, 110, ranks=4),
    "tiny": Part(f"--workload tiny {STEP} {PLAIN} {TRACED} {AUTOGRAD}", 35),
    "simulator-16-gpt": Part(f"{SIMULATOR} --workload gpt --workers 16", 60),
    "simulator-1024": Part(f"{SIMULATOR} --workload tiny --workers 1024", 30),
    "resnet18": Part(f"--workload resnet18 {STEP} {PLAIN} {TRACED} {AUTOGRAD}", 90),
    "lstm": Part(f"--workload lstm {STEP} {PLAIN} {AUTOGRAD}", 35),  # not traceable
}
"""By name, the most important first."""


class Goal(NamedTuple):
    """A measured ratio and its limit."""

    what: str
    value: float
    limit: float
    is_least: bool = False
    """The value should be at least the limit; otherwise, at most."""

    def __str__(self) -> str:
        is_met = self.value >= self.limit if self.is_least else self.value <= self.limit
        side = "at least" if self.is_least else "at most"
        return f"| {self.what} | {self.value:.2f} | {side} {self.limit:g} | {'reached' if is_met else 'MISSED'} |"


def rows_of(result: Any) -> dict[str, Any]:
    """Rows of the peers that ran, by peer."""
    return {row["peer"]: row for row in result.get("rows", []) if "step_s" in row}


def over(row: Any, other: Any) -> float:
    """The median ratio of blocks that ran side by side."""
    return median(a / b for a, b in zip(row["blocks_s"], other["blocks_s"], strict=True))


def hidden(step: float, compute: float, exchange: float) -> float:
    """Return the share of the shorter of compute and exchange that the other hides."""
    return (compute + exchange - step) / min(compute, exchange)


def goals(measured: dict[str, Any]) -> Iterator[Goal]:
    """Compare what was measured with issue 41's goals; what is lacking has no line."""
    for name, result in measured.items():
        rows = rows_of(result)
        if {"alone:mode=eager", "alone:mode=compiled"} <= rows.keys():
            yield from _of_step(name, rows)
        for peer, (compute, exchange) in HIDING.items():
            if {peer, compute, exchange} <= rows.keys():
                seconds = (rows[of]["step_s"]["median"] for of in (peer, compute, exchange))
                yield Goal(f"{name}, {peer}: hidden share of the shorter", hidden(*seconds), 0.9, is_least=True)
        for case in result.get("cases", []):
            seconds, what = case["seconds"], f"{case['workers']} workers, {case['network']}"
            ways = [seconds[way] for way in ("stacked", "stacked, replayed") if way in seconds]
            if case["workers"] == 64:
                yield Goal(f"{what}: step / one worker's", min(ways) / seconds["one worker"], 3)
                if "stacked, replayed" in seconds:
                    faster = seconds["stacked"] / seconds["stacked, replayed"]
                    yield Goal(f"{what}: times faster with CUDA graphs", faster, 5, is_least=True)


def _of_step(name: str, rows: dict[str, Any]) -> Iterator[Goal]:
    eager, compiled = rows["alone:mode=eager"], rows["alone:mode=compiled"]
    traced, autograd, regions = (rows.get(f"decentfn{way}") for way in ("", ":gradient=autograd", ":gradient=regions"))
    first = max(compiled["first_s"])
    if name == "gpt124m":
        if traced:
            yield Goal(f"{name}, traced: time / torch.compile's", over(traced, compiled), 0.85)
        if traced and compiled["gpu_bytes"]:
            memory = traced["gpu_bytes"] / compiled["gpu_bytes"]
            yield Goal(f"{name}, traced: memory / torch.compile's", memory, 0.7)
        if regions:
            yield Goal(f"{name}, regions: time / torch.compile's", over(regions, compiled), 1.03)
    if traced:
        yield Goal(f"{name}, traced: first step / torch.compile's", max(traced["first_s"]) / first, 1.3)
    if autograd:
        yield Goal(f"{name}, by autograd: first step / torch.compile's", max(autograd["first_s"]) / first, 0.5)
    for way, row in {"traced": traced, "by autograd": autograd, "regions": regions}.items():
        if row:
            yield Goal(f"{name}, {way}: time / plain eager", over(row, eager), 1.0)


def tables(measured: dict[str, Any]) -> str:
    """Everything measured, as Markdown."""
    lines = ["| part | way | ms per step | / first row | GPU MB | first step, s |", "|---|---|---:|---:|---:|---:|"]
    for name, result in measured.items():
        if "failure" in result:
            lines.append(f"| {name} | {result['failure']} | | | | |")
        for row in result.get("rows", []):
            if "step_s" not in row:
                lines.append(f"| {name} | {row['peer']} | {row['failure']} | | | |")
                continue
            ratio = over(row, next(iter(rows_of(result).values())))
            memory = f"{row['gpu_bytes'] / 1e6:.0f}" if row["gpu_bytes"] else ""
            first, ms = max(row["first_s"]), 1e3 * row["step_s"]["median"]
            lines.append(f"| {name} | {row['peer']} | {ms:.4g} | {ratio:.2f} | {memory} | {first:.1f} |")
        for case in result.get("cases", []):
            for way, seconds in case["seconds"].items():
                ratio = seconds / case["seconds"]["one worker"]
                lines.append(f"| {name} | {way} | {1e3 * seconds:.4g} | {ratio:.2f} | | |")
    met = [str(goal) for goal in goals(measured)]
    head = ["", "| goal | measured | limit | |", "|---|---:|---:|---|"]
    return "\n".join([*lines, *(head + met if met else []), *_at_25_gbit(measured)])


def _at_25_gbit(measured: dict[str, Any]) -> Iterator[str]:
    """A step of gpt124m behind links of 25 Gbit/s, by `df.plan`, from the measured steps without messages."""
    rows = rows_of(measured.get("gpt124m", {}))
    own, theirs = (rows.get(peer, {}).get("step_s", {}).get("median") for peer in ("decentfn", "alone:mode=compiled"))
    if own is None or theirs is None:
        return
    yield from ["", "| gpt124m at 25 Gbit/s, planned | workers | ms per step |", "|---|---:|---:|"]
    for n in (2, 4):
        cluster = df.planning.Cluster(n, between=df.planning.Link(gbit_per_s=25))
        kinds: dict[str, tuple[float, str, dict[str, Any]]] = {
            "decentfn, traced": (own, "adapt_while_communicate", {}),
            "decentfn, bfloat16 wire": (own, "adapt_while_communicate", {"wire_dtype": torch.bfloat16}),
            "decentfn, top_k(0.01)": (own, "deep_squeeze", {"sent": 0.02}),
            "DiLoCo, every 8 steps": (own, "diloco", {"inner_steps": 8}),
            "DDP, compiled": (theirs, "DDP", {}),
            "DDP, compiled, bfloat16": (theirs, "DDP", {"wire_dtype": torch.bfloat16}),
        }
        for kind, (compute, method, options) in kinds.items():
            schedule = [df.topology("one-peer-exp", n)]
            made = df.plan(cluster, PARAMETERS, compute_seconds=compute, topologies=schedule, **options)
            seconds = next(p.seconds for p in made.predictions if p.method == method)
            yield f"| {kind} | {n} | {1e3 * seconds:.1f} |"
