"""How a step spends its time and what it sends: counters, and a trace in which Perfetto shows all of it.

`torch.profiler` shows this library's ranges by itself (`docs/profiling.md` lists them); where no profiler runs, they cost
nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from torch.profiler import profile

from decentfn.collectives import Communication, communication

__all__ = ["Communication", "communication", "export"]

_BETWEEN = 10**9
"""Added to a thread's number, which is below 2**22, for the track of what lies between its posts and waits."""

_STEP, _POST, _WAIT = "decentfn::step ", "decentfn::post ", "decentfn::wait "

Event = dict[str, Any]


def export(profile: profile, path: str | Path) -> None:
    """Write the trace as `profile.export_chrome_trace(path)` does, so that Perfetto (https://ui.perfetto.dev) shows all of it.

    PyTorch draws gloo's messages, which overlap, over the thread that posted them; Perfetto drops what does not nest, the waits
    among it. Here they have rows of their own, such as "exchange 2: gloo:recv", from the post to the end of the wait.
    A track "between posts and waits" has what a step does before, between and after these, such as "after wait exchange 2".

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
    trace["traceEvents"] = [*_with_rows_for_messages(events), *_between(events)]
    with opened(path, "wt") as file:
        json.dump(trace, file, allow_nan=False)


def _with_rows_for_messages(events: list[Event]) -> Iterator[Event]:
    """The events; those of gloo begin and end for themselves, and say which post they belong to."""
    posts: dict[Any, Event] = {}
    for number, event in enumerate(events):
        name = event["name"]
        if name.startswith(_POST):
            posts[event["tid"]] = event
        if event["ph"] != "X" or not name.startswith("gloo:"):
            yield event
            continue
        post = posts.get(event["tid"])
        if post is not None and _holds(post, event):
            name = f"{post['name'].removeprefix(_POST)}: {name}"
        row = {"cat": "message", "name": name, "id": number, "pid": event["pid"], "tid": event["tid"]}
        yield row | {"ph": "b", "ts": event["ts"]}
        yield row | {"ph": "e", "ts": _end(event)}


def _between(events: list[Event]) -> Iterator[Event]:
    """What lies in each step before, between and after its posts and waits."""
    ranges = [e for e in events if e["ph"] == "X" and e["name"].startswith((_STEP, _POST, _WAIT))]
    for pid, tid in {(e["pid"], e["tid"]) for e in ranges}:
        track = {"pid": pid, "tid": tid + _BETWEEN}
        yield track | {"ph": "M", "name": "thread_name", "args": {"name": "between posts and waits"}}
        ours = [e for e in ranges if e["tid"] == tid]
        for index, step in enumerate(ours):
            if step["name"].startswith(_STEP):
                inside = takewhile(lambda e, step=step: _holds(step, e), islice(ours, index + 1, None))
                yield from (track | {"ph": "X", "cat": "between"} | part for part in _parts(step, inside))


def _parts(step: Event, inside: Iterator[Event]) -> Iterator[Event]:
    name, begin = "before posts", step["ts"]
    for event in inside:
        yield {"name": name, "ts": begin, "dur": max(0.0, event["ts"] - begin)}
        name, begin = event["name"].replace("decentfn::", "after "), _end(event)
    yield {"name": name, "ts": begin, "dur": max(0.0, _end(step) - begin)}


def _holds(outer: Event, event: Event) -> bool:
    return outer["ts"] <= event["ts"] <= _end(outer)


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]
