"""Command that draws runs."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from decentfn.plots.report import page


def report(runs: Positional[tuple[Path, ...]], *, out: Path = Path("report.html")) -> None:
    """Write one HTML file that shows runs from their logs, and timelines of workers.

    Args:
        runs: directories with logs (*.jsonl) or with traces and timelines (trace*.json, timeline*.json), or such files.
        out: the file, for a browser; it needs no network.
    """
    if not runs:
        raise ValueError("report: name a run's directory or log, `decentfn report runs/a`.")
    out.write_text(page(runs), encoding="utf-8")
    print(out)
