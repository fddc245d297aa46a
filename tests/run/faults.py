"""Faults: a process that dies while writing or at a step; a full disk.

python -m tests.run.faults points DIRECTORY                          killed at every point of writing
python -m tests.run.faults resume DIRECTORY KILLS [BACKEND]          killed at random steps on two gloo ranks

Every attempt is a fork, so that PyTorch is imported once.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import decentfn as df
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.testing import problem
from tests.contract import FAMILIES, ROWS
from tests.ranks import free_port

PATCHED = ("mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir")


@contextmanager
def at_point(n: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Do this at the n-th call that changes the disk, before it; of a write, when half of it is done."""
    calls: list[str] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return original(*arguments, **keywords)
            calls.append(name)
            if len(calls) == n + 1:
                if name == "write":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                action()
            return original(*arguments, **keywords)

        return call

    patches = [patch.object(os, name, watched(name, getattr(os, name))) for name in PATCHED]
    for each in patches:
        each.start()
    try:
        yield calls
    finally:
        for each in patches:
            each.stop()


def small(seed: int) -> tuple[df.Algorithm, Any]:
    """An algorithm, and a stacked state of two workers."""
    algorithm = df.adapt_then_combine(problem.loss_fn, df.adam(0.1), df.topology("complete", 2))
    return algorithm, problem.stacked([algorithm.init(problem.params(seed + i)) for i in range(2)])


def are_equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- at every point of writing --------------------------------------------------------------------------------------


def points(root: Path) -> int:
    """Kill a save at each of its points, the next start too; how many there are."""
    states = {step: small(10 * step)[1] for step in (1, 2)}
    df.checkpoint.save(root / "before", states[1], 1)
    for n in range(1000):
        directory = root / f"killed-{n}"
        shutil.copytree(root / "before", directory)
        died = []
        for start in range(2):  # the second dies while it cleans up, or later
            df.checkpoint.restore(directory, small(0)[1])  # or it would take the checkpoints for another run's
            pid = os.fork()
            if pid == 0:
                with at_point(n, die), df.checkpoint.Saver(directory, keep=1) as saver:
                    saver.save(states[2], 2)
                os._exit(0)
            status = os.waitpid(pid, 0)[1]
            assert status in (0, signal.SIGKILL), f"point {n}, start {start}: {status}"
            died.append(status == signal.SIGKILL)
            restored = df.checkpoint.restore(directory, small(0)[1])
            assert are_equal(restored.state, states[restored.step]), f"point {n}, start {start}"
        with df.checkpoint.Saver(directory):
            left = {path.name for path in directory.iterdir()} - {"lock"}
        assert all(name.startswith("checkpoint-") for name in left), left
        if not any(died):
            return n
    raise AssertionError("there is no end of points")


# -- at random steps ------------------------------------------------------------------------------------------------

STEPS = 7


def train(row: str, directory: Path, backend: str | None, kill: tuple[str, int, int] | None) -> None:
    """One rank's part of a run, which goes on where its last checkpoint is."""
    here = collectives.world()
    done = directory / f"digest-{here.rank}"
    if all(collectives.gather_objects(done.exists())):
        return
    workers = here.workers(2)
    # Windows of three updates; micro-batches; a loss scale; an average. Numbers from torch's generator enter the data.
    optimizer = df.transforms.accum_adam(0.01, accum_iter=3)
    loss_fn = df.dynamic_loss_scale(df.accumulate(problem.loss_fn), 8.0, growth_interval=3)
    algorithm = df.ema(ROWS[row].build(loss_fn=loss_fn, optimizer=optimizer), 0.9)
    step = df.simulate(algorithm.step, 2)
    if backend:
        step = df.compile(step, backend=backend)
    state, begin = ROWS[row].start(algorithm, workers, stacked=True), 0
    torch.manual_seed(here.rank)
    if df.checkpoint.latest(directory):
        torch.manual_seed(99)
        state, begin, extra, _ = df.checkpoint.restore(directory, state)
        assert extra == {"rank": here.rank, "seen": 4 * begin}
    with df.checkpoint.Saver(directory, keep=2) as saver:
        for t in range(begin, STEPS):
            strength = 1 + 0.1 * float(torch.rand(()))
            batches = [[problem.batch(i, 2 * t + part, strength) for part in range(2)] for i in workers]
            state, _ = step(state, problem.stacked([problem.stacked(batch) for batch in batches]), t)
            saver.save(state, t + 1, extra={"rank": here.rank, "seen": 4 * (t + 1)})
            if kill == (row, t, here.rank):
                time.sleep(random.random() / 100)  # some checkpoints are on the disk by then, others are not
                die()
    digest = hashlib.sha256()
    for x in trees.leaves(state):
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    done.write_text(digest.hexdigest())


def on_processes(function: Callable[[int], None], *, is_killed: bool = False, timeout: float = 200) -> None:
    """Two gloo ranks; where one dies, the other is killed as well."""
    port = free_port()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            random.seed(os.getpid())
            try:
                df.init(timeout=timedelta(seconds=timeout))
                function(rank)
                collectives.leave_default_group()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        pids.append(pid)
    statuses = {}
    while len(statuses) < 2:
        pid, status = os.wait()
        statuses[pid] = status
        if status and len(statuses) == 1:
            os.kill(next(other for other in pids if other != pid), signal.SIGKILL)
    assert (signal.SIGKILL in statuses.values()) == is_killed, statuses
    assert is_killed or not any(statuses.values()), statuses


def resume(root: Path, kills: int, backend: str | None) -> None:
    """A run that was never killed, and one that was so many times, end in the same bits."""
    rows = FAMILIES if kills >= len(FAMILIES) else FAMILIES[:: len(FAMILIES) // kills][:kills]
    draw = random.Random(0)

    def run(directory: Path, kill: tuple[str, int, int] | None = None) -> None:
        def all_rows(_: int) -> None:
            for row in rows:
                train(row, directory / row, backend, kill)

        on_processes(all_rows, is_killed=kill is not None)

    run(root / "whole")
    plan = {(row, draw.randrange(STEPS)) for row in rows}  # each at least once
    while len(plan) < kills:
        plan.add((draw.choice(rows), draw.randrange(STEPS)))
    for row, t in sorted(plan, key=lambda pair: (rows.index(pair[0]), pair[1])):
        rank = draw.randrange(2)
        run(root / "killed", (row, t, rank))
        print(f"{row}: rank {rank} killed at t={t}", flush=True)
    run(root / "killed")
    for row in rows:
        for rank in range(2):
            names = [root / kind / row / f"digest-{rank}" for kind in ("whole", "killed")]
            assert len({name.read_text() for name in names}) == 1, (row, rank)
    print(f"{len(plan)} kills, {len(rows)} algorithms, {backend or 'eager'}: the same bits")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # forks have no threads of their parent
    if sys.argv[1] == "points":
        print(f"killed at {points(Path(sys.argv[2]))} points")
    else:
        resume(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
