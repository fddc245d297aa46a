"""Ctrl-C under torchrun interrupts every process: each says in a line where its script was."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARIES = (str(Path(__file__).parent.parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "platlib")), "<")


def say_interrupts_in_a_line() -> None:
    """From now on a `KeyboardInterrupt` that nobody catches is told in a line, not by a page for each process."""
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)
            return
        own = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace) if _is_users(frame)]
        place = ""
        if own:
            file, line = own[-1]
            place = f" in {file}, line {line}: {linecache.getline(file, line).strip()}"
        print(f"interrupted (Ctrl-C){place}", file=sys.stderr)

    sys.excepthook = say


def _is_users(frame: FrameType) -> bool:
    """Not a library's, nor of what Inductor has written."""
    name = frame.f_globals.get("__name__", "")
    return not frame.f_code.co_filename.startswith(_LIBRARIES) and not name.startswith("torch.")
