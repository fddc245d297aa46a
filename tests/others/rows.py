"""The type of a row, the table that the sibling files fill, and what came out of one row."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import decentfn

KINDS = ("models", "batches", "optimizers", "schedulers", "launchers", "loaders", "trackers")
RIGHT, REFUSED, WRONG, RAW, ABSENT = "right", "refused", "wrong", "raw error", "not installed"
HERE = str(Path(decentfn.__file__).parent)


class Differs(Exception):
    """It ran, and gave other numbers than the reference."""


class Row(NamedTuple):
    """Some packages used together with decentfn, in several ways."""

    kind: str
    packages: str
    """Names of distributions, separated by commas; the first one is what the row is about."""
    what: str
    attempt: Callable[[str], None]
    """Runs it in one way; raises `Differs` if the numbers are others than the reference's."""
    ways: tuple[str, ...]
    special: str
    """What a user has to do, if that is more than for a module or an optimizer of PyTorch."""

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.packages}: {self.what}"


class Outcome(NamedTuple):
    word: str
    sentence: str = ""


ROWS: dict[str, Row] = {}


def add(row: Row) -> None:
    """Put a row into the table."""
    assert row.key not in ROWS, row.key
    ROWS[row.key] = row


def check(kind: str, packages: str, what: str, *ways: str, special: str = "") -> Callable[[Any], Any]:
    """Register the function below, which does one way by itself: `function(way)`, or `function()` if there is one."""

    def register(function: Any) -> Any:
        attempt = function if len(ways) > 1 else lambda way: function()
        add(Row(kind, packages, what, attempt, ways, special))
        return function

    return register


def load() -> dict[str, Row]:
    """Return all rows, by their keys."""
    for name in ("science", "models", "language", *KINDS[1:]):
        importlib.import_module(f"tests.others.{name}")
    return ROWS


def versions(row: Row) -> str | None:
    """Return the packages with their versions, or None if one is missing."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in row.packages.split(", "))
    except metadata.PackageNotFoundError:
        return None


def outcome(row: Row, way: str) -> Outcome:
    """Run a row in one way."""
    try:
        row.attempt(way)
    except Differs as error:
        return Outcome(WRONG, str(error))
    except Exception as error:
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return Outcome(REFUSED if is_ours(error, said) else RAW, in_one_line(said))
    return Outcome(RIGHT)


def is_ours(error: BaseException, said: str) -> bool:
    """Return True if this library refused: it raised the error, or the message names one of its functions."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = bool(frames) and frames[-1].filename.startswith(HERE) and (frames[-1].line or "").startswith("raise ")
    return raised_here or "df." in said or "Error: init(" in said  # a launcher passes on the text alone


def in_one_line(sentence: str) -> str:
    """Without paths and addresses."""
    sentence = re.sub(r"(?:/[\w.+-]+)+/site-packages/", "", sentence)
    sentence = re.sub(r"(?<![\w.:/])/(?:tmp|home|root|work|usr|opt)/\S*", "...", sentence)
    return " ".join(re.sub(r"0x[0-9a-f]{6,}", "0x...", sentence).split())[:3000]
