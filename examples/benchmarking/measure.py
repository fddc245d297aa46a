"""Time, CPU time, bytes and memory of peers that take turns in one launch."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import re
import time
import traceback
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import decentfn as df
from benchmarking.peers import Peer, build
from benchmarking.workloads import Workload


def machine() -> dict[str, Any]:
    """Where and how busy."""
    cpu = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def shown(name: str) -> Any:
    """A range of this name for Nsight Systems, where there is a GPU."""
    return torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else contextlib.nullcontext()


def fresh_peak() -> int:
    """Count the GPU's peak anew; return the bytes that are allocated there now, 0 without a GPU."""
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gathered(value: object) -> list[Any]:
    """Gather the values of all processes by rank, after a JSON round trip; collective."""
    if not dist.is_initialized():
        return [value]
    text = json.dumps(value).encode()
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    told = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON may end with spaces
    everyone = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, told)
    return [json.loads(bytes(theirs.tolist())) for theirs in everyone]


class Interface:
    """The counter of bytes sent through this host's network interface, headers included."""

    def __init__(self, ranks_per_host: int = 1) -> None:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.path = f"/sys/class/net/{name}/statistics/tx_bytes"
        world = int(os.environ.get("WORLD_SIZE", "1"))
        # Ranks of one machine share its device, and whatever else runs there.
        self.shared_by = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        # Between hosts nothing goes over the loopback device: GLOO_SOCKET_IFNAME says which one it is. And what goes over it
        # where a host is several ranks is mostly what hosts keep to themselves.
        self.counts = name != "lo" or self.shared_by == world and ranks_per_host == 1
        self.name = name

    def sent(self) -> float | None:
        """Bytes so far, this rank's share of its host's."""
        text = _read(self.path) if self.counts else ""
        return int(text) / self.shared_by if text else None


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high}


