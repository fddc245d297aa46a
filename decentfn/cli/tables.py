"""Tables: drawn in a terminal, tab-separated in a pipe, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(rows: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> None:
    """Print rows with the same keys, the columns' heads; None is printed as "-".

    In a narrow terminal texts are broken, and numbers never. A text of the first column is printed once for rows in
    succession.
    """
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return
    console, heads = Console(), list(rows[0]) if rows else []
    lines = [[_text(row[head]) for head in heads] for row in rows]
    if not console.is_terminal:
        print("\n".join("\t".join(line) for line in [heads, *lines]))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column, head in enumerate(heads):
        is_number = any(isinstance(row[head], (int, float)) for row in rows)
        cells = [line[column] for line in lines]
        width = max(map(len, [*cells, *head.split()]))  # a long head takes two lines
        if is_number:
            table.add_column(head, justify="right", width=width)
        else:
            table.add_column(head, overflow="fold", max_width=width)
    before = None
    for first, *others in lines:
        table.add_row("" if first == before else first, *others)
        before = first
    console.print(table)


def show_facts(facts: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print one name and value per line."""
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    head, *others = facts.items()
    show([dict(zip((head[0], _text(head[1])), (name, _text(value)), strict=True)) for name, value in others])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)
