"""One HTML file that shows runs, drawn by Plotly."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decentfn.core import brief, require
from decentfn.plots.graphs import COLORS, GRAY
from decentfn.timing import Timeline, Trace
from decentfn.train import logs

_POINTS, _BARS = 60_000, 1200
"""Most points of the curves of losses, and steps in a timeline, which a browser draws in a second or two."""
_MARKS = {"restart": "x", "lost": "triangle-down", "joined": "triangle-up", "checkpoint": "diamond-open"}
_NAME, _REAL = (int, str), (int, float)
_LINKS = "links", "[from, to, bytes, is_inside]", (_NAME, _NAME, _REAL, int)
_WAITED = "waited", "[who, for whom, seconds]", (_NAME, (*_NAME, type(None)), _REAL)
_CLEAR: Any = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "template": "none"}
_STYLE = """
:root {color-scheme: light dark; --ink: #222; --paper: #fff; --grid: #ddd}
@media screen and (prefers-color-scheme: dark) {:root {--ink: #ddd; --paper: #111418; --grid: #3b4048}}
body {font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); width: 960px; margin: 2em auto}
td {padding: .1em .8em; border-bottom: 1px solid var(--grid); overflow-wrap: break-word; max-width: 20em}
.main-svg text:not(.hoverlayer text) {fill: var(--ink) !important}
.gridlayer path {stroke: var(--grid) !important}
section {break-inside: avoid} @page {size: A4 landscape; margin: 10mm}
"""


def page(paths: Sequence[Path]) -> str:
    """Return the HTML page of the runs in these directories or files."""
    try:
        from plotly.io import to_html
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ModuleNotFoundError("decentfn report needs plotly: pip install 'decentfn[report]'.") from None
    files = [file for path in paths for file in _files(path)]
    runs = [_run(file) for file in files if file.suffix != ".json"]
    sections = [_curves(runs), *(_communication(its) for its in runs if its.links)] if runs else []
    sections += [_timeline(file) for file in files if file.suffix == ".json"]
    body = f"<h1>{html.escape(', '.join(map(str, paths)))}</h1>{_table(runs) if runs else ''}"
    for words, figure in sections:
        drawn = to_html(figure, full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
        body += f"<section><p>{html.escape(words)}</p>{drawn}</section>"
    head = f"<title>decentfn report</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}</head><body>{body}</body></html>'


def _text(value: Any) -> str:
    """Return a name as text for Plotly, which reads tags, entities, %{...} and $...$; of a long one both ends."""
    text = text if len(text := " ".join(str(value).split())) <= 80 else f"{text[:20]} ... {text[-55:]}"
    return html.escape(text, quote=False).replace("%", "&#37;").replace("$", "&#36;")


def _table(runs: Sequence[_Run]) -> str:
    """Return the last values of runs, and settings; of several runs those that differ."""
    rows: list[tuple[Any, ...]] = [("", *(its.name for its in runs)), ("workers", *(len(its.workers) for its in runs))]
    rows += [(name, *(f"{its.axes[name][-1]:,.6g}".replace("nan", "-") for its in runs)) for name in runs[0].axes]
    for name in dict.fromkeys(name for its in runs for name in its.settings):
        row = [its.settings.get(name, "-") for its in runs]
        rows += [(f"config: {name}", *row)] if len(runs) == 1 or len(set(row)) > 1 else []
    cells = ("".join(f"<td>{html.escape(str(x))}</td>" for x in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


class _Run(NamedTuple):
    """A log: a row for each line with a step and a loss."""

    name: str
    settings: dict[str, str]
    workers: list[Any]
    axes: dict[str, np.ndarray]
    losses: np.ndarray
    loss: np.ndarray
    distance: np.ndarray
    marks: dict[str, list[tuple[int, str]]]
    links: Counter[tuple[Any, Any, bool]]
    waited: Counter[tuple[Any, Any]]
    processes: list[Any]


def _run(path: Path) -> _Run:
    lines, marks = logs.read(path), dict[str, list[tuple[int, str]]]()
    rows = [line for line in lines if "step" in line and "loss" in line]
    require(bool(rows), f"report {path}", "no line has a step and a loss; df.logs.JSONLines.record writes such lines.")
    try:
        each = [_losses(line) for line in rows]
        if not (workers := _in_order({i for own in each for i in own})):
            raise ValueError("no worker has a loss")
        losses = np.array([[own.get(i, np.nan) for i in workers] for own in each])
        columns = ("loss", "consensus_distance", "step", "seconds", "bytes_sent")
        loss, distance, steps, seconds, planned = np.array([[_number(row.get(x)) for row in rows] for x in columns])
        sent = np.cumsum([sum(x[2] for x in _entries(row, _LINKS)) for row in rows]) / len(workers)
        axes = {"steps": steps, "seconds": seconds, "MB sent by a worker": (sent if sent[-1] else planned) / 1e6}
        for k, (before, after) in enumerate(pairwise(rows), start=1):
            at, had, has = f"before step {after['step']}", set(each[k - 1]), set(each[k])
            if before.get("started") != after.get("started"):
                seconds[k:] += seconds[k - 1]
                marks.setdefault("restart", []).append((k, at))
            for kind, i in [*(("lost", i) for i in sorted(had - has)), *(("joined", i) for i in sorted(has - had))]:
                marks.setdefault(kind, []).append((k, f"{i} {at}"))
        for step in (line["step"] for line in lines if "checkpoint" in line and line.get("step") is not None):
            row = min(int(np.searchsorted(steps, step)), len(rows) - 1)
            marks.setdefault("checkpoint", []).append((row, f"after step {step}"))
        links, waited = Counter[tuple[Any, Any, bool]](), Counter[tuple[Any, Any]]()
        for line in rows:
            for i, j, nbytes, is_inside in _entries(line, _LINKS):
                links[i, j, is_inside] += nbytes
            for i, j, x in _entries(line, _WAITED):
                waited[i, j] += x
        processes = _in_order({i for i, _ in waited} | {i for *ends, _ in links for i in ends})
        told = [line["config"] for line in lines if "step" not in line and "config" in line]
        named = [config if isinstance(config, dict) else {"": config} for config in told]
        settings = {key: str(x) for config in named for key, x in config.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"report {path}: a line is not as df.logs.JSONLines.record writes it: {error}.") from error
    name = str(path.with_suffix("")) + ("" if path.read_bytes().endswith(b"\n") else " (but its last line, cut short)")
    return _Run(name, settings, workers, axes, losses, loss, distance, marks, links, waited, processes)


def _losses(line: dict[str, Any]) -> dict[Any, float]:
    x = line.get("losses", line["loss"])
    values = [_number(one) for one in (x if isinstance(x, list) else [x])]
    workers = line.get("workers", [*range(len(values))])
    if not isinstance(workers, list) or len(workers) != len(values) or not all(isinstance(i, _NAME) for i in workers):
        raise ValueError(f"workers={brief(workers)} for the losses {brief(x)}, expected the number or name of each")
    return dict(zip(workers, values, strict=True))


def _entries(line: dict[str, Any], form: tuple[str, str, tuple[Any, ...]]) -> list[Any]:
    name, said, kinds = form
    rows = line.get(name) or []
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(kinds) and all(map(isinstance, row, kinds)) for row in rows
    ):
        raise ValueError(f"{name}={brief(rows)}, expected rows {said}")
    return rows


def _in_order(names: set[Any]) -> list[Any]:
    return sorted(names, key=lambda i: (isinstance(i, str), i))


def _number(x: Any) -> float:
    x = x.get("mean") if isinstance(x, dict) else np.mean([*map(_number, x)]) if isinstance(x, list) else x
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
        raise ValueError(f"{brief(x)} is no number")
    return float(x) if x is not None and abs(x) < 1e300 else np.nan


def _files(path: Path) -> list[Path]:
    """Return the logs, traces and timelines of a run's directory, or the file."""
    if path.is_file():
        return [path]
    found = [file for form in ("*.jsonl", "trace*.json", "timeline*.json") for file in sorted(path.glob(form))]
    require(
        bool(found), f"report {path}", "no *.jsonl, trace*.json or timeline*.json is there; pass a run's directory."
    )
    return found


def _times(path: Path) -> Timeline:
    """Read what `Timeline.save` or `Trace.save` wrote; in a trace, a step begins when the last one has ended."""
    if b'"start"' in (text := path.read_bytes()):
        try:
            told = json.loads(text)
            start, end, waited, messages = (np.array(told[x], float) for x in ("start", "end", "waited", "messages"))
            if start.ndim != 2 or not start.size or not start.shape == end.shape == waited.shape:
                raise ValueError("start, end and waited are [steps, N]")
            return Timeline(start, end, waited, None, messages.reshape(-1, 4))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"report {path}: not a timeline that Timeline.save wrote ({error!r}).") from error
    its = Trace.load(path)
    since = [(0.0, *row) for row in its.ended]
    taken = [(i, since[i][k], j, s) for i, row in enumerate(its.taken) for k, own in enumerate(row) for j, s in own]
    messages = [(j, i, its.ended[j][s - its.first[j]], now) for i, now, j, s in taken]
    rows = np.full((2, max(its.num_steps), its.num_workers), np.nan)
    for i, row in enumerate(its.ended):
        rows[:, : len(row), i] = since[i][:-1], row
    return Timeline(rows[0], rows[1], 0 * rows[0], None, np.array(messages).reshape(-1, 4))


def _panels(titles: Sequence[str], height: int, columns: int) -> Any:
    from plotly.subplots import make_subplots

    rows = -(-len(titles) // columns)
    made = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.07, vertical_spacing=0.3 / rows)
    margin, legend = {"l": 55, "r": 15, "t": 30, "b": 45}, {"orientation": "h", "y": -0.12}
    return made.update_layout(width=960, height=height, margin=margin, legend=legend, hovermode="closest", **_CLEAR)


def _curves(runs: Sequence[_Run]) -> tuple[str, Any]:
    """Draw the losses against steps, seconds and bytes, and the consensus distance."""
    known = [any((its.axes[axis] >= 0).any() for its in runs) for axis in runs[0].axes]
    titles = [f"loss against {axis}{'' if has else ': unknown'}" for axis, has in zip(runs[0].axes, known, strict=True)]
    titles.append("consensus distance" + ("" if any((its.distance > 0).any() for its in runs) else ": none"))
    figure = _panels(titles, 610, 2)
    most = max(100, _POINTS // (3 * sum(len(its.workers) for its in runs)))
    for number, its in enumerate(runs):
        rows, color, n, name = _shown(its.loss, most), COLORS[number % 6], len(its.workers), _text(its.name)

        def curve(place: int, x: Any, y: Any, what: str, at: Any, look: Any, name: str = name) -> None:
            hover = f"{name}, {what}<br>%{{x:,.6~g}}: %{{y:.5~g}}<extra></extra>"
            look = {"mode": "lines" if len(at) > 1 else "markers", "hovertemplate": hover, "showlegend": False} | look
            figure.add_scatter(x=x[at], y=y[at], row=place // 2 + 1, col=place % 2 + 1, **look)

        thin = {"line_width": 0.8, "line_color": f"rgba{(*bytes.fromhex(color[1:]), max(0.15, min(0.6, 4 / n)))}"}
        thick = {"line_width": 2.4, "line_color": color}
        for place, x in enumerate(its.axes.values()):
            for k, i in enumerate(its.workers if n > 1 else ()):
                curve(place, x, its.losses[:, k], f"worker {_text(i)}", rows, thin)
            curve(place, x, its.loss, "mean", rows, thick | {"name": name, "showlegend": place == 0})
            for kind, marks in its.marks.items():
                at, words = [row for row, _ in marks], [_text(f"{kind} {words}") for _, words in marks]
                marker = {"symbol": _MARKS[kind], "size": 14, "color": color, "line": {"width": 2, "color": color}}
                look = {"mode": "markers", "marker": marker, "name": kind, "showlegend": place == 0, "text": words}
                curve(place, x, its.loss, kind, at, look | {"hovertemplate": "%{text}<extra></extra>"})
        curve(3, its.axes["steps"], its.distance, "distance", _shown(its.distance, most), thick)
    figure.update_yaxes(type="log", row=2, col=2)
    return "Thick: the mean. Thin: each worker. Of long runs, each part's smallest and largest mean.", figure


def _shown(y: np.ndarray, most: int) -> np.ndarray:
    """Return the rows to draw: all, or of each part of them those of the smallest and the largest value."""
    parts, y = np.array_split(np.arange(len(y)), min(len(y), most // 2)), np.where(np.isnan(y), np.inf, y)
    return np.arange(len(y)) if len(y) <= most else np.unique([(p[y[p].argmin()], p[y[p].argmax()]) for p in parts])


def _communication(its: _Run) -> tuple[str, Any]:
    """Draw who waited for whom, and on each link an arrow, the larger the more bytes it carried."""
    figure = _panels(["seconds that a process (row) waited for another (column)", "links"], 480, 2)
    who, names = its.processes, [_text(i) for i in its.processes]
    order, seconds = {i: k for k, i in enumerate(who)}, np.zeros((len(who), len(who) + 1))
    for (i, j), x in its.waited.items():
        seconds[order[i], order.get(j, -1)] += x
    waits = seconds[:, -1] = seconds.sum(1)
    look = {"colorscale": [[0, "rgba(213,94,0,.1)"], [1, "rgb(213,94,0)"]], "showscale": False, "row": 1, "col": 1}
    look |= {"hovertemplate": "%{y} waited %{z:.4~g} s for %{x}<extra></extra>", "hoverongaps": False}
    figure.add_heatmap(x=[*names, "all"], y=names, z=np.where(seconds, seconds, np.nan), **look)
    figure.update_xaxes(type="category", col=1).update_yaxes(type="category", autorange="reversed", col=1)
    circle = np.stack([f(2 * np.pi * np.arange(len(who)) / len(who)) for f in (np.sin, np.cos)], 1)
    for is_inside, name, color in (True, "inside a node", COLORS[2]), (False, "between nodes", COLORS[1]):
        own = {(order[i], order[j]): sent / 1e6 for (i, j, inside), sent in its.links.items() if inside == is_inside}
        ends = circle[np.array(list(own), int).reshape(-1, 2)]  # [links, 2, xy]
        x, y = np.insert(ends, 2, np.nan, axis=1).reshape(-1, 2).T
        look = {"name": f"{name}: {sum(own.values()):,.2f} MB", "hoverinfo": "skip", "line_color": color}
        figure.add_scatter(x=x, y=y, mode="lines", line_width=1, row=1, col=2, **look)
        turns, (x, y) = np.degrees(np.arctan2(*(ends[:, 1] - ends[:, 0]).T)), (0.3 * ends[:, 0] + 0.7 * ends[:, 1]).T
        size = 4 + 24 / len(who) ** 0.5 * np.array(list(own.values())) / (max(its.links.values()) / 1e6)
        marker = {"symbol": "arrow", "angle": turns, "size": size, "color": color, "line_width": 0}
        look = {"mode": "markers", "marker": marker, "hoverinfo": "text", "showlegend": False}
        words = [f"{names[i]} to {names[j]}: {sent:,.2f} MB" for (i, j), sent in own.items()]
        figure.add_scatter(x=x, y=y, text=words, row=1, col=2, **look)
    look = {"mode": "text", "text": names, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=1.1 * circle[:, 0], y=1.1 * circle[:, 1], row=1, col=2, **look)
    figure.update_xaxes(visible=False, col=2).update_yaxes(visible=False, scaleanchor="x2", range=[-1.2, 1.2], col=2)
    if (usual := np.median(waits)) < 0.05 * its.axes["seconds"][-1]:
        return f"{its.name}: half of the processes waited less than 5 % of the time.", figure
    least = f"process {who[waits.argmin()]} waited least, {waits.min():.3g} s"
    verdict = "the others wait for it." if waits.min() < usual / 2 else "no single one is slow, but the links."
    return f"{its.name}: half of the processes waited {usual:.3g} s or more; {least}: {verdict}", figure


def _timeline(file: Path) -> tuple[str, Any]:
    """Draw the first steps as bars, and their messages as lines from sender to receiver."""
    its = _times(file)
    n, shown = its.start.shape[1], max(1, min(len(its.start), _BARS // its.start.shape[1]))
    figure = _panels([""], min(1000, 170 + 24 * n), 1)
    start, end, waited = (x[:shown].ravel() for x in its[:3])
    hover = "worker %{y}, step %{customdata}<br>%{fullData.name} from %{base:.5~g} s to %{x:.5~g} s<extra></extra>"
    for what, since, until, color in ("computes", start, end - waited, 5), ("waits", end - waited, end, 4):
        some, at = until > since, np.indices((shown, n)).reshape(2, -1)
        bar = {"base": since[some], "x": (until - since)[some], "customdata": at[0, some], "y": at[1, some]}
        figure.add_bar(**bar, orientation="h", width=0.5, name=what, hovertemplate=hover, marker_color=COLORS[color])
    m = np.asarray(its.messages)
    m = m[(m[:, 0] != m[:, 1]) & (m[:, 3] <= np.nanmax(end))][: 2 * _BARS]
    x, y = (np.insert(m[:, pair], 2, np.nan, axis=1).ravel() for pair in ([2, 3], [0, 1]))
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": GRAY, "width": 1}, name="messages", hoverinfo="skip")
    words = [f"{i:.0f} to {j:.0f}<br>left at {leaves:.5g} s, there at {there:.5g} s" for i, j, leaves, there in m]
    look = {"marker": {"size": 5, "color": GRAY}, "hoverinfo": "text", "showlegend": False}
    figure.add_scatter(x=m[:, 3], y=m[:, 1], mode="markers", text=words, **look).update_layout(barmode="overlay")
    figure.update_xaxes(title="seconds").update_yaxes(title="worker", autorange="reversed", dtick=-(-n // 16))
    return f"{file}: the first {shown} of {len(its.start)} steps of each worker.", figure