def peak_memory() -> int:
    """This process's largest resident size so far, bytes; where it computes on a GPU, what was allocated there at most."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s*(\d+) kB", _read("/proc/self/status"))
    return int(found.group(1)) * 1024 if found else 0


class Contender:
    """A peer while it is measured."""

    def __init__(self, spec: str, workload: Workload, rank: int, size: int) -> None:
        self.spec, self.t, self.graphs = spec, 0, 0
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.sent: list[float] = []
        self.failure: str | None = None
        self.first_s = 0.0
        self.peer = Peer(lambda t: None)
        self.cache_hits = 0
        self.held = self.gpu_bytes = 0
        before, beside = counters["inductor"]["fxgraph_cache_hit"], fresh_peak()
        try:
            start = time.perf_counter()
            self.peer = build(spec, workload, rank, size)
            self.run(1)
            self.first_s = time.perf_counter() - start
            self.run(2)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            if os.environ.get("BENCHMARK_TRACE"):
                traceback.print_exc()
        self.cache_hits = counters["inductor"]["fxgraph_cache_hit"] - before
        self._note_peak(beside)
        self.held = fresh_peak() - beside
        failures = [failure for failure in gathered(self.failure) if failure]
        self.failure = failures[0] if failures else None

    def run(self, steps: int) -> None:
        """A drained block: everything that was sent has arrived when it ends."""
        before = counters["stats"]["unique_graphs"]
        with shown(self.spec):
            for _ in range(steps):
                self.peer.step(self.t)
                self.t += 1
            self.peer.drain()
        if torch.cuda.is_initialized():  # once in a block: within, the host runs ahead of the GPU
            torch.cuda.synchronize()
        self.graphs += counters["stats"]["unique_graphs"] - before

    def block(self, steps: int, interface: Interface) -> None:
        sent, beside = interface.sent(), fresh_peak() - self.held
        barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        self.run(steps)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        barrier()
        after = interface.sent()
        self._note_peak(beside)
        self.walls.append(wall / steps)
        self.cpus.append(cpu / steps)
        if sent is not None and after is not None:
            self.sent.append((after - sent) / steps)

    def _note_peak(self, beside: int) -> None:
        """On a GPU: more than the other contenders hold."""
        if torch.cuda.is_initialized():
            self.gpu_bytes = max(self.gpu_bytes, torch.cuda.max_memory_allocated() - beside)

    def row(self) -> dict[str, Any]:
        """Collective. A step takes as long as it takes the slowest rank; CPU is the mean over ranks, bytes over workers."""
        row: dict[str, Any] = {"peer": self.spec, "failure": self.failure}
        walls, cpus, sents = (gathered(values) for values in (self.walls, self.cpus, self.sent))
        if self.failure or not self.walls:
            return row
        row["step_s"] = spread([max(of_ranks) for of_ranks in zip(*walls, strict=True)])
        row["cpu_s"] = spread([sum(of_ranks) / len(walls) for of_ranks in zip(*cpus, strict=True)])
        workers, payloads = df.init().num_workers, gathered(self.peer.payload)
        if all(sents):
            row["wire_bytes"] = median(sum(of_ranks) / workers for of_ranks in zip(*sents, strict=True))
        row["payload_bytes"] = None if None in payloads else sum(payloads) / workers
        row["blocks_s"] = [max(of_ranks) for of_ranks in zip(*walls, strict=True)]
        row |= {
            "first_s": gathered(self.first_s),
            "gpu_bytes": max(gathered(self.gpu_bytes)),
            "graphs": self.graphs,
            "cache_hits": gathered(self.cache_hits),
        }
        return row


def compare(
    specs: list[str], workload: Workload, rank: int, size: int, *, blocks: int, seconds: float, steps: int | None
) -> dict[str, Any]:
    """Measure the peers in turn: A B … A B …, `blocks` times, each block about `seconds` long."""
    ranks_per_host = df.init().processes_per_worker
    interface = Interface(ranks_per_host)
    if torch.cuda.is_initialized():  # or the first peer that compiles would load the compiler
        torch.compile(lambda x: x + 1)(torch.ones(8, device="cuda"))
    contenders = []
    for spec in specs:
        contenders.append(Contender(spec, workload, rank, size))
        if rank == 0:
            print(f"  ready: {spec} {contenders[-1].failure or f'{contenders[-1].first_s:.1f} s'}", flush=True)
    running = [c for c in contenders if c.failure is None]
    lengths = {}
    for contender in running:
        if steps is None:
            trial = time.perf_counter()
            contender.run(8)
            taken = (time.perf_counter() - trial) / 8
            # Whole rounds of 8, so that every block of periodic averaging holds as many averages.
            lengths[contender.spec] = max(8, int(max(gathered(seconds / taken))) // 8 * 8)
        else:
            lengths[contender.spec] = steps
    for _ in range(blocks):
        for contender in running:
            contender.block(lengths[contender.spec], interface)
    rows = [contender.row() | {"block_steps": lengths.get(contender.spec)} for contender in contenders]
    return {
        "machine": machine(),
        "interface": interface.name,
        "workers": size // ranks_per_host,
        "ranks_per_host": ranks_per_host,
        "workload": workload.name,
        "batch_size": workload.batch_size * ranks_per_host,
        "rows": rows,
    }


def memory(spec: str, workload: Workload, rank: int, size: int, *, steps: int) -> dict[str, Any]:
    """Peak memory of one peer, for a process of its own: what it adds to the same process without a model.

    The first step is included, so compile with a warm cache (the launcher runs it twice).
    """
    before = peak_memory()
    contender = Contender(spec, workload, rank, size)
    if contender.failure is None:
        contender.run(steps)
    with torch.device("meta"):
        parameters = sum(p.nbytes for p in workload.build().parameters())
    row = {"peer": spec, "failure": contender.failure, "parameter_bytes": parameters}
    row["peak_bytes"] = gathered(peak_memory())
    row["added_bytes"] = gathered(peak_memory() - before)
    row |= {
        "first_s": gathered(contender.first_s),
        "cache_hits": gathered(contender.cache_hits),
        "graphs": contender.graphs,
    }
    return row
