"""Real gloo ranks for tests that are processes, and stay; how long a rank waits."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
SOON = timedelta(seconds=3)
_PATIENCE_S = 300
"""A rank that waits for the timeout is late by this, so no test needs a clock to see that none has."""


def lose_patience(timeout: timedelta = SOON) -> None:
    """Let this rank wait no longer than `timeout` from here on, where a test lets the ranks part.

    Before, while all goes well, a busy machine may need minutes.
    """
    from decentfn.comm.collectives import world

    channels = world().channels
    channels.longest_wait = timeout
    for group in [*channels.groups(), *channels.groups_outside.values()]:
        group.set_timeout(timeout)


def free_port() -> int:
    """Return a port that nothing uses, below those that the system gives to connections before somebody binds it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """`n` processes with a gloo group; `run(function, *args)` calls a module-level function on every rank at once.

    In between they are stopped: the threads of each gloo group wake a hundred times a second, half a core for ten processes.

    Attributes:
        is_intact: all have answered and none has failed; else they may no longer be at the same collective.
    """

    is_intact = True

    def __init__(self, n: int) -> None:
        port = free_port()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["decentfn"])
        self.pipes, self.processes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, n, port), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.is_intact = False
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(_PATIENCE_S):
                raise TimeoutError(f"{function.__name__}: a rank did not answer")
            answers.append(pipe.recv())
        self._signal(signal.SIGSTOP)
        errors = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[0] == "error"]
        if errors:
            raise RuntimeError("\n".join(errors))
        self.is_intact = True
        return [answer[1] for answer in answers]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        if self.is_intact:
            for pipe in self.pipes:
                pipe.send(None)
            for process in self.processes:
                process.join(10)
        for process in self.processes:
            process.kill()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)


def _serve(pipe: Any, rank: int, n: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    import decentfn as df

    df.init(timeout=TIMEOUT)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send(("ok", function(*args)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()
