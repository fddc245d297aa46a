"""A worker that is killed or stopped costs its mass, and nobody waits. `python -m tests.timing.test_lost_workers RUNS` tries more."""

import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import pytest

from tests.run import survivors

JOB = {"algorithm": "asynchronous", "survives": False, "timeout": 60, "steps": 60, "pause": 0.02}
STALL_S = 30.0
"""A step that waits for a lost worker would take the timeout, as it is awake again only when the others have ended."""


def slowest(its):
    """The longest time between two ends of steps, and their median."""
    between = [b["at"] - a["at"] for a, b in zip(its, its[1:-1], strict=False)]
    return max(between), statistics.median(between)


def work_in(its):
    """The most seconds of processor time, of all of its threads, that a process takes from one end of a step to the next."""
    return max(b["cpu"] - a["cpu"] for a, b in zip(its, its[1:-1], strict=False))


def assert_went_on(lines, lost):
    for rank, its in enumerate(lines):
        if rank not in lost:
            assert its[-1].get("end") == "done" and len(its) == JOB["steps"] + 1, (rank, its[-1])
            assert all(abs(value) < 1e3 for value in its[-2]["x"]) and 0 < its[-2]["weight"] < 4
            assert slowest(its)[0] < STALL_S, (rank, slowest(its))


def drawn(seed):
    """A run with a worker, or two, killed or stopped at a random time."""
    draw = random.Random(seed)
    first, second = draw.sample(range(4), 2)
    at = draw.uniform(0, 0.6)
    kill, stop, go_on = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
    signals = [
        [(first, at, kill)],
        [(first, at, kill), (second, draw.uniform(0, 0.2), kill)],
        [(first, at, stop), (first, "the others", go_on)],
        [(first, at, stop), (second, 0.1, kill), (first, "the others", go_on)],
    ][seed % 4]
    return JOB | {"signals": signals}


def lost_of(job):
    return {rank for rank, *_ in job["signals"]}


@pytest.mark.thorough
def test_nobody_waits_for_a_worker_that_is_killed_or_stopped(tmp_path):
    jobs = [drawn(0), drawn(2)]
    for job, lines in zip(jobs, survivors.results(tmp_path, jobs), strict=True):
        assert_went_on(lines, lost_of(job))


if __name__ == "__main__":
    jobs, ratios, works, hung = [drawn(seed) for seed in range(int(sys.argv[1]))], [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for job, lines in zip(jobs, survivors.results(Path(folder), jobs), strict=True):
            left = [its for rank, its in enumerate(lines) if rank not in lost_of(job)]
            hung += any(its[-1].get("end") != "done" for its in left)
            ratios += [most / median for most, median in map(slowest, left)]
            works += [1e3 * work_in(its) for its in left]
    print(
        f"{len(jobs)} runs, {hung} in which a survivor did not end; longest step of a survivor over its median: ",
        end="",
    )
    print(f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}, above 3: {sum(r > 3 for r in ratios)}")
    print(
        f"most processor time of a survivor's step: median {statistics.median(works):.1f} ms, largest {max(works):.1f} ms"
    )
