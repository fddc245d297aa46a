"""How values are shown in errors."""

from __future__ import annotations

_LONGEST = 60


def brief(value: object) -> str:
    """A value's repr on one line, cut where it gets long: a module's is a page.

    >>> brief("ring"), brief(list(range(100)))
    ("'ring'", '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...')
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
