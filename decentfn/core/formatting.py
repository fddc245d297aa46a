"""Messages: values and errors in them, and warnings at the user's line."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

_LONGEST, _LONGEST_ERROR = 60, 300


def brief(value: object) -> str:
    """Return a value's repr on one line without addresses, truncated if it is long, such as a module's.

    >>> brief("ring"), brief(list(range(100)))
    ("'ring'", '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...')
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def brief_error(error: BaseException) -> str:
    r"""Return an error's type and the first line of its message, with the next line if the first ends in a colon.

    >>> brief_error(KeyError("labels"))
    "KeyError: 'labels'"
    >>> brief_error(RuntimeError("the backend raised:\nValueError: no kernel\n\nand a page more"))
    'RuntimeError: the backend raised: ValueError: no kernel'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    first = first if len(first) <= _LONGEST_ERROR else f"{first[: _LONGEST_ERROR - 3]}..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any]:
    """Return the first elements in which two unequal lists differ; "nothing" is where one has ended."""
    return next(pair for pair in zip_longest(one, other, fillvalue="nothing") if pair[0] != pair[1])


def warn(message: str) -> None:
    """Warn with the line of the user's call, the first that is neither in this package nor in a decorator."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] in ("decentfn", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
