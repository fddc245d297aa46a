"""Faults: a process that dies while writing or at a step; a full disk.

python -m tests.run.faults points DIRECTORY                          killed at every point of writing
python -m tests.run.faults resume DIRECTORY KILLS [BACKEND]          killed at random steps on two gloo ranks
python -m tests.run.faults rescue DIRECTORY                          a message lost at every post and wait

Every attempt is a fork, so that PyTorch is imported once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
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
from decentfn.testing.ranks import alone_as_rank_of
from tests.collectives.test_failures import Breaks
from tests.contract import FAMILIES, ROWS

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
            pid = os.fork()
            if pid == 0:
                with at_point(n, die), df.checkpoint.Saver(directory, keep=1) as saver:
                    saver.save(states[2], 2)
                os._exit(0)
            died.append(os.waitpid(pid, 0)[1] == signal.SIGKILL)
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
    with df.checkpoint.Saver(directory, topology=algorithm.topology, keep=2) as saver:
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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


# -- a message is lost ----------------------------------------------------------------------------------------------


def rescue(root: Path) -> int:
    """Lose each message of a donated step of four buckets, as it is posted and as it is waited for; how many there are.

    What each rank then rescues is what it has, at most a step behind the other.
    """
    init, pure = df.adapt_while_communicate(
        lambda x, batch: sum(((p - batch) ** 2).sum() for p in x.values()),
        df.adamw(0.1),
        df.topology("ring", 2),
        bucket_mb=1e-5,
    )
    start = init({name: torch.arange(6.0).view(3, 2) for name in "abcd"})
    assert len(start.params) == 4
    step, ones = df.compile(pure, backend="aot_eager"), torch.ones(())
    with alone_as_rank_of(2):
        step(trees.map(torch.clone, start), ones, 0)

    def run(rank: int, directory: Path, lost: tuple[int, str]) -> None:
        state = init({name: torch.arange(6.0).view(3, 2) + rank for name in "abcd"})
        world = collectives.world()
        with df.checkpoint.Saver(directory) as saver, collectives.use(world):
            state, _ = step(state, ones, 0)
            world.group = group = Breaks(world.group, *(lost if rank == 1 else (-1, "")))
            try:
                state, _ = step(state, ones, 1)
                (directory / f"calls-{rank}").write_text(str(group.calls))
                for t in (2, 3):
                    state, _ = step(state, ones, t)
            except df.errors.RunError as error:
                assert saver.rescue(state, error) and lost[1]
                torch.save((error.next_step, trees.leaves(state)), directory / f"rank-{rank}.pt")

    on_processes(lambda rank: run(rank, root / "healthy", (-1, "")))
    calls = int((root / "healthy" / "calls-1").read_text())
    for lost in itertools.product(range(calls), ("post", "wait")):
        directory = root / f"{lost[1]}-{lost[0]}"
        # gloo never tells of the message that it was writing when a connection closed: that one ends at the timeout.
        on_processes(lambda rank, directory=directory, lost=lost: run(rank, directory, lost), timeout=40)
        assert df.checkpoint.latest(directory) is None
        restored = df.checkpoint.restore(directory / "rescued", df.stack(start, 2))
        steps, held = zip(*(torch.load(directory / f"rank-{rank}.pt") for rank in range(2)), strict=True)
        assert restored.step == max(steps) <= min(steps) + 1
        assert are_equal(restored.state, [torch.stack(rows) for rows in zip(*held, strict=True)]), lost
    return 2 * calls


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # forks have no threads of their parent
    if sys.argv[1] == "points":
        print(f"killed at {points(Path(sys.argv[2]))} points")
    elif sys.argv[1] == "rescue":
        print(f"rescued from {rescue(Path(sys.argv[2]))} losses")
    else:
        resume(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
