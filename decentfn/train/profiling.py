"""How a step spends its time and what it sends: counters, and a trace in which Perfetto shows all of it.

`torch.profiler` shows this library's ranges by itself (`docs/profiling.md` lists them); where no profiler runs, they cost
nothing.
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
    """Write the trace as `profile.export_chrome_trace(path)` does, so that Perfetto (https://ui.perfetto.dev) shows all of it.

    PyTorch draws gloo's messages, which overlap, over the thread that posted them; Perfetto drops what does not nest, the waits
    among it. Here they have rows of their own, such as "exchange 2: gloo:recv", from the post to the end of the wait.

    Args:
        profile: a `torch.profiler.profile` that has ended, or what `on_trace_ready` is called with.
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
    """Yield the events; those of gloo begin and end for themselves, and say which post they belong to."""
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
