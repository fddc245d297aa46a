"""Logs of a run, as JSON lines, written by one process."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import copy
from functools import partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decentfn.comm import collectives
from decentfn.core import at_least, brief, require
from decentfn.kit.state import Metrics
from decentfn.train.checkpoint import files
from decentfn.train.collective_calls import make_directory, on_first, one_path
from decentfn.train.consensus import consensus_distance, gather, mean

__all__ = ["JSONLines", "read"]


_loads = partial(json.loads, parse_constant=lambda name: None)  # NaN and infinity are null


class JSONLines(AbstractContextManager["JSONLines", None]):
    """Log with one JSON object per line, which process 0 writes; all may call `write`. A context manager; collective.

    A new run never overwrites another's log: if `path` exists, its log is `name-2.jsonl`, `name-3.jsonl`, ... A run
    resumed at step t appends to the last of these, without lines of steps >= t and without a line cut short by a crash.
    `write` hands a line to the operating system before it returns, so a process that dies leaves complete lines. If
    process 0 is lost (`df.survive`), the lowest that is left appends; it drops lines of steps that it writes again.

    Args:
        path: path of the file; its directory is created if needed.
        first_step: the run's first step; 0 is a new run.
    """

    path: Path
    """File of the lines."""

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        at_least("JSONLines", "first_step", first_step, 0)
        self.path = Path(on_first("JSONLines", _open, one_path("JSONLines(path)", path), first_step))
        self._here = collectives.all_processes()
        self._unsaid: list[tuple[Mapping[str, Any], int]] = []  # of the last step, which process 0 may not have ended
        self._file = self.path.open("ab", buffering=0) if self._here.rank == 0 else None
        self._started, self._counting = on_first("JSONLines", time.time), ExitStack()
        self._counted = self._counting.enter_context(collectives.communication())

    def record(self, state: Any, metrics: Metrics, step: int, **more: Any) -> dict[str, Any]:
        """Append what `decentfn report` shows of step `t`, and return it: `write` of numbers of all workers. Collective.

        Means, `losses` `[N]`, `seconds` since the log was `started`, the numbers of the `workers`, and since the last call
        `links`, `[from, to, bytes, is_inside]`, and `waited`, `[who, for whom, seconds]`, of processes. `more` are further
        values, such as `tokens_per_s`, or `seconds` of a clock in place of these.
        """
        rule = f"found {brief(metrics)} for the metrics of state, metrics = step(state, batch, t)."
        require(isinstance(metrics, Metrics), "JSONLines.record(state, metrics, step)", rule)
        losses = gather(state, metrics.loss)
        everyone, here, c = collectives.all_processes(), collectives.world().identity, self._counted
        processes = everyone.processes_per_worker
        peers = [(r, x.bytes_sent, here.is_inside(r), x.seconds_waited) for r, x in c.peers.items() if r < here.size]
        told = collectives.gather_objects((everyone.place // processes, peers, c.seconds_waited), everyone)
        numbers, local = [its[0] for its in told[::processes]], len(losses) * processes // len(told)
        line = {
            "started": self._started,
            "seconds": time.time() - self._started,
            "loss": losses.double().mean(),
            "losses": losses,
            "grad_norm": mean(state, metrics.grad_norm),
            "consensus_distance": consensus_distance(state),
            "workers": [i * local + k for i in numbers for k in range(local)],
            "links": [[i, numbers[r], sent, is_in] for i, its, _ in told for r, sent, is_in, _ in its if sent],
            "waited": [[i, numbers[r], round(x, 6)] for i, its, _ in told for r, *_, x in its if x]
            + [[i, None, round(total - sum(x for *_, x in its), 6)] for i, its, total in told],
        }
        rule = "the line has these of all workers; only seconds, of a clock, may be others. Choose another name."
        require(not (more.keys() & line.keys()) - {"seconds"}, "JSONLines.record", rule, **more)
        self.write(line | more, step)
        self._counting.close()
        self._counted = self._counting.enter_context(collectives.communication())
        return line | more

    def write(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line on process 0, do nothing on others; not collective.

        Args:
            values: JSON values; tensors and arrays become numbers and lists, paths strings, NaN and infinity null.
            step: `t`, the line's first entry; None for lines without a step, such as the configuration or a result.
        """
        if self._here.rank:
            if step is not None:
                self._unsaid = [*(line for line in self._unsaid if line[1] == step), (copy(values), step)]
            return
        if self._file is None:  # process 0 is lost
            make_directory(self.path.parent)
            _cut(self.path, self._unsaid[0][1] if self._unsaid else math.inf if step is None else step)
            self._file = self.path.open("ab", buffering=0)
            for line in self._unsaid:
                self.write(*line)
        if self._file.closed:
            raise ValueError(f"JSONLines({str(self.path)!r}).write: the log is closed.")
        if not isinstance(values, Mapping):
            raise ValueError(f"JSONLines.write({brief(values)}): expected a dict of names and values.")
        given = [x for x in (step, values.get("step")) if x is not None]
        steps = {at_least("JSONLines.write", "step", x, 0) for x in given}  # a run that goes on looks for it
        if len(steps) > 1:
            raise ValueError(f"JSONLines.write({brief(values)}, step={step}): these are two steps; leave one out.")
        line = dict(values)
        if steps:  # the first entry
            line.pop("step", None)
            line = {"step": steps.pop()} | line
        try:
            text = json.dumps(_loads(json.dumps(line, default=_as_json)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"JSONLines.write({brief(values)}): {error}") from None
        whole = f"{text}\n".encode()
        if (done := self._file.write(whole)) < len(whole):  # one call, so the line is complete or absent
            self._file.seek(-done, os.SEEK_CUR)
            self._file.truncate()
            raise OSError(errno.ENOSPC, f"there is no room for a line of {len(whole)} bytes", str(self.path))

    def close(self) -> None:
        """Close the log."""
        self._counting.close()
        if self._file is not None:
            self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a `JSONLines` log, without a last line cut short by a crash.

    Raises:
        ValueError: a line is not a JSON object.
    """
    lines = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(_loads(line))  # older versions wrote NaN
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; it is not a log of JSON lines.") from None
        if not isinstance(lines[-1], dict):
            raise ValueError(f"{path}, line {number}: {brief(lines[-1])} is not a JSON object, as a log's lines are.")
    return lines


def _open(path: Path, first_step: int) -> str:
    """Return the path of a new log, or of the last one after removing lines of steps >= `first_step`."""
    if path.is_dir():
        raise ValueError(f"JSONLines({str(path)!r}): that is a directory; the log is a file in it, such as log.jsonl.")
    make_directory(path.parent)
    last, paths = path, chain([path], (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(2)))
    if first_step == 0:
        for new in paths:
            with suppress(FileExistsError):  # another run's
                new.touch(exist_ok=False)
                return str(new)
    for older in takewhile(Path.exists, paths):
        last = older
    _cut(last, first_step)
    return str(last)


def _cut(path: Path, first_step: float) -> None:
    """Remove lines of steps >= `first_step`, and one that is cut short, from a log that may exist."""
    if path.exists():
        kept = [line for line in read(path) if not isinstance(line.get("step"), int) or line["step"] < first_step]
        files.replace(path, [f"{json.dumps(line, allow_nan=False)}\n".encode() for line in kept])


def _as_json(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value; give a number, a string, or lists and dicts of them")
