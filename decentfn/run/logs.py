"""What a run reports: a file of JSON lines, and TensorBoard's. One process writes; nothing of it stands in the graph."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from decentfn import collectives, trees
from decentfn.run.checkpoint.together import on_first, one_path
from decentfn.run.paths import directory
from decentfn.words import brief

__all__ = ["JSONLines", "TensorBoard", "read"]


class JSONLines:
    """A log of one JSON object a line, written by process 0, to `write` to from all. A context manager; collective.

    A new run never writes over another's log: where `path` exists, its log is `name-2.jsonl`, `name-3.jsonl`, ... A run that goes
    on from step t appends to the last of these and drops the lines of steps >= t, which are taken again, and one that a crash has
    cut short. A line is on its way to the disk when `write` returns, so a process that dies leaves whole lines.

    Args:
        path: of the file; its directory is made where it does not exist.
        first_step: the step that the run begins with; 0 is a new run.

    Raises:
        OSError, ValueError: on all processes, the file cannot be opened, or is no log.
    """

    path: Path
    """Where the lines go."""

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        _require_step("JSONLines", first_step)
        path = one_path("JSONLines(path)", path)
        opened: list[int] = []
        self.path = Path(on_first("JSONLines", _open, path, first_step, opened))
        self._file = opened[0] if opened else None

    def write(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line; not collective, and nothing on processes other than 0.

        Args:
            values: anything that JSON holds, tensors (as numbers and lists) and paths among it. NaN and infinity, which JSON does
                not have, are null.
            step: `t`, the line's first entry; None where a line is of no step: the run's configuration, its result.

        Raises:
            ValueError: JSON does not hold a value, or the log is closed.
        """
        if self._file is None:
            return
        if self._file < 0:
            raise ValueError(f"JSONLines({str(self.path)!r}).write: the log is closed.")
        line = ({} if step is None else {"step": int(step)}) | dict(values)
        try:
            text = json.dumps(_as_json(line), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"JSONLines.write({brief(values)}): {error}") from None
        os.write(self._file, f"{text}\n".encode())  # one call, so that the line is whole or not there

    def close(self) -> None:
        """No more lines come."""
        if self._file is not None and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> JSONLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TensorBoard:
    """The same `write`, for TensorBoard: the numbers of a line are scalars, by their names joined with "/". A context manager.

    Process 0 writes. Lines without a step are left out, and so is what is no number. A run that goes on from step t hides what
    an earlier one has written of later steps.

    Args:
        directory: for `tensorboard --logdir`.
        first_step: the step that the run begins with.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: str | Path, first_step: int = 0) -> None:
        _require_step("TensorBoard", first_step)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"df.logs.TensorBoard({str(directory)!r}): TensorBoard is not installed ({error}); "
                "pip install 'decentfn[tensorboard]', or leave it out: a JSONLines log has the same numbers."
            ) from None
        is_first = collectives.everyone().rank == 0
        self._writer = SummaryWriter(str(directory), purge_step=first_step or None) if is_first else None

    def write(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Append the numbers among `values` at `step`."""
        if self._writer is None or step is None:
            return
        for name, number in _numbers(values):
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Write what is not written yet; no more comes."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `JSONLines` log, without a last one that a crash has cut short.

    Raises:
        ValueError: a line in it is not a JSON object.
    """
    lines = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(line, parse_constant=lambda name: None))  # older versions wrote NaN
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; it is not a log of JSON lines.") from None
        if not isinstance(lines[-1], dict):
            raise ValueError(f"{path}, line {number}: {brief(lines[-1])} is not a JSON object, as a log's lines are.")
    return lines


def _open(path: Path, first_step: int, opened: list[int]) -> str:
    directory(path.parent)
    last = path
    for candidate in _numbered(path):
        if first_step == 0 and _is_new(candidate):
            last = candidate
            break
        if first_step > 0 and not candidate.exists():
            break
        last = candidate
    if first_step > 0 and last.exists():
        kept = [line for line in read(last) if not isinstance(line.get("step"), int) or line["step"] < first_step]
        new = last.with_name(f"{last.name}.new")
        new.write_text("".join(f"{json.dumps(line, allow_nan=False)}\n" for line in kept))
        new.replace(last)
    opened.append(os.open(last, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    return str(last)


def _is_new(path: Path) -> bool:
    """Whether the file did not exist, and does now."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1


def _require_step(call: str, first_step: Any) -> None:
    if not isinstance(first_step, int) or isinstance(first_step, bool) or first_step < 0:
        raise ValueError(f"{call}(first_step={brief(first_step)}): the step that the run begins with, an integer >= 0.")


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _as_json(value.tolist())
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(f"{type(value).__name__} is nothing that JSON holds")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for path, leaf in trees.named_leaves(trees.plain(dict(values))):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            leaf = leaf.item()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield path.replace(".", "/"), leaf
