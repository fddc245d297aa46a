"""Profiling of steps: communication counters, and traces that Perfetto shows completely.

`torch.profiler` shows this library's ranges (`docs/profiling.md` lists them), which cost nothing without a profiler.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile

from decentfn.comm.collectives import Communication, communication

__all__ = ["Communication", "communication", "export"]

_POST = "decentfn::post "


def export(profile: profile, path: str | Path) -> None:
    """Write the trace like `profile.export_chrome_trace(path)`, but for Perfetto (https://ui.perfetto.dev).

    PyTorch puts gloo's overlapping messages on the thread that posted them, and Perfetto drops events that do not nest,
    such as the waits. Here messages have their own rows, such as "exchange 2: gloo:recv", from post to end of wait.

    Args:
        profile: a finished `torch.profiler.profile`, or the argument of `on_trace_ready`.
        path: ends in .json or .json.gz.
    """
    path = Path(path)
    profile.export_chrome_trace(str(path))
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace = json.load(file, parse_constant=lambda name: None)  # viewers do not read NaN
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0.0))
    trace["traceEvents"] = [*_with_rows_for_messages(events)]
    with opened(path, "wt") as file:
        json.dump(trace, file, allow_nan=False)


def _with_rows_for_messages(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events; gloo's become separate begin and end events, named after their post."""
    posts: dict[Any, dict[str, Any]] = {}
    for number, event in enumerate(events):
        name = event["name"]
        if name.startswith(_POST):
            posts[event["tid"]] = event
        if event["ph"] != "X" or not name.startswith("gloo:"):
            yield event
            continue
        post = posts.get(event["tid"])
        if post is not None and post["ts"] <= event["ts"] <= post["ts"] + post["dur"]:
            name = f"{post['name'].removeprefix(_POST)}: {name}"
        row = {"cat": "message", "name": name, "id": number, "pid": event["pid"], "tid": event["tid"]}
        yield row | {"ph": "b", "ts": event["ts"]}
        yield row | {"ph": "e", "ts": event["ts"] + event["dur"]}
