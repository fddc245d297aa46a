"""Cost of checkpoints: blocks of steps with and without a save alternate, and the last checkpoint is restored."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import decentfn as df
from benchmarking.measure import barrier, gathered, machine
from benchmarking.workloads import LEARNING_RATE, WEIGHT_DECAY, Workload


def measure(workload: Workload, rank: int, size: int, *, blocks: int, steps: int, folder: str | None) -> dict[str, Any]:
    """One rank's part; a time is that of the slowest rank."""
    params, buffers, loss_fn = df.functional(workload.module(), workload.criterion)
    topology = df.topology("one-peer-exp", num_workers=size)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY), topology)
    state, step, batches = init(params, buffers), df.compile(step), workload.batches(rank)
    t = 0

    def run(saver: df.checkpoint.Saver | None) -> dict[str, float]:
        """A block of steps, with a save after the first one."""
        nonlocal state, t
        found: dict[str, float] = {}
        barrier()
        start = time.perf_counter()
        for k in range(steps):
            state, _ = step(state, batches[t % len(batches)], t)
            t += 1
            if saver is not None and k == 0:
                before = time.perf_counter()
                saver.save(state, t)
                found["save_s"] = time.perf_counter() - before
        found["block_s"] = time.perf_counter() - start
        return found

    with tempfile.TemporaryDirectory(dir=folder) as own:
        run_folder = gathered(own)[0]
        with df.checkpoint.Saver(run_folder, keep=2) as saver:
            run(saver)
            saver.wait()
            with_, without = [], []
            for _ in range(blocks):
                without.append(run(None))
                with_.append(run(saver))
                saver.wait()
            written = time.perf_counter()
            saver.save(state, t)
            saver.wait()
            written = time.perf_counter() - written
        size_in_bytes = sum(file.stat().st_size for file in Path(str(df.checkpoint.latest(run_folder))).iterdir())
        barrier()
        restored = time.perf_counter()
        df.checkpoint.restore(run_folder, state)
        restored = time.perf_counter() - restored
        barrier()
    of_ranks = gathered({"with": with_, "without": without, "written_s": written, "restore_s": restored})

    def slowest(kind: str, what: str) -> list[float]:
        return [max(its[kind][block][what] for its in of_ranks) for block in range(blocks)]

    plain, saving = slowest("without", "block_s"), slowest("with", "block_s")
    return {
        "machine": machine(),
        "workers": size,
        "workload": workload.name,
        "steps": steps,
        "bytes": size_in_bytes,
        "step_s": median(plain) / steps,
        "save_s": median(slowest("with", "save_s")),
        "added": [(s - p) / p for s, p in zip(saving, plain, strict=True)],
        "written_s": max(its["written_s"] for its in of_ranks),
        "restore_s": max(its["restore_s"] for its in of_ranks),
    }


def table(found: dict[str, Any]) -> str:
    """Format the results."""
    share = found["save_s"] / (found["steps"] * found["step_s"])
    return f"""{found["workload"]}, {found["workers"]} workers, {found["bytes"] / 1e6:.0f} MB in all, load {found["machine"]["load"]}
  a step                        {1e3 * found["step_s"]:9.1f} ms
  a save, what the step waits   {1e3 * found["save_s"]:9.1f} ms   {100 * share:.2f} % of {found["steps"]} steps
  {found["steps"]} steps with a save, added {100 * median(found["added"]):9.2f} %    from {100 * min(found["added"]):.2f} to {100 * max(found["added"]):.2f}
  until it is on the disk       {1e3 * found["written_s"]:9.1f} ms   nothing else running in the process
  restore                       {1e3 * found["restore_s"]:9.1f} ms"""
