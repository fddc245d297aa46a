"""One row in a process of its own, with a limit of time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from multiprocessing.connection import Connection

from tests.others.rows import RAW, Outcome, Row, load, outcome

LIMIT = 240.0
"""Seconds for one row in all its ways."""

Results = dict[str, Outcome]


def serve(pipe: Connection, key: str) -> None:
    """Run one row in this process, way by way."""
    os.setpgrp()  # a launcher's processes end with it
    log, _ = tempfile.mkstemp()
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("ignore")
    os.chdir(tempfile.mkdtemp())
    row = load()[key]
    for way in row.ways or ("",):
        pipe.send((way, outcome(row, way)))
    pipe.close()


def attempt(row: Row) -> Results:
    """Run one row in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.others.harness"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(theirs, row.key))
    process.start()
    theirs.close()
    results: Results = {}
    end = time.monotonic() + LIMIT
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            way, found = ours.recv()
            results[way] = found
        cause = f"not done within {LIMIT:.0f} s"
    except EOFError:
        process.join(10)
        cause = f"the process ended with {process.exitcode}"
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    for way in row.ways or ("",):
        results.setdefault(way, Outcome(RAW, cause))
    return results
