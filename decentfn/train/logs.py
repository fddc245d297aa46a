"""What a run reports: a file of JSON lines, and TensorBoard's. One process writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.core.formatting import brief
from decentfn.core.numbers import at_least
from decentfn.train.together import make_directory, on_first, one_path

__all__ = ["JSONLines", "TensorBoard", "read"]


_loads = partial(json.loads, parse_constant=lambda name: None)  # NaN and infinity are null


class _Log:
    """A context manager that closes in the end."""

    def close(self) -> None:
        """Write what is not written yet; no more comes."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JSONLines(_Log):
    """A log of one JSON object a line, written by process 0, to `write` to from all. A context manager; collective.

    A new run never writes over another's log: where `path` exists, its log is `name-2.jsonl`, `name-3.jsonl`, ... A run that goes
    on from step t appends to the last of these and drops the lines of steps >= t, which are taken again, and one that a crash has
    cut short. A line is on its way to the disk when `write` returns, so a process that dies leaves whole lines.

    Args:
        path: of the file; its directory is made where it does not exist.
        first_step: the step that the run begins with; 0 is a new run.
    """

    path: Path
    """Where the lines go."""

    def __init__(self, path: str | Path, first_step: int = 0) -> None:
        at_least("JSONLines", "first_step", first_step, 0)
        self.path = Path(on_first("JSONLines", _open, one_path("JSONLines(path)", path), first_step))
        self._file = self.path.open("ab", buffering=0) if collectives.everyone().rank == 0 else None

    def write(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line; not collective, and nothing on processes other than 0.

        Args:
            values: anything that JSON holds, tensors (as numbers and lists) and paths among it. NaN and infinity are null.
            step: `t`, the line's first entry; None where a line is of no step: the run's configuration, its result.
        """
        if self._file is None:
            return
        if self._file.closed:
            raise ValueError(f"JSONLines({str(self.path)!r}).write: the log is closed.")
        line = ({} if step is None else {"step": int(step)}) | dict(values)
        try:
            text = json.dumps(_loads(json.dumps(line, default=_as_json)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"JSONLines.write({brief(values)}): {error}") from None
        self._file.write(f"{text}\n".encode())  # one call, so that the line is whole or not there

    def close(self) -> None:
        """No more lines come."""
        if self._file is not None:
            self._file.close()


class TensorBoard(_Log):
    """The same `write`, for TensorBoard: the numbers of a line are scalars, by their names joined with "/". A context manager.

    Process 0 writes. Lines without a step are left out, and so is what is no number. A run that goes on from `first_step` hides what
    an earlier one has written of later steps.
    """

    def __init__(self, directory: str | Path, first_step: int = 0) -> None:
        at_least("TensorBoard", "first_step", first_step, 0)
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


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `JSONLines` log, without a last one that a crash has cut short.

    Raises:
        ValueError: a line in it is not a JSON object.
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
    """Return the path of the log: that of a new one, or of the last, without the steps that are taken again."""
    make_directory(path.parent)
    last, paths = path, chain([path], (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(2)))
    if first_step == 0:
        for new in paths:
            with suppress(FileExistsError):  # another run's
                new.touch(exist_ok=False)
                return str(new)
    for older in takewhile(Path.exists, paths):
        last = older
    if last.exists():
        kept = [line for line in read(last) if not isinstance(line.get("step"), int) or line["step"] < first_step]
        new = last.with_name(f"{last.name}.new")
        new.write_text("".join(f"{json.dumps(line, allow_nan=False)}\n" for line in kept))
        new.replace(last)
    return str(last)


def _as_json(value: Any) -> Any:
    """Return what `json` does not know in a form that it knows."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON holds")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for path, leaf in trees.named_leaves(trees.plain(dict(values))):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            leaf = leaf.item()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield path.replace(".", "/"), leaf
