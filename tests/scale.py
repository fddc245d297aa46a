"""Figures of runs with many workers: `python -m tests.scale [1024 4096 10000]` prints the table of docs/scale.md.

Certificates and tables are those of the named topologies. The simulator trains a least-squares model of 64 parameters.
A checkpoint is that of the simulated workers, in one process. Ranks are threads of this process, over gloo.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import decentfn as df
from decentfn.testing.ranks import on_ranks

TOPOLOGIES = ("base", "static-exp", "random-matching", "hierarchical", "complete")
RANKS = (8, 32)
"""Ranks, as threads of this process, whose start-up is timed."""


def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function(*arguments, **options)
    return time.perf_counter() - started, result


def made(name: str, n: int) -> df.Topology:
    return df.topology(name, n, **({"local_world_size": 8} if name == "hierarchical" else {}))


def table_bytes(topology: df.Topology) -> int:
    tables = (topology.sources, topology.weights, topology.groups, topology.mean_weights)
    return sum(table.nbytes for table in tables if table is not None)


def simulated(n: int, steps: int = 5) -> tuple[float, df.State]:
    """Seconds of a step after the first, and the state."""
    init, step = df.adapt_while_communicate(
        lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1, momentum=0.9), df.topology("base", n)
    )
    state, step, batch = df.stack(init(torch.zeros(64)), n), df.simulate(step, n), torch.ones(n, 64)
    state, _ = step(state, batch, 0)

    def train(state: df.State) -> df.State:
        for t in range(1, 1 + steps):
            state, _ = step(state, batch, t)
        return state

    seconds, state = timed(train, state)
    return seconds / steps, state


def figures(n: int) -> list[tuple[str, str]]:
    found = []
    for name in TOPOLOGIES:
        seconds, topology = timed(made, name, n)
        measured, facts = timed(df.topologies.certificate, topology)
        size = f"{table_bytes(topology) / 1e6:.1f} MB of tables"
        period = f"period {facts.period}" if facts.period else "random"
        found.append((f"{name}, {period}", f"{seconds:.1f} s, certificate {measured:.1f} s, {size}"))
    seconds, state = simulated(n)
    found.append(("simulated step, 64 parameters", f"{1e3 * seconds:.1f} ms"))
    with tempfile.TemporaryDirectory() as directory:
        saved, _ = timed(df.checkpoint.save, directory, state, 1)
        restored, _ = timed(df.checkpoint.restore, directory, state)
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
    found.append(("checkpoint", f"{len(files)} files, {size:.1f} MB, saved {saved:.1f} s, restored {restored:.1f} s"))
    return found


def started(ranks: int) -> float:
    """Seconds until `init(params)` has compared the plans of all ranks, connections between all pairs included."""

    def start(rank: int) -> None:
        init, _ = df.adapt_while_communicate(lambda x, b: (x - b).sum(), df.sgd(0.1), df.topology("base", ranks))
        init(torch.zeros(64))

    return timed(on_ranks, ranks, start)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = [int(size) for size in sys.argv[1:]] or [1024, 4096, 10_000]
    for n in sizes:
        print(f"{n:,} workers")
        for what, figure in figures(n):
            print(f"  {what:34}{figure}", flush=True)
    for ranks in RANKS:
        print(f"{ranks} ranks as threads: init(params) returns after {started(ranks):.1f} s")
